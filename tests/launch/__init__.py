"""Both commands, launchers, settings."""

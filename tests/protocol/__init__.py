"""The contract: messages, layout, modes, errors."""

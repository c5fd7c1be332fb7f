"""Bad input, hostile clients, permissions, TLS."""

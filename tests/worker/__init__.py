"""What a session does to models, optimizers, data and state."""

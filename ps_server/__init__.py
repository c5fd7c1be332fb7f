"""The servers: shards that hold weights and optimizer state, and the coordinator that knows who takes part."""

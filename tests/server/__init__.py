"""The rules of a shard and of the coordinator, and their parts."""

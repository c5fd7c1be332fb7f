"""Workers that are groups of processes."""

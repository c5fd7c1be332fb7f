"""Ray, of three nodes on this machine."""

"""Training scripts that tests start, as users write them."""

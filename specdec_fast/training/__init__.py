"""Training of drafters for a target of the caller."""

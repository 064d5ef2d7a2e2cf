"""The engine: requests in, steps, outputs."""

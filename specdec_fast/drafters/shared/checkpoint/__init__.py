"""Checkpoints of learned drafters: their settings and weights, read, checked and written in one way for all kinds."""

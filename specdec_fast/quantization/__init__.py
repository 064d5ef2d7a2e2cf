"""Weights in few bits: how they are packed, rounded at load, and read from checkpoints that hold their own codes."""

"""Hugging Face models on ragged rows: loading, checks, forwards and timing."""

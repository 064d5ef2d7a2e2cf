"""Hugging Face models on ragged rows: checked, loaded, run and timed."""

"""Runs models on ragged rows: their forwards, and the drafting and the verification of a step."""

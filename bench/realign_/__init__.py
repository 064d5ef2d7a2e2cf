"""``python -m bench.realign``: ways to shift the rows of a dense cache."""

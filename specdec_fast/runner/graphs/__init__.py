"""Forwards recorded as graphs, one per bucket of shapes."""

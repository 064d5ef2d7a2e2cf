"""Hugging Face models: loading, checks, and the hooks by which their forwards use ops and pages."""

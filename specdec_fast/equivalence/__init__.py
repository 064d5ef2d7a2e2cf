"""Comparison of outputs with ``transformers`` and with plain decoding."""

"""Outputs held against ``transformers`` and against plain decoding."""

"""``python -m bench.engine`` and ``bench.ablation``: how methods decode all prompts, and what they are measured by."""

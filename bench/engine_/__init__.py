"""Parts of ``python -m bench.engine`` and ``bench.ablation``: methods, their summaries and plots."""

"""Parts of ``bench.model_step``."""

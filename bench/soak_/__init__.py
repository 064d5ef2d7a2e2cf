"""Parts of ``bench.soak``."""

"""Parts of ``bench.laws``."""

"""Parts of ``bench.aot``."""

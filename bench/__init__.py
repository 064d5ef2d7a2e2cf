"""Benchmarks: ``python -m bench.engine``. Figures and how they were made stand in bench/README.md."""

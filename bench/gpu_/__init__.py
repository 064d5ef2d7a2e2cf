"""``python -m bench.gpu``: its tasks, each in a process of its own."""

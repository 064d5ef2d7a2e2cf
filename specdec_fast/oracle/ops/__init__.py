"""The ops in plain PyTorch: the reference of every kernel, and a backend that runs anywhere."""

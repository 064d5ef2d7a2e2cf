"""The ops in plain PyTorch: the truth every kernel is compared with, and a backend that runs anywhere."""

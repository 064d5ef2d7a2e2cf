"""Triton kernels, one file per op; imported as ``specdec_fast.triton_kernels``."""

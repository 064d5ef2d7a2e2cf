"""Forward programs on GPUs: launches of ops and of generated kernels."""

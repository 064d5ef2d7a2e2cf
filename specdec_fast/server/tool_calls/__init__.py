"""Tool calls: how models write them, and how an answer that must have one is constrained; without HTTP."""

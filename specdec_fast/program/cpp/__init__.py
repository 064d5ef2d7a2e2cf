"""Forward programs on CPUs: one call of ``csrc/program/`` per forward, or per step."""

"""The ``"mtp"`` drafter: the multi-token prediction layer that the target's own checkpoint carries."""

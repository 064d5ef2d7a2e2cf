"""The ``"suffix"`` drafter: what followed the longest copies of a sequence's end, in the texts of all requests."""

"""The ``"specblock"`` drafter: blocks of several tokens, one or two calls a step."""

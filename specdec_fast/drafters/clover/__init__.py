"""The ``"clover"`` drafter: heads that know the tokens before theirs."""

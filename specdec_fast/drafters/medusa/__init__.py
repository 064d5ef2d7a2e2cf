"""The ``"medusa"`` drafter: heads that predict several tokens from one hidden state."""

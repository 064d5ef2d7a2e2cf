"""The ``"eagle3"`` drafter: a layer over the hidden states of the target."""

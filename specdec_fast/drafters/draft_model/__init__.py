"""The draft model: a small causal model with a paged KV cache of its own."""

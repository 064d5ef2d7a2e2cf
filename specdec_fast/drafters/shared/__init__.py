"""What learned drafters share: KV entries, features of hidden states, layers, trees, and the reading of checkpoints."""

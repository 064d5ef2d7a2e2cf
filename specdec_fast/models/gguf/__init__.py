"""Models from GGUF files: their config, and their weights tensor by tensor."""

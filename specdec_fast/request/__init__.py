"""One request: its tokens, where they end, and their text."""

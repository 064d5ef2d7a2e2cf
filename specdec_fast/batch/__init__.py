"""The rows of one forward, and how each sequence of a batch chooses its tokens."""

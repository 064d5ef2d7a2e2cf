"""The target's own weights in few bits as its drafter."""

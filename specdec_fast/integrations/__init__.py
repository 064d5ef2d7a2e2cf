"""The engine inside other projects; each module needs the extra of its name."""

"""From a model to instructions: a run of its forward is recorded, operation by operation."""

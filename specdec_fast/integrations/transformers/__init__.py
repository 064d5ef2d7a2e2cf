"""transformers: ``model.generate(**inputs, custom_generate=custom_generate)`` decodes with the engine."""

from specdec_fast.integrations.transformers.generation import custom_generate, generate

__all__ = ["custom_generate", "generate"]

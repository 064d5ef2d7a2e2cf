"""``model.generate(custom_generate="FOLDER", trust_remote_code=True)`` decodes a padded batch with specdec_fast."""

from specdec_fast.integrations.transformers import generate

__all__ = ["generate"]

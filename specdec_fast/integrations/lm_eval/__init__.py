"""lm-eval: the model ``specdec_fast``, which scores and generates with an engine. Needs the extra ``eval``.

``python -m specdec_fast.integrations.lm_eval`` is the command ``lm_eval`` that knows this model.
"""

from specdec_fast.integrations.lm_eval.model import EngineLM

__all__ = ["EngineLM"]

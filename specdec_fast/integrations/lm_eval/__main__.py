"""The command ``lm_eval`` with the model ``specdec_fast``, which the import of this package has registered."""

from lm_eval.__main__ import cli_evaluate

cli_evaluate()

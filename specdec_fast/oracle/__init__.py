"""The oracle: the two published algorithms in plain PyTorch on stock Hugging Face models.

It uses dense, right-aligned tensors, ``DynamicCache`` and Python loops, to be read beside the paper ("Batch Speculative
Decoding Done Right"). It is the reference of the tests, and the baseline without custom kernels of every benchmark. It
imports nothing from the engine.
"""

from specdec_fast.oracle.autoregressive import autoregressive
from specdec_fast.oracle.eqspec import eqspec
from specdec_fast.oracle.exspec import exspec
from specdec_fast.oracle.step import OracleRun, StepRecord, StopRule

__all__ = ["OracleRun", "StepRecord", "StopRule", "autoregressive", "eqspec", "exspec"]

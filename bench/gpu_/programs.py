"""Task "programs" of ``bench.gpu``: the bundled pair as forward programs, in fp32, too, where they are no default.

In fp32 the reference is ``transformers`` at batch 1, as in "equivalence". In bf16 it is plain decoding by programs at
batch 1: rows have bits of their own, so no token may differ. The first engine generates and compiles the kernels. On a
CPU its own programs, those in C++, try the check.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers.utils import logging

from bench.common.device import full_precision
from bench.common.measurement import Tokens
from bench.gpu_.equivalence import PLAIN, Pair, Sizes, compare_all, name_of
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import Engine
from specdec_fast.program.executors import EXECUTORS

FULL = Sizes(32, 64, ((1, 8), (5,)), ((1, 8), (5,)))
SMOKE = Sizes(2, 5, ((2,), (3,)), ((2,), (3,)))


class Programs(Pair):
    """The bundled pair; every engine over it must have programs."""

    def decode(self, method: str, batch_size: int, num_draft_tokens: int) -> tuple[Tokens, Engine]:
        """Decode all prompts.

        Raises:
            RuntimeError: PyTorch runs the forwards of the target or of the draft model.

        """
        outputs, engine = super().decode(method, batch_size, num_draft_tokens)
        described = engine.describe()
        if not described["forward_program"]:
            raise RuntimeError(f"the target has no program: {described['why_no_program']}")
        if method != PLAIN and not described["draft"]["forward_program"]:
            raise RuntimeError("the draft model has no program")
        return outputs, engine


def run(settings: Settings, progress: Progress) -> None:
    """Decode in fp32 and in bf16; both are gates."""
    full_precision()
    logging.disable_progress_bar()
    sizes, device_type = SMOKE if settings.smoke else FULL, torch.device(settings.device).type
    backend = next(backend for backend, (on, _) in EXECUTORS.items() if on == device_type)
    progress.note(prompts=sizes.num_prompts, new_tokens=sizes.max_new_tokens, backend=backend)
    progress.attempt("float32", partial(_compare_with_transformers, settings, sizes, backend, progress))
    progress.attempt("bfloat16", partial(_compare_with_plain, settings, sizes, backend, progress))


def _compare_with_transformers(settings: Settings, sizes: Sizes, backend: str, progress: Progress) -> None:
    pair = Programs(torch.float32, settings, sizes, backend)
    compare_all(pair, pair.transformers(1), sizes.exact, progress, gate=True)


def _compare_with_plain(settings: Settings, sizes: Sizes, backend: str, progress: Progress) -> None:
    pair = Programs(torch.bfloat16, settings, sizes, backend)
    expected, _ = pair.decode(PLAIN, 1, 0)
    batch_sizes, ks = sizes.noisy
    for method, batch_size, k in ((m, b, k) for m in ("eqspec", "exspec") for b in batch_sizes for k in ks):
        check = partial(_compare_tokens, pair, expected, (method, batch_size, k), progress)
        progress.attempt(name_of(pair, method, batch_size, k), check)


def _compare_tokens(pair: Programs, expected: Tokens, setting: tuple[str, int, int], progress: Progress) -> None:
    outputs, engine = pair.decode(*setting)
    method, batch_size, k = setting
    equal = sum(found == wanted for found, wanted in zip(outputs, expected, strict=True))
    named = {"method": method, "batch": batch_size, "num_draft_tokens": k, "dtype": "bfloat16"}
    stats = engine.last_run
    progress.row(**named, outputs=len(outputs), equal=equal, seconds=stats.seconds, ops=dict(engine.describe()["ops"]))
    if equal < len(outputs):
        progress.fail(name_of(pair, *setting), f"{len(outputs) - equal} of {len(outputs)} outputs differ from plain")

"""A function of rows over pages, such as the layers of a drafter: run by a forward program, or else by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.program import NotLowerableError, RowFunction, compile_rows
from specdec_fast.program.executors import (
    DeviceProgram,
    DraftedTrees,
    ForwardProgram,
    Programs,
    Projection,
    TokenChoice,
    TreeRules,
    executor_for,
)

_PROBED = [[Rows("a", 0, 3), Rows("b", 0, 6)], [Rows("a", 3, 5), Rows("b", 6, 2)]]  # two forwards


class RowModule:
    """Computes a ``RowFunction``: the logits of some rows, and the hidden states of all.

    The function is recorded as it is: later changes of weights in place take effect. ``ops`` compute it where no
    program does; ``page_size`` is that of the probes; with ``enforce_eager``, PyTorch must run it.
    """

    def __init__(self, function: RowFunction, ops: Ops, page_size: int, enforce_eager: bool = False) -> None:
        self.function = function
        self._ops = ops
        # runs it, and chains and trees of rows in one call; None on a GPU, or if PyTorch runs it
        self.program: ForwardProgram | None = None
        self.device_program: DeviceProgram | None = None  # runs it on a GPU; None elsewhere, or if PyTorch runs it
        executor, self.why_no_program = executor_for(ops, function.layout.device)
        if enforce_eager:
            executor = None
            self.why_no_program = "enforce_eager=True"  # the reason why PyTorch runs it; None if a program does
        if executor is None:
            return
        try:
            programs = executor(compile_rows(function, ops))
            self._expect_to_reproduce(programs, page_size)
            self.program, self.device_program = programs
        except NotLowerableError as error:
            self.why_no_program = str(error)
        except Exception as error:  # a function may raise anything while it is recorded; PyTorch can still run it
            self.why_no_program = f"recording it failed: {type(error).__name__}: {error}"

    @property
    def has_program(self) -> bool:
        """Whether a program runs it."""
        return self.program is not None or self.device_program is not None

    def __call__(
        self, pool: PagePool, batch: RaggedBatch, inputs: Tensor, logit_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute ``T`` rows, chains or trees, of a function that returns hidden states, and write their KV entries.

        ``pool`` has pages of the function's layout; ``inputs`` are ``[T, input_size]``, what the rows take besides
        their tokens; ``logit_rows [R]`` int64 are the rows whose logits are wanted, None: all.

        Returns:
            Logits ``[R, vocab_size]`` and hidden states ``[T, hidden_size]``.
        """
        if self.has_program:
            programs = Programs(self.program, self.device_program)
            logits, hidden = self._run(programs, pool, batch, inputs, logit_rows)
        else:
            logits, hidden = self.function.run(self._ops, pool, batch, inputs, logit_rows)
        assert hidden is not None
        return logits, hidden

    def draft(
        self,
        pool: PagePool,
        rows: Many[Rows],
        token_ids: list[int],
        inputs: Tensor | Projection,
        num_draft_tokens: list[int],
        choice: TokenChoice,
    ) -> Tensor:
        """Draft a chain for each sequence in one call of the program, which must not be None; see ``Program.draft``.

        ``rows`` are those of the first forward, one span per sequence; ``pool`` has pages for all positions.
        """
        assert self.program is not None
        spans = pool.spans(rows, ahead=[count - 1 for count in num_draft_tokens])
        return self.program.draft(spans, token_ids, num_draft_tokens, choice, inputs)

    def draft_trees(
        self,
        pool: PagePool,
        rows: Many[Rows],
        token_ids: list[int],
        inputs: Tensor | Projection,
        rules: TreeRules,
        choice: TokenChoice,
    ) -> DraftedTrees:
        """Draft a tree for each sequence in one call of the program, as ``draft`` does; see ``Program.draft_trees``.

        ``pool`` has pages for the rows and ``rules.num_nodes`` positions behind them.
        """
        assert self.program is not None
        spans = pool.spans(rows, ahead=rules.num_nodes)
        return self.program.draft_trees(spans, token_ids, rules, choice, inputs)

    def step_bytes(self, num_rows: int, num_logit_rows: int) -> int | None:
        """Return the memory of a forward besides weights, KV entries and logits; None if ``program`` is None."""
        if self.program is None:
            return None
        sizes = self.function.input_size + self.function.hidden_size
        rows_bytes = num_rows * sizes * self.function.layout.dtype.itemsize
        counts = num_rows, num_logit_rows
        return self.program.bytes_for(*counts) + self.program.working_bytes(*counts) + rows_bytes

    @torch.inference_mode()
    def _expect_to_reproduce(self, programs: Programs, page_size: int) -> None:
        """Compare a program with PyTorch: the bound is that of models, see ``check_reproduces``."""
        layout = self.function.layout
        pools = [PagePool(layout, 2 * (8 + page_size), page_size) for _ in range(2)]
        for pool in pools:
            pool.add("a")
            pool.add("b")
        for rows in _PROBED:
            token_ids = torch.arange(sum(each.count for each in rows), device=layout.device) % 2
            eager, compiled = (lay_out(pool, rows, token_ids) for pool in pools)
            size = (len(token_ids), self.function.input_size)
            inputs = torch.linspace(-1, 1, size[0] * size[1], device=layout.device).sin().to(layout.dtype).view(size)
            expected = self.function.run(self._ops, pools[0], eager, inputs, eager.last_rows)
            computed = self._run(programs, pools[1], compiled, inputs, compiled.last_rows)
            for result, other in zip(computed, expected, strict=True):
                if result is None or other is None:
                    continue
                distance = float((result.float() - other.float()).norm() / other.float().norm())
                if not distance <= torch.finfo(layout.dtype).eps ** 0.5:
                    raise NotLowerableError(
                        f"its program does not reproduce PyTorch (relative distance {distance:.1e})"
                    )

    def _run(
        self, programs: Programs, pool: PagePool, batch: RaggedBatch, inputs: Tensor, logit_rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        size = self.function.hidden_size
        (program, device_program) = programs
        hidden = inputs.new_empty(len(inputs), size) if size else None
        if program is None:
            assert device_program is not None
            return device_program(batch, pool, logit_rows, hidden, stored(inputs)), hidden
        return program(batch.token_ids, batch, pool.pages, logit_rows, hidden, stored(inputs).contiguous()), hidden

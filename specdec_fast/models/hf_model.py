"""Hugging Face models, run unmodified on ragged rows and a paged KV cache.

An attention function registered with ``transformers.AttentionInterface`` reads the pages, a ``Cache`` subclass
writes them, positions are passed explicitly, and logits are computed for the rows that need them only. There is no
code for any particular architecture; whether a model really goes through these hooks is checked when it is loaded,
by comparing its ragged logits with its own dense ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from specdec_fast.batch.ragged_batch import RaggedBatch, RowPadding, Rows
from specdec_fast.cuda_graphs.buckets import Limits
from specdec_fast.cuda_graphs.capture import capture_for
from specdec_fast.cuda_graphs.graphs import Graphs
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Watch
from specdec_fast.models.experts import expert_configs
from specdec_fast.models.kv_probe import KVProbe
from specdec_fast.models.loading import eos_token_ids
from specdec_fast.models.model_checks import check_decoder, check_ignores_answers, max_positions, sliding_layers
from specdec_fast.models.probe_errors import named_failures
from specdec_fast.models.replaced_functions import active_cache, hooked, lock_of
from specdec_fast.models.replaced_linears import Linears
from specdec_fast.ops import Ops
from specdec_fast.program import NotLowerableError, compile_forward
from specdec_fast.program.executors import executor_for
from specdec_fast.program.ir import ForwardProgram
from specdec_fast.torch_threads import one_thread

MAX_PREFILL_ROWS = 2048  # bounds the activations of a forward, whatever the prompts


class RaggedModel:
    """A causal language model that computes any rows of any sequences in one forward.

    Attributes:
        model: the Hugging Face model, as given; only its attention function and linears are exchanged, only during
            a forward, and by one thread at a time.
        layout: what one position of its KV cache is made of.
        vocab_size: width of its logits.
        max_positions: positions it can serve; None if it does not say.
        eos_token_ids: ids that end a text, from its generation config.
        linears: how its linears are computed during a forward.
        program: its whole forward in one call, made when it is loaded; None where PyTorch runs it.
        why_no_program: the reason for that.
        graphs: its forwards of few rows as graphs; None until ``use_graphs``, and where the device has none.
        row_padding: what its page pools have forwards computed by; as the model does, unless somebody asked for more.
        why_one_by_one: what in it mixes rows, if that is why it computes them one by one.
        page_size: of the pages that it is probed with: those it will be served with, because an op may refuse others.

    """

    def __init__(self, model: PreTrainedModel, ops: Ops, page_size: int = 16, enforce_eager: bool = False) -> None:
        check_decoder(model)
        self.model, self.ops, self.page_size = model, ops, page_size
        self.linears = Linears(model, ops)
        self.config = model.config.get_text_config(decoder=True)
        self._expert_configs = expert_configs(model)
        self._lock = lock_of(self.config)
        self._attached_by: int | None = None  # a thread
        self.row_padding = RowPadding(largest=MAX_PREFILL_ROWS)
        self.why_one_by_one: str | None = None
        self.program: ForwardProgram | None = None
        self._watch: Watch | None = None
        self._enforces_eager = enforce_eager
        self.why_no_program: str | None = None
        self.graphs: Graphs | None = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.max_positions = max_positions(self.config)
        self.eos_token_ids = eos_token_ids(model)
        probe = torch.arange(8, device=model.device) % self.config.vocab_size
        with named_failures(model):
            with self._lock:
                logits = _dense_logits(model, probe)
            self.layout = self._probe_layout(probe)
            self.vocab_size = logits.shape[-1]
            self._sliding_layers = sliding_layers(self.config, self.layout.num_layers)
            self._make_program(probe, logits)
            if self.program is None:
                _check_reproduces(self, probe, logits)
            with self._hooked():
                check_ignores_answers(type(model).__name__, self._call, self.layout, self._make_cache, page_size)

    @property
    def name(self) -> str:
        """The name or folder the model was loaded from, or its class."""
        return self.path or type(self.model).__name__

    @property
    def path(self) -> str:
        """The name or folder the model was loaded from; empty if it was made otherwise."""
        return getattr(self.model.config, "_name_or_path", None) or ""

    @property
    def has_fused_step(self) -> bool:
        """Whether its program's ``draft`` and ``verify`` serve it: it has one, whose rows need no padding."""
        return self.program is not None and self.row_padding.multiple == 1

    def forward(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None = None) -> Tensor:
        """Compute the batch's rows, writing their KV entries into ``pool``.

        Args:
            batch: ``T`` rows.
            pool: this model's pages.
            logit_rows: ``[R]`` int64 row indices whose logits are wanted; None wants all.

        Returns:
            Logits ``[R, vocab_size]`` (``[T, vocab_size]`` without ``logit_rows``) in the model's dtype, to be read
            before the model's next forward: of a graph they are always in the same memory.

        """
        if self.program is not None:
            return self._run_program(batch, pool, logit_rows)
        logits = None if self.graphs is None else self.graphs.forward(batch, pool, logit_rows)
        return self._run_eagerly(batch, pool, logit_rows) if logits is None else logits

    def use_graphs(self, limits: Limits) -> None:
        """From now on replay forwards within ``limits`` as graphs, on a device that has them."""
        if self.program is not None or self._enforces_eager:
            return
        capture = capture_for(self.layout.device)
        if capture is not None:
            self.graphs = Graphs(self.model, self._run_eagerly, capture, limits)

    def _run_eagerly(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None) -> Tensor:
        if pool.row_padding.one_by_one:
            logits = torch.cat([self._run_attached(row, pool, None) for row in batch.one_by_one()])
            return logits if logit_rows is None else logits[logit_rows]
        return self._run_attached(batch, pool, logit_rows)

    def _run_attached(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None) -> Tensor:
        # A step is in inference mode already, and a drafting loop attached: each costs microseconds to enter.
        if torch.is_inference_mode_enabled() and self._attached_by == get_ident():
            return self._forward(batch, pool, logit_rows)
        with torch.inference_mode(), self.attached():
            return self._forward(batch, pool, logit_rows)

    def _run_program(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None) -> Tensor:
        assert self.program is not None
        return self.program(batch.token_ids, batch, pool.pages, logit_rows)

    def _forward(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None) -> Tensor:
        token_ids, positions, wanted, row_padding = batch.token_ids, batch.positions, logit_rows, pool.row_padding
        num_rows, num_wanted = len(token_ids), len(token_ids) if wanted is None else len(wanted)
        cache = self._make_cache(pool, batch, num_wanted)
        if missing := row_padding.padding(num_rows):  # any token will do, at a position that every model has
            token_ids, positions = pad(token_ids, (0, missing)), pad(positions, (0, missing))
        if wanted is not None and (missing := row_padding.padding(num_wanted)):
            wanted = pad(wanted, (0, missing))
        self.linears.real_rows = cache.real_rows if row_padding.multiple > 1 else None
        with one_thread() if row_padding.multiple > 1 and token_ids.device.type == "cpu" else nullcontext():
            logits = self._call(token_ids[None], positions[None], cache, wanted)[0]
        if cache.num_attended != self.layout.num_layers:
            raise UnsupportedModelError(
                f"{cache.num_attended} of {self.layout.num_layers} layers of {type(self.model).__name__} attend "
                "through transformers' AttentionInterface; the others would not see the paged KV cache."
            )
        if logit_rows is None:
            return logits[:num_rows]
        return logits[:num_wanted] if self._keeps_rows else logits[logit_rows]

    def _make_cache(self, pool: PagePool, batch: RaggedBatch, num_logit_rows: int | None = None) -> PagedCache:
        return PagedCache(pool, batch, self.ops, self._sliding_layers, num_logit_rows)

    def _call(
        self, token_ids: Tensor, positions: Tensor, cache: PagedCache | KVProbe, logit_rows: Tensor | None
    ) -> Tensor:
        """Call the Hugging Face model itself: ``[1, T]`` ids and positions to logits ``[1, R, vocab_size]``."""
        keep = {"logits_to_keep": logit_rows} if logit_rows is not None and self._keeps_rows else {}
        token = active_cache.set(cache)
        try:
            return self.model(
                input_ids=token_ids, position_ids=positions, past_key_values=cache, use_cache=True, **keep
            ).logits
        finally:
            active_cache.reset(token)

    @torch.inference_mode()
    def _probe_layout(self, token_ids: Tensor) -> KVLayout:
        """Find out what the layers attend over."""
        probe, positions = KVProbe(self.ops), torch.arange(len(token_ids), device=token_ids.device)
        with self._hooked():
            self._call(token_ids[None], positions[None], probe, None)
        return probe.layout(type(self.model).__name__)

    def _make_program(self, token_ids: Tensor, dense_logits: Tensor) -> None:
        """Write the forward down as a program, if it can be and reproduces the model's own logits."""
        executor, self.why_no_program = executor_for(self.ops)
        if self._enforces_eager:
            executor, self.why_no_program = None, "enforce_eager=True"
        if executor is None:
            return
        try:
            with self._hooked():  # with linears that ATen sees
                plan = compile_forward(self.model, self._call, self.layout, self.ops, self._sliding_layers)
            self.program = executor(plan)
            self._watch = Watch(self.model, plan.baked)
            _check_reproduces(self, token_ids, dense_logits)
        except (NotLowerableError, UnsupportedModelError) as error:
            self.program, self.why_no_program = None, str(error)
        except Exception as error:  # a model's own code may do anything; PyTorch runs it all the same
            self.program, self.why_no_program = None, f"recording it failed: {type(error).__name__}: {error}"

    def expect_same_weights(self) -> None:
        """Hold the model to what it was when it was loaded.

        Raises:
            UnsupportedModelError: something has changed since that its program would not see, or PyTorch would run it
                in training mode.

        """
        if self.program is None and self.model.training:
            raise UnsupportedModelError(
                f"{self.name} has been put in training mode since the engine was made, so dropout would change its "
                "output; call model.eval() first."
            )
        if self.graphs is not None:
            self.graphs.expect_same_weights()
        change = None if self.program is None or self._watch is None else self._watch.change()
        if change is not None:
            raise UnsupportedModelError(
                f"{self.name} is not what it was when the engine was made: {change}; make a new Engine. (Other changes "
                "of weights in place are seen.)"
            )

    def _hooked(self) -> AbstractContextManager[None]:
        return hooked(self.config, self._expert_configs, self._lock)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Exchange the model's attention function and linears, as a forward does for itself where nobody has done it.

        Worth doing around several forwards (20 microseconds each); not for longer, because the model is the user's:
        drafters and callbacks may run it between forwards.
        """
        if self.program is not None:  # nothing of the model runs
            yield
            return
        with self._hooked(), self.linears.attached():
            before, self._attached_by = self._attached_by, get_ident()
            try:
                yield
            finally:
                self._attached_by = before


@torch.inference_mode()
def _dense_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Run the model as it is on one short sequence; return its logits ``[n, vocab_size]``."""
    return model(input_ids=token_ids[None], past_key_values=DynamicCache(), use_cache=True).logits[0]


def _check_reproduces(model: RaggedModel, token_ids: Tensor, dense_logits: Tensor) -> None:
    """Compare ragged logits (two sequences, two forwards) with the model's own dense ones.

    The bound is the square root of the dtype's rounding unit, on the relative L2 distance: far above rounding, far
    below what a wrong position, mask or cache entry does.
    """
    pool = PagePool(model.layout, 2 * (len(token_ids) + model.page_size), model.page_size)
    pieces = [[Rows("a", 0, 3), Rows("b", 0, 6)], [Rows("a", 3, 5), Rows("b", 6, 2)]]
    for owner in "ab":
        pool.reserve(owner, len(token_ids))
    for rows in pieces:
        positions = torch.cat([torch.arange(r.start, r.start + r.count, device=token_ids.device) for r in rows])
        ragged = model.forward(lay_out(pool, rows, token_ids[positions]), pool).float()
        dense = dense_logits[positions].float()
        distance = float((ragged - dense).norm() / dense.norm())
        bound = torch.finfo(model.layout.dtype).eps ** 0.5
        if not distance <= bound:
            raise UnsupportedModelError(
                f"{type(model.model).__name__} does not reproduce its own logits on a paged KV cache (relative "
                f"distance {distance:.1e}, bound {bound:.1e}): it does not attend through transformers' "
                "AttentionInterface, or adds terms of its own to the scores."
            )

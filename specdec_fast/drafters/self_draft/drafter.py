"""The ``"self"`` drafter: a copy of the target with rounded linears, which drafts on the target's KV pages."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.drafters.base import Drafter, DrafterContext
from specdec_fast.drafters.draft import Draft
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Numbers
from specdec_fast.models.probe import named_failures
from specdec_fast.models.quantized_linears import quantized_linears
from specdec_fast.models.rounded_models import RoundedWeights, rounded_copy
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.graphs.graphs import described
from specdec_fast.runner.model_memory import forward_memory, logits_bytes, storage_bytes, weights_of
from specdec_fast.runner.profiling import drafting_seconds, most_proposed
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.sampling_params import SamplingParams


class SelfDrafter(Drafter):
    """Proposes what the target's own weights, rounded to few bits, would choose.

    The copy shares every tensor with the target but the weights of linears and experts. It has no KV entries of its
    own: a proposal reads the target's entries of a sequence, and writes its own at the positions from
    ``target_kv_length`` on, those of the last committed token and of the draft tokens. The verification of the same
    step computes these positions itself, and overwrites them (I2). So a sequence needs neither admission nor a prefill,
    and rejection costs nothing.

    If the target's weights have changed when a run begins, or ``sync_weights`` says so, they are rounded again.

    Attributes:
        quantization: how the linears are rounded, a name in ``quantization.rounding.ROUNDINGS``.
        model: the copy.

    Raises:
        ConfigError: the target has no linears to round, or is quantised itself.
        NotYetSupportedError: the target has recurrent layers, its weights are sharded over processes, or it holds
            something that cannot be copied.
    """

    quantization = "int4-a8"  # whose rows cost next to no acceptance, and less time than those of "int4"

    def __init__(self, context: DrafterContext) -> None:
        target = context.target
        self._expect_supported(target)
        config = context.config
        module = self._copied(target.model)
        with named_failures(module):
            most = target.layout.most_draft_tokens  # a part of the layout, which must be the target's
            model = RaggedModel(module, target.ops, config.page_size, config.enforce_eager, most)
        model.row_padding = target.row_padding  # that of the pages on which it runs
        model.release_memory()
        if model.layout != target.layout:
            raise NotYetSupportedError(f"draft={self.name!r}: the copy of {target.name} has other KV entries than it.")
        model.use_graphs(GraphLimits(config.max_batch_size, 1, config.most_draft_tokens))
        self.model = model
        self._rounded = RoundedWeights(target.model, module, self.quantization)
        self._numbers = Numbers(self._rounded.sources)  # of the weights that are rounded
        self._is_stale = False  # set by any thread
        self._pool: PagePool | None = None
        shared = storage_bytes(weights_of(target.model))
        self._own_bytes = sum(size for address, size in storage_bytes(self.weights()).items() if address not in shared)

    @property
    def name(self) -> str:
        return f"self:{self.quantization.removesuffix('-a8')}"

    def describe(self) -> dict[str, Any]:
        graphs = described(self.model.graphs)
        return {"own_weight_bytes": self._own_bytes, "forward_program": self.model.has_program, **graphs}

    def weights(self) -> Iterable[Tensor]:
        return weights_of(self.model.model)

    @property
    def estimates_memory(self) -> bool:
        return self.model.program is None

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        memory = forward_memory(self.model, {(num_sequences, num_sequences)})
        return memory.held + memory.working + num_sequences * logits_bytes(self.model)

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        model = self.model
        most = most_proposed(0)
        sequence = Sequence(0, [0, 0], 2, 3 + most, SamplingParams(), frozenset())
        pool = PagePool(model.layout, sequence.max_length, model.page_size, model.row_padding)
        pool.add(sequence)

        def proposal(num_draft_tokens: int, kv_length: int = 1) -> float:
            started = perf_counter()
            tokens = model.draft_step(pool, [sequence], [kv_length], [num_draft_tokens], model.vocab_size)
            tokens.tolist()  # waits for a GPU
            return perf_counter() - started

        proposal(most, kv_length=0)  # so that position 0 has an entry
        return drafting_seconds(model, row_counts, max(row_counts), proposal)

    def use_target_pool(self, pool: PagePool | None) -> None:
        self._pool = pool

    def prepare(self, num_tokens: int, page_size: int) -> None:
        self.model.expect_same_weights()
        if self._is_stale or Numbers(self._rounded.sources) != self._numbers:
            self._round_again()

    def sync_weights(self) -> None:
        self._is_stale = True

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        assert self._pool is not None, "use_target_pool() has not been called"
        if self._is_stale:
            self._round_again()
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        kv_lengths = [sequence.target_kv_length for sequence in drafting]
        counts = list(drafting.values())
        token_ids = self.model.draft_step(self._pool, list(drafting), kv_lengths, counts, self.model.vocab_size)
        return Draft(token_ids, list(limits))

    def _round_again(self) -> None:
        self._is_stale = False  # first, so that a thread that sets it meanwhile is not overlooked
        numbers = Numbers(self._rounded.sources)
        try:
            self._rounded.round_again()
        except ConfigError as error:
            self._is_stale = True
            raise ConfigError(f"draft={self.name!r}: {error}") from error
        self._numbers = numbers

    def _copied(self, model: PreTrainedModel) -> PreTrainedModel:
        try:
            return rounded_copy(model, self.quantization)
        except ConfigError as error:  # there is nothing to round, or a weight that cannot be rounded
            raise ConfigError(f"draft={self.name!r}: {error}") from error
        except (TypeError, copy.Error) as error:  # it holds a lock or a file, for example
            raise NotYetSupportedError(
                f"draft={self.name!r} copies the modules of the target, and {type(model).__name__} cannot be copied: "
                f"{error}; pass another drafter."
            ) from error

    def _expect_supported(self, target: RaggedModel) -> None:
        refused = f"draft={self.name!r} does not serve {target.name}: "
        if target.layout.states:
            raise NotYetSupportedError(
                f"{refused}its recurrent layers keep one state of a sequence, which draft rows would advance; pass a "
                "drafter that is no copy of the target, such as 'ngram'."
            )
        if target.layout.is_spread:
            raise NotYetSupportedError(f"{refused}its layers lie on several devices; pass a draft model, or 'ngram'.")
        if target.is_sharded:
            raise NotYetSupportedError(
                f"{refused}its weights are sharded over processes, and a copy would round a part of each; pass a draft "
                "model, or 'ngram'."
            )
        if quantized_linears(target.model):
            raise ConfigError(
                f"{refused}its linears are quantised already; a copy of 4-bit weights gains nothing, and 8-bit codes "
                "are not rounded again. Pass another drafter, or leave quantization out."
            )


class Int8SelfDrafter(SelfDrafter):
    """The same with 8 bits: more bytes to read, and more draft tokens accepted."""

    quantization = "int8"

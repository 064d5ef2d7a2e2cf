"""The sizes of a model that is not loaded: its config makes it on the meta device, which stores no numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError, SpecDecError
from specdec_fast.kv_cache.state_pool import StateShape, bytes_per_slot
from specdec_fast.models.model_checks import max_positions
from specdec_fast.models.placement import devices_of
from specdec_fast.models.probe import probe_of
from specdec_fast.models.quantized_checkpoint import ModelCodes, fields_of_codes
from specdec_fast.models.quantized_linears import PackedExperts, how_quantised, quantized_linears
from specdec_fast.models.rounded_models import expect_whole_codes, tensors_after_rounding
from specdec_fast.models.sharded import Exchanges, exchanges_of, expect_divisible_heads, first_parts
from specdec_fast.ops import Ops, resolve, resolve_all
from specdec_fast.planner.budget import EngineMemory, EngineSetting, Part
from specdec_fast.quantization.packed_weight import PackedWeight
from specdec_fast.quantization.rounding import A8
from specdec_fast.request.detokenizer import is_gguf
from specdec_fast.runner.hf_model import HFModel
from specdec_fast.runner.model_memory import bytes_of, estimated_row_bytes, weights_of
from specdec_fast.runner.profiling import most_proposed
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS


class CheckpointSizes(NamedTuple):
    """Sizes of a model."""

    weights: int  # bytes of parameters and buffers, each storage once; exact
    bytes_per_token: int  # bytes of KV entries of one position; exact
    logits_bytes: int  # bytes of the logits of one row; exact
    row_bytes: int  # bytes per row that a forward needs besides; an estimate
    row_parameters: int  # parameters with which a row is multiplied; of experts, those that it chooses
    max_positions: int | None  # number of positions that the model has; None if its config has no limit
    states: tuple[StateShape, ...] = ()  # recurrent states of one sequence; exact
    exchanges: Exchanges = Exchanges(0, 0)  # with the other ranks of a sharded model, in a forward

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        """Return the bytes of the recurrent states of one sequence, with room for so many draft tokens."""
        return bytes_per_slot(self.states, most_draft_tokens)


def checkpoint_sizes(
    source: Any, dtype: torch.dtype | None, quantization: str | None = None, tp_size: int = 1
) -> CheckpointSizes:
    """Return the sizes of a Hugging Face checkpoint from its config, or of a loaded model.

    The weights will be loaded in ``dtype``; None: the checkpoint's. Those of linears will be rounded as
    ``quantization`` says; None, and with ``"a8"``: not. Of a folder with codes of its own the bytes are those of the
    codes. With ``tp_size`` they are those of the rank with most. Raises ConfigError if the config cannot be read, names
    no dtype, describes quantised weights whose sizes are unknown, or does not fit ``quantization`` or ``tp_size``;
    NotYetSupportedError if there is no plan for ``tp_size``.
    """
    model: Any = source if isinstance(source, nn.Module) else _on_meta(source, dtype)
    config = model.config.get_text_config(decoder=True)
    try:
        hf = HFModel(model, _ops_of(devices_of(model)), probe_of(config.vocab_size, model.device))
        layout = hf.layout
    except SpecDecError as error:
        raise ConfigError(f"the memory of {type(model).__name__} cannot be laid out: {error}") from error
    if tp_size > 1:
        expect_divisible_heads(model.config, tp_size)
    return CheckpointSizes(
        weights=_bytes_of_rank(model, quantization, tp_size) if tp_size > 1 else _weights_bytes(model, quantization),
        bytes_per_token=layout.bytes_per_token // tp_size,
        logits_bytes=config.vocab_size * layout.dtype.itemsize,
        row_bytes=estimated_row_bytes(model, layout.dtype.itemsize),
        row_parameters=_row_parameters(model, config) // tp_size,
        max_positions=max_positions(config),
        states=layout.states,
        exchanges=exchanges_of(model, tp_size) if tp_size > 1 else Exchanges(0, 0),
    )


def _weights_bytes(model: PreTrainedModel, quantization: str | None) -> int:
    if quantization == A8:
        expect_whole_codes(model, "quantization")
    if quantization in (None, A8):
        return bytes_of(weights_of(model))
    kept, rounded_bytes = tensors_after_rounding(model, quantization)
    return bytes_of(kept) + rounded_bytes


def _bytes_of_rank(model: PreTrainedModel, quantization: str | None, tp_size: int) -> int:
    """Return the bytes of the weights of the rank with most of them."""
    part_of = first_parts(model, tp_size)
    tensors = [*model.parameters(), *model.buffers()]
    rounded_bytes = 0
    if quantization == A8:
        expect_whole_codes(model, "quantization")
    elif quantization is not None:
        tensors, rounded_bytes = tensors_after_rounding(model, quantization, part_of)
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(part_of(tensor).nbytes for tensor in distinct) + rounded_bytes


def copy_sizes(source: Any, dtype: torch.dtype | None, quantization: str) -> CheckpointSizes:
    """Return the sizes of a copy of a target with rounded linears, which shares everything else with it.

    It has the weights of those linears alone, and reads the target's KV entries. Raises ConfigError as
    ``checkpoint_sizes`` does, and if no such copy can draft: the target is quantised, or has recurrent layers.
    """
    model: Any = source if isinstance(source, nn.Module) else _on_meta(source, dtype)
    if (how := how_quantised(model)) is not None:
        raise ConfigError(
            f"no copy of {type(model).__name__} in few bits can draft for it: it is quantised already ({how}); "
            "pass another drafter."
        )
    sizes = checkpoint_sizes(model, dtype)
    if sizes.states:
        raise ConfigError(
            f"no copy of {type(model).__name__} in few bits can draft for it: draft rows would advance the states of "
            "its recurrent layers; pass another drafter, such as 'ngram'."
        )
    return sizes._replace(weights=tensors_after_rounding(model, quantization)[1])


def without_pages(sizes: CheckpointSizes) -> CheckpointSizes:
    """Return the memory of a drafter on the target's pages: it has no KV entries of its own, and no prefill."""
    return sizes._replace(bytes_per_token=0, row_bytes=0)


def with_joint_vocabulary(draft: CheckpointSizes, target: CheckpointSizes, most_tokens: int) -> CheckpointSizes:
    """Return the memory of a draft model with another tokenizer, whose logits are also laid out over both vocabularies.

    Its pool has ``most_tokens`` positions for each of the target's.
    """
    joint_bytes = draft.logits_bytes + target.logits_bytes  # at most: common tokens count once
    per_token = most_tokens * draft.bytes_per_token
    return draft._replace(bytes_per_token=per_token, logits_bytes=draft.logits_bytes + joint_bytes)


def least_memory(target: Any, draft: Any, config: EngineConfig) -> EngineMemory:
    """Return what an engine needs at least: weights, KV entries, recurrent states and a step's logits.

    ``draft`` is a draft model, or the sizes of one, for which an engine makes its states with room for the K of
    ``config``: their size stays when ``memory_bytes`` lowers K. None: plain decoding. Raises ConfigError if sizes are
    unknown.
    """
    dtype: Any = config.dtype
    of_target = _target_part(checkpoint_sizes(target, dtype, config.quantization, config.tp_size), 0)
    of_draft = None
    if draft is not None:
        is_known = isinstance(draft, CheckpointSizes)
        of_draft = _draft_part(draft if is_known else checkpoint_sizes(draft, dtype, config.draft_quantization), 0)
    states_for = 0 if draft is None else config.most_draft_tokens
    return EngineMemory(of_target, of_draft, config.page_size, is_estimate=True, states_for=states_for)


def estimated_memory(
    target: CheckpointSizes, draft: CheckpointSizes | None, drafts: bool, page_size: int
) -> EngineMemory:
    """Return the memory of an engine of models that are not loaded: what their forwards need is estimated.

    ``drafts``: whether anything is drafted, by a drafter without a model if ``draft`` is None.
    """
    part = Part(0, 0, lambda setting: {}) if draft is None else _draft_part(draft, draft.row_bytes)
    return EngineMemory(_target_part(target, target.row_bytes), part if drafts else None, page_size, is_estimate=True)


def _target_part(sizes: CheckpointSizes, row_bytes: int) -> Part:
    def terms(setting: EngineSetting) -> dict[str, int]:
        terms = {"logits": setting.num_rows * sizes.logits_bytes}
        return terms | ({"working memory": _most_rows(setting, setting.num_rows) * row_bytes} if row_bytes else {})

    return Part(sizes.weights, sizes.bytes_per_token, terms, sizes.bytes_per_sequence if sizes.states else None)


def _draft_part(sizes: CheckpointSizes, row_bytes: int) -> Part:
    def terms(setting: EngineSetting) -> dict[str, int]:
        rows = _most_rows(setting, 2 * setting.batch_size) * row_bytes
        return {"drafter steps": setting.batch_size * sizes.logits_bytes + rows}

    def bytes_per_sequence(most_draft_tokens: int) -> int:
        return sizes.bytes_per_sequence(most_proposed(most_draft_tokens))

    return Part(sizes.weights, sizes.bytes_per_token, terms, bytes_per_sequence if sizes.states else None)


def _most_rows(setting: EngineSetting, decoding: int) -> int:
    bound = setting.max_prefill_tokens
    return max(decoding, MAX_PREFILL_ROWS if bound is None else min(bound, MAX_PREFILL_ROWS))


def _on_meta(source: Any, dtype: torch.dtype | None) -> PreTrainedModel:
    if is_gguf(name := os.fspath(source)):
        from specdec_fast.models.gguf.loading import load_gguf
        from specdec_fast.quantization.gguf.container import read_gguf

        return load_gguf(read_gguf(Path(name)), dtype, torch.device("meta"))
    try:
        config = AutoConfig.from_pretrained(os.fspath(source), trust_remote_code=False)
    except Exception as error:  # no such model, damaged files; every reader raises errors of its own
        raise ConfigError(f"cannot read the config of {source!r}: {' '.join(str(error).split())}") from error
    text = config.get_text_config(decoder=True)
    fields = fields_of_codes(config)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized and (fields is None or not Path(name).is_dir()):
        raise ConfigError(
            f"the weights of {source!r} are quantised, and their sizes are known only of folders with codes that are "
            "read here."
        )
    dtype = dtype or config.dtype or text.dtype
    if dtype is None:
        raise ConfigError(f"the config of {source!r} names no dtype; pass dtype.")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except Exception as error:
        raise ConfigError(f"cannot make {source!r} from its config: {' '.join(str(error).split())}") from error
    if fields is not None:
        ModelCodes(model, Path(name), fields).place(model, only_sizes=True)
        model.to("meta")  # what decided about sizes was read: zero points, scales, groups of inputs
    return model


def _ops_of(devices: Sequence[torch.device]) -> Ops:
    if devices[0].type != "meta":
        return resolve_all(devices)
    return resolve(torch.device("cpu")).replaced(
        grouped_linear=_empty_products, grouped_quantized_linear=_empty_products_of_codes
    )


def _empty_products(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return rows.new_empty(*expert_ids.shape, weight.shape[1])


def _empty_products_of_codes(
    rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> Tensor:
    return rows.new_empty(*expert_ids.shape, weight.out_features)


def _row_parameters(model: PreTrainedModel, config: Any) -> int:
    """Return how many parameters a row is multiplied with; tensors with three axes are those of all experts."""
    embeddings = model.get_input_embeddings()
    skipped = set() if model.get_output_embeddings() is None else {id(p) for p in embeddings.parameters()}
    skipped -= {id(p) for p in model.get_output_embeddings().parameters()} if skipped else set()
    chosen = _first(config.to_dict(), "num_experts_per_tok", "moe_topk", "moe_top_k")
    total = float(sum(each.in_features * each.out_features for each in quantized_linears(model).values()))
    for experts in (module for module in model.modules() if isinstance(module, PackedExperts)):
        packed = experts.packed
        total += packed.in_features * packed.out_features * min(chosen or len(packed.codes), len(packed.codes))
    for parameter in model.parameters():
        share = min(1.0, chosen / parameter.shape[0]) if parameter.dim() == 3 and chosen else 1.0
        total += 0 if id(parameter) in skipped else parameter.numel() * share
    return int(total)


def _first(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)

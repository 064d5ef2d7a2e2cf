"""A multi-token prediction (MTP) layer as a model of one layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A row of position i takes the target's hidden state h_i (the input of its output layer) and the token at i + 1:

    x_i = eh_proj([enorm(embedding(token i+1)); hnorm(h_i)])      g_i = norm(decoder layer(x_0 .. x_i))

The target's output layer predicts the token at i + 2 from g_i, and the next row takes g_i in the place of h. The
decoder layer is of the class of those of the target's layers that attend fully. So the MTP layer is a model of the
target's class with one layer, whose embeddings are the x_i, and it is recorded as every other model; no code names an
architecture.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.mtp.checkpoint import MtpWeights
from specdec_fast.drafters.shared.checkpoint.target import embedding_of, output_layer_of
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.ops import Ops
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel

_FULL = "full_attention"
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
_FEW_IDS = 8  # of the embedding with which the model is made, before it gets the target's


class MtpModel:
    """The MTP layer of one target.

    The target gives the layer's class, dtype, device and ops, and embedding and output layer if the checkpoint has
    none for the layer. ``ragged`` computes rows.

    Raises:
        ConfigError: a weight is missing, unknown, or has another shape.
        NotYetSupportedError: the target has sliding windows, or its class cannot be made with one layer.
        UnsupportedModelError: the layer does not reproduce its own dense logits on pages.
    """

    def __init__(self, weights: MtpWeights, target: RaggedModel, page_size: int) -> None:
        _expect_full_attention(target)
        self._ops = target.ops
        model, norm = _one_layer(weights, target)
        model.eval().requires_grad_(requires_grad=False)  # before it gets the target's modules, which stay as they are
        like = next(norm.parameters())
        hidden_size = target.hf.config.hidden_size
        norms = [_filled(norm, *weights.part(name)) for name in ("enorm.weight", "hnorm.weight")]
        projection = nn.Linear(2 * hidden_size, hidden_size, bias=False, device=like.device, dtype=like.dtype)
        _fill(projection, *weights.part("eh_proj.weight"))
        _fill(norm, *weights.part("norm.weight"))
        embedding = _own_or(embedding_of(target), weights, "embed_tokens")
        self._inputs = _Inputs(embedding, norms[0], norms[1], projection, weights.format.is_hidden_first)
        model.set_input_embeddings(self._inputs)
        model.set_output_embeddings(_own_or(output_layer_of(target), weights, "lm_head"))
        model.config.get_text_config(decoder=True).vocab_size = target.hf.config.vocab_size
        self.ragged = RaggedModel(model, target.ops, page_size, enforce_eager=True)
        self.ragged.use_taps((FINAL,))
        self.layout = self.ragged.layout

    def weights(self) -> list[Tensor]:
        """Return all its tensors; embedding and output layer may be the target's."""
        return [*self.ragged.model.parameters(), *self.ragged.model.buffers()]

    def layers_function(self) -> RowFunction:
        """Return the layer as a function, for programs: a row takes a hidden state, or the result for the row before.

        The token of a row at position i is that of position i + 1.
        """

        def run(
            ops: Ops, pool: PagePool, batch: RaggedBatch, hidden: Tensor, wanted: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            self._inputs.hidden = hidden
            try:
                if ops is self._ops:
                    return self._forward(batch, pool, wanted)
                return self._recorded(ops, batch, pool, wanted)
            finally:
                self._inputs.hidden = None

        size = self._inputs.eh_proj.out_features
        return RowFunction(run, self.layout, size, size)

    def _forward(self, batch: RaggedBatch, pool: PagePool, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute rows, and write their KV entries; return logits of the rows ``wanted``, and all results."""
        results = self.ragged.empty_hidden_states(len(batch.token_ids))
        assert results is not None
        logits = self.ragged.forward(batch, pool, wanted, results)
        return logits, results[:, 0]

    def _recorded(self, ops: Ops, batch: RaggedBatch, pool: PagePool, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what ``_forward`` does, with ops that record; the recorder sees all other operations itself."""
        hf = self.ragged.hf
        assert hf.taps is not None
        results: list[Tensor] = []
        cache = hf.cache_class(pool, batch, ops, hf.rules)
        with hf.hooked(), hf.taps.collected(lambda _, result: results.append(result)):
            logits = hf.call(batch.token_ids[None], batch.positions[None], cache, wanted)
        return logits[0], results[0][0]


class _Inputs(nn.Module):
    """Stands in the place of a model's embedding, and joins embeddings and hidden states."""

    def __init__(
        self, embedding: nn.Module, enorm: nn.Module, hnorm: nn.Module, eh_proj: nn.Linear, is_hidden_first: bool
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.enorm = enorm
        self.hnorm = hnorm
        self.eh_proj = eh_proj
        # [T, H], the hidden states of the next forward's rows; None: the embeddings, for checks of the model
        self.hidden: Tensor | None = None
        self._is_hidden_first = is_hidden_first

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return ``[1, T, H]`` for ``[1, T]`` ids."""
        embedded: Tensor = self.embedding(token_ids)
        hidden = embedded if self.hidden is None else self.hidden[None].to(embedded.dtype)
        pair = [self.enorm(embedded), self.hnorm(hidden)]
        joined: Tensor = self.eh_proj(torch.cat(pair[::-1] if self._is_hidden_first else pair, dim=-1))
        return joined


def _expect_full_attention(target: RaggedModel) -> None:
    """Raise ``NotYetSupportedError`` if a layer sees some positions only: those of MTP's are not known."""
    limited = target.hf.rules.sliding | set(target.hf.rules.chunks) | target.hf.rules.indexed
    if limited:
        raise NotYetSupportedError(
            f"{target.name} has sliding windows, chunks or indexers in {len(limited)} of its "
            f"{target.hf.num_layers} layers; MTP layers are served for targets without them. Use another drafter."
        )


def _one_layer(weights: MtpWeights, target: RaggedModel) -> tuple[PreTrainedModel, nn.Module]:
    """Return a model of the target's class with the decoder layer of an MTP layer, and its final norm, not filled."""
    kind = type(target.model)
    where = repr(weights.where)
    if target.model.config.get_text_config(decoder=True) is not target.model.config:
        raise NotYetSupportedError(f"{kind.__name__} reads more than text; MTP layers are served for models of text.")
    _expect_equal_experts(weights)
    config = _config_of(weights, target.hf.config)
    base = kind.base_model_prefix
    hidden_size = target.hf.config.hidden_size
    dtype = target.model.dtype
    given = {f"{base}.layers.0.{name}": tensor for name, tensor in weights.block.items()}
    given |= {f"{base}.norm.weight": torch.zeros(hidden_size, device="cpu")}
    few_ids = torch.zeros(_FEW_IDS, hidden_size, device="cpu")
    ends = {name: few_ids.clone() for name in (f"{base}.embed_tokens.weight", "lm_head.weight")}
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what is missing becomes an error below
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=given | ends,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they become an error below
        )
    except Exception as error:  # a class raises errors of any type if its sizes do not fit
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"the MTP layer of {where} does not fit {kind.__name__}: {reason}") from error
    finally:
        logging.set_verbosity(level)
    own = f"{base}.layers.0."
    for problem, names in (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"])):
        if names := sorted(name.removeprefix(own) for name in set(names) - set(ends)):
            raise ConfigError(
                f"the MTP layer of {where} {problem} weights of a layer of {kind.__name__}: {', '.join(names[:4])} "
                f"({len(names)} in all)."
            )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise _wrong_shape(weights.named(name.removeprefix(own)), found, expected)
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if not isinstance(norm, nn.Module) or len(getattr(decoder, "layers", ())) != 1:
        raise NotYetSupportedError(f"{kind.__name__} has no `layers` and `norm`, so it cannot be made of an MTP layer.")
    return model.to(target.layout.device), norm


def _expect_equal_experts(weights: MtpWeights) -> None:
    """Raise ``ConfigError`` if experts that are stored one by one, as ``experts.0.up_proj.weight``, differ in size."""
    stored = {match.groups(): weights.block[match.string] for match in map(_EXPERT.fullmatch, weights.block) if match}
    num_experts = 1 + max((int(index) for _, index, _ in stored), default=-1)
    for before, after in sorted({(before, after) for before, _, after in stored}):
        experts = [stored.get((before, str(i), after)) for i in range(num_experts)]
        usual = Counter(expert.shape for expert in experts if expert is not None).most_common(1)[0][0]
        for i, expert in enumerate(experts):
            what = weights.named(f"{before}{i}{after}")
            if expert is None:
                raise ConfigError(f"{what} is missing; take a complete checkpoint.")
            if expert.shape != usual:
                raise _wrong_shape(what, expert.shape, usual)


def _config_of(weights: MtpWeights, config: Any) -> Any:
    is_mixture = any(name.startswith(("mlp.experts.", "mlp.gate.")) for name in weights.block)
    of_layer = copy.deepcopy(config)
    of_layer.num_hidden_layers = 1
    of_layer.vocab_size = _FEW_IDS
    of_layer.tie_word_embeddings = False
    of_layer.pad_token_id = None
    settings = {
        "layer_types": [_FULL],
        "mlp_layer_types": ["sparse" if is_mixture else "dense"],
        "first_k_dense_replace": 0 if is_mixture else 1,
        "mlp_only_layers": [] if is_mixture else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in settings.items():
        if getattr(of_layer, name, None) is not None:
            setattr(of_layer, name, value)
    return of_layer


def _own_or(of_target: nn.Module, weights: MtpWeights, name: str) -> nn.Module:
    """Return the embedding or output layer that a checkpoint has for its MTP layer, or else the target's."""
    own = weights.ends.get(f"{name}.weight")
    if own is None:
        return of_target
    return _filled(of_target, own, weights.named(f"{name}.weight")).requires_grad_(requires_grad=False)


def _filled(module: nn.Module, weight: Tensor, what: str) -> nn.Module:
    filled = copy.deepcopy(module)
    _fill(filled, weight, what)
    return filled


def _fill(module: Any, weight: Tensor, what: str) -> None:
    parameter = module.weight
    if parameter.shape != weight.shape:
        raise _wrong_shape(what, weight.shape, parameter.shape)
    with torch.no_grad():
        parameter.copy_(weight)


def _wrong_shape(what: str, found: Iterable[int], expected: Iterable[int]) -> ConfigError:
    return ConfigError(f"{what} has the shape {list(found)}; expected {list(expected)}.")

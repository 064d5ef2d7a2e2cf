"""A multi-token prediction (MTP) layer as a model of one layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A row of position i takes the target's hidden state h_i (the input of its output layer) and the token at i + 1:

    x_i = eh_proj([enorm(embedding(token i+1)); hnorm(h_i)])      g_i = norm(decoder layer(x_0 .. x_i))

The target's output layer predicts the token at i + 2 from g_i, and the next row takes g_i in the place of h. The
decoder layer is of the target's class. So the MTP layer is a model of that class with one layer, whose embeddings are
the x_i, and it runs as every other model does; no code names an architecture.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.mtp.checkpoint import MtpWeights
from specdec_fast.drafters.shared.checkpoint.target import check_whole
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.runner.ragged_model import RaggedModel

_FULL = "full_attention"
_FEW_IDS = 8  # of the embedding with which the model is made, before it gets the target's


class MtpModel:
    """The MTP layer of one target.

    The target gives the layer's class, the embedding, the output layer, dtype, device and ops. ``ragged`` computes
    rows.

    Raises:
        ConfigError: a weight is missing, unknown, or has another shape.
        NotYetSupportedError: the target does not attend fully in all layers, or its class cannot be made with one.
        UnsupportedModelError: the layer does not reproduce its own dense logits on pages.
    """

    def __init__(self, weights: MtpWeights, target: RaggedModel, page_size: int) -> None:
        check_whole(target)
        _expect_full_attention(target)
        self._weights = weights
        model, norm = _one_layer(weights, target)
        model.eval().requires_grad_(requires_grad=False)  # before it gets the target's modules, which stay as they are
        parts = weights.parts
        like = next(norm.parameters())
        hidden_size = target.hf.config.hidden_size
        norms = [_filled(norm, parts[f"{name}.weight"], f"{name} of {weights.where!r}") for name in ("enorm", "hnorm")]
        projection = nn.Linear(2 * hidden_size, hidden_size, bias=False, device=like.device, dtype=like.dtype)
        _filled_in_place(projection, parts["eh_proj.weight"], f"eh_proj of {weights.where!r}")
        _filled_in_place(norm, parts["norm.weight"], f"the last norm of {weights.where!r}")
        embedding = target.model.get_input_embeddings()
        self._inputs = _Inputs(embedding, norms[0], norms[1], projection, weights.format.is_hidden_first)
        model.set_input_embeddings(self._inputs)
        model.set_output_embeddings(target.model.get_output_embeddings())
        model.config.get_text_config(decoder=True).vocab_size = target.hf.config.vocab_size
        self.ragged = RaggedModel(model, target.ops, page_size, enforce_eager=True)
        self.ragged.use_taps((FINAL,))
        self.layout = self.ragged.layout

    def weights(self) -> list[Tensor]:
        """Return all its tensors; embedding and output layer are the target's."""
        return [*self.ragged.model.parameters(), *self.ragged.model.buffers()]

    def forward(
        self, batch: RaggedBatch, pool: PagePool, hidden: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute rows, and write their KV entries.

        The token of a row at position i is that of position i + 1. ``hidden [T, H]`` has the target's hidden states, or
        the results for the rows before. Return logits ``[R, vocab_size]`` of the rows ``wanted`` (None: all), and
        results ``[T, H]``.
        """
        results = self.ragged.empty_hidden_states(len(hidden))
        assert results is not None
        self._inputs.hidden = hidden
        try:
            logits = self.ragged.forward(batch, pool, wanted, results)
        finally:
            self._inputs.hidden = None
        return logits, results[:, 0]


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
    """Raise ``NotYetSupportedError`` if a layer of the target has a window or chunks: those of MTP's are not known."""
    limited = target.hf.rules.sliding | set(target.hf.rules.chunks)
    if limited:
        raise NotYetSupportedError(
            f"{target.name} has sliding windows or chunks in {len(limited)} of its {target.layout.num_layers} "
            "layers; MTP layers are served where the target attends fully in all of them. Use another drafter."
        )


def _one_layer(weights: MtpWeights, target: RaggedModel) -> tuple[PreTrainedModel, nn.Module]:
    """Return a model of the target's class with the decoder layer of an MTP layer, and its final norm, not filled."""
    kind = type(target.model)
    where = repr(weights.where)
    if target.model.config.get_text_config(decoder=True) is not target.model.config:
        raise NotYetSupportedError(f"{kind.__name__} reads more than text; MTP layers are served for models of text.")
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
            None, config=config, state_dict=given | ends, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # a class raises errors of any type if its sizes do not fit
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"the MTP layer of {where} does not fit {kind.__name__}: {reason}") from error
    finally:
        logging.set_verbosity(level)
    for problem, names in (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"])):
        if names := sorted(set(names) - set(ends)):
            raise ConfigError(
                f"the MTP layer of {where} {problem} weights of a layer of {kind.__name__}: {', '.join(names[:4])} "
                f"({len(names)} in all)."
            )
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if not isinstance(norm, nn.Module) or len(getattr(decoder, "layers", ())) != 1:
        raise NotYetSupportedError(f"{kind.__name__} has no `layers` and `norm`, so it cannot be made of an MTP layer.")
    return model.to(target.layout.device), norm


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
    }
    for name, value in settings.items():
        if getattr(of_layer, name, None) is not None:
            setattr(of_layer, name, value)
    return of_layer


def _filled(norm: nn.Module, weight: Tensor, what: str) -> nn.Module:
    filled = copy.deepcopy(norm)
    _filled_in_place(filled, weight, what)
    return filled


def _filled_in_place(module: Any, weight: Tensor, what: str) -> None:
    parameter = module.weight
    if parameter.shape != weight.shape:
        raise ConfigError(f"{what} has the shape {list(weight.shape)}; expected {list(parameter.shape)}.")
    with torch.no_grad():
        parameter.copy_(weight)

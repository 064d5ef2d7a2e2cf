"""A model that transformers' tensor-parallel plan has sharded, as modules over this process's part of the weights.

The plan's own hooks add up results by ``all_reduce``, whose order depends on the size of the message, and work on
DTensors, which neither ops nor forward programs read. The copy made here shares the memory of the weights. Its linears
are plain ones over local weights, and where the plan exchanges numbers, it calls ``ranks/operations.py``.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.models.experts import entry_name
from specdec_fast.models.quantized_linears import PackedModule, QuantizedLinear, how_quantised_by, weight_of
from specdec_fast.models.rounded_models import quantised_already
from specdec_fast.quantization.checkpoint.config import READABLE
from specdec_fast.quantization.rounding import ROUNDINGS
from specdec_fast.ranks.exchange import Ranks, connected
from specdec_fast.ranks.operations import (
    ExchangingModule,
    embedding_part,
    mesh_of,
    number_of,
    rank_concatenate,
    rank_sum,
)
from specdec_fast.request.detokenizer import is_gguf

# Styles of a plan that change nothing in a forward: they distribute gradients, or keep whole parameters.
LOCAL_STYLES = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate")
_CONCATENATED = ("colwise_gather_output", "colwise_rep")
_COLUMNS = 256  # of a weight that are gathered at a time
_connections: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()  # by process group


class SummedLinear(ExchangingModule):
    """A linear of which every rank has some inputs: the sum over the ranks, then the bias."""

    def __init__(self, part: nn.Linear | QuantizedLinear, ranks: int) -> None:
        super().__init__()
        self.bias = part.bias
        part.bias = None
        self.part = part
        self._ranks = ranks

    def forward(self, rows: Tensor) -> Tensor:
        """Compute ``[..., local inputs]`` to ``[..., out_features]``."""
        total = rank_sum(self.part(rows), self._ranks)
        return total if self.bias is None else total + self.bias


class ConcatenatedLinear(ExchangingModule):
    """A linear of which every rank has some outputs, and all ranks need all of them."""

    def __init__(self, part: nn.Linear | QuantizedLinear, ranks: int, widths: list[int]) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks
        self._widths = widths

    @property
    def weight(self) -> Any:
        """The part of the weight that this rank has."""
        return self.part.weight

    def whole(self) -> nn.Linear:
        """Return the linear with the weights of all ranks, each of which must make this call.

        Of rounded ones they are what the codes mean, in the dtype of the model.
        """
        weight = _gathered(weight_of(self.part).to(self.part.weight.dtype), self._ranks, self._widths)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if (bias := self.part.bias) is not None:
            gathered = _gathered(bias[:, None], self._ranks, self._widths)[:, 0]
            linear.bias = nn.Parameter(gathered, requires_grad=False)
        return linear

    def forward(self, rows: Tensor) -> Tensor:
        """Compute ``[..., in_features]`` to ``[..., all outputs]``."""
        return rank_concatenate(self.part(rows), self._ranks, self._widths)


class SummedEmbedding(ExchangingModule):
    """An embedding of which every rank has some ids."""

    def __init__(self, part: nn.Embedding, ranks: int, counts: list[int], first: int) -> None:
        super().__init__()
        self.weight = part.weight
        self._ranks = ranks
        self._counts = counts
        self._first = first

    def whole(self) -> nn.Embedding:
        """Return the embedding with the rows of all ranks, each of which must make this call."""
        return nn.Embedding.from_pretrained(_gathered(self.weight, self._ranks, self._counts))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ``[...]`` ids: ``[..., H]``."""
        return rank_sum(embedding_part(token_ids, self.weight, self._first), self._ranks)


class SummedExperts(ExchangingModule):
    """Experts of each of which every rank has a part."""

    def __init__(self, part: nn.Module, ranks: int) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    def forward(self, *given: Any) -> Tensor:
        """Return the sum of the parts."""
        return rank_sum(self.part(*given), self._ranks)


def _gathered(part: Tensor, ranks: int, counts: list[int]) -> Tensor:
    """Return the ``[sum(counts), H]`` of which every rank has ``[counts[rank], H]``."""
    whole = part.new_empty(sum(counts), part.shape[1])
    for first in range(0, part.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        whole[:, columns] = rank_concatenate(part[:, columns].T, ranks, counts).T
    return whole


def whole_end(model: Any, is_output: bool) -> Any:
    """Return a model's output layer or its embedding; of a sharded one a whole copy, which every rank must make."""
    layer = model.get_output_embeddings() if is_output else model.get_input_embeddings()
    return layer.whole() if isinstance(layer, (ConcatenatedLinear, SummedEmbedding)) else layer


def sharded_copy(model: PreTrainedModel, shares_weights: bool = True) -> tuple[PreTrainedModel, Ranks]:
    """Return a copy of a sharded model that shares its weights and has modules of its own, and its ranks.

    Every process of the group must make this call. Without ``shares_weights``, parts that transformers keeps as views
    of whole tensors are copied, so that the whole ones are freed with ``model``.

    Raises:
        NotYetSupportedError: a module has a style of the plan that is not served.
        ConfigError: the heads of the model cannot be divided by the number of processes.
    """
    mesh = mesh_of(model)
    expect_divisible_heads(model.config, mesh.size())
    styles = styles_of(model)
    group = group_of(mesh)
    # `widths` of sharded outputs are known to all ranks, because PyTorch's rule for uneven shards is
    ranks = _connections.get(group) or _connections.setdefault(group, connected(group, model.device))
    number = number_of(ranks)
    kept: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for name in ("_device_mesh", "_mesh_manager"):
        kept[id(getattr(model, name, None))] = getattr(model, name, None)
    kept[id(model.config)] = model.config  # attention functions are looked up there, under its lock
    sizes: dict[int, int] = {}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "device_mesh") else parameter
        local = local.detach()
        if not shares_weights and local.untyped_storage().nbytes() > local.nbytes:
            local = local.clone()
        kept[id(parameter)] = own = nn.Parameter(local, requires_grad=False)
        sizes[id(own)] = parameter.shape[0]
    own_model = copy.deepcopy(model, kept)
    for name, style in styles.items():
        module = own_model.get_submodule(name)
        vars(module).pop("forward", None)  # the hook of the plan
        _replace(own_model, name, _replaced(module, style, ranks, number, sizes))
    return own_model, ranks


def group_of(mesh: Any) -> Any:
    """Return the process group over which a mesh shards a model's tensors."""
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def styles_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of every module that the plan names."""
    plan = model.tp_plan
    styles = {}
    for name, _ in model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style is not None:
            styles[name] = style
    return styles


def first_parts(model: PreTrainedModel, tp_size: int) -> Callable[[Tensor], Tensor]:
    """Return a function from a parameter or buffer of a whole model to the part of it that the first rank would have.

    The first rank has most. Parts are on the meta device. Raises NotYetSupportedError if there is no plan.
    """
    if not getattr(model, "tp_plan", None):
        raise _no_plan(tp_size, f"a {type(model).__name__}")
    axes: dict[int, int] = {}  # of each sharded parameter, the axis that is
    for name, style in styles_of(model).items():
        module: Any = model.get_submodule(name)
        if style == "moe_tp_experts":  # every rank has the same part of all of them
            of_outputs = 2 if module.is_transposed else 1
            axes |= {id(getattr(module, entry_name(module))): of_outputs, id(module.down_proj): 3 - of_outputs}
        elif style not in LOCAL_STYLES:
            axis = 1 if style == "rowwise" else 0
            tensors = [*module.parameters(), *(module.packed.of_panels if isinstance(module, PackedModule) else [])]
            axes |= {id(tensor): axis for tensor in tensors if tensor.dim() > axis}

    def part_of(tensor: Tensor) -> Tensor:
        sizes = list(tensor.shape)
        if (axis := axes.get(id(tensor))) is not None:
            sizes[axis] = -(-sizes[axis] // tp_size)
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")

    return part_of


class Exchanges(NamedTuple):
    """What a rank exchanges with the others in a forward."""

    num_exchanges: int  # of sums and concatenations
    bytes_per_row: int  # that it sends in all of them, if the logits of every row are wanted


def exchanges_of(model: PreTrainedModel, tp_size: int) -> Exchanges:
    """Return the exchanges of a whole model that would be sharded so."""
    widths = []
    for name, style in styles_of(model).items():
        module: Any = model.get_submodule(name)
        if style == "embedding_rowwise":
            widths.append(module.embedding_dim)
        elif style == "rowwise":
            widths.append(module.out_features)
        elif style == "moe_tp_experts":
            widths.append(model.config.get_text_config(decoder=True).hidden_size)
        elif style in _CONCATENATED:
            widths.append(parts_of(module.out_features, tp_size)[0])
    return Exchanges(len(widths), sum(widths) * model.dtype.itemsize)


def _no_plan(tp_size: int, models: str) -> NotYetSupportedError:
    return NotYetSupportedError(
        f"tp_size={tp_size}, but transformers has no tensor-parallel plan for {models}; leave it out."
    )


def _replaced(module: Any, style: str, ranks: Ranks, number: int, sizes: dict[int, int]) -> nn.Module:
    if style in LOCAL_STYLES:
        return module
    if style == "embedding_rowwise" and type(module) is nn.Embedding:
        counts = parts_of(sizes[id(module.weight)], ranks.size)
        return SummedEmbedding(module, number, counts, sum(counts[: ranks.rank]))
    if style == "moe_tp_experts" and not getattr(module, "has_bias", False):
        return SummedExperts(module, number)
    if type(module) is nn.Linear or isinstance(module, QuantizedLinear):
        weight = module.weight
        if style == "rowwise":
            module.in_features = weight.shape[1]
            return SummedLinear(module, number)
        if style == "colwise":
            module.out_features = weight.shape[0]
            return module
        if style in _CONCATENATED:
            module.out_features = weight.shape[0]
            return ConcatenatedLinear(module, number, parts_of(sizes[id(weight)], ranks.size))
    raise NotYetSupportedError(
        f"the tensor-parallel plan gives a {type(module).__name__} the style {style!r}, which is not served; load the "
        "model on one device, or with a plan without it."
    )


def parts_of(size: int, num_ranks: int) -> list[int]:
    """Return how many of ``size`` rows each rank has: PyTorch's rule, by which the last ones may have fewer."""
    most = -(-size // num_ranks)
    return [max(0, min(most, size - rank * most)) for rank in range(num_ranks)]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module.eval())


def expect_divisible_heads(config: PretrainedConfig, size: int) -> None:
    """Raise a ConfigError if ``size`` processes cannot have equal numbers of the heads of a model."""
    text_config = config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text_config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"{name}={heads} cannot be divided by the {size} processes over which the target is sharded; take a "
                "number of processes that divides it."
            )


def expect_shardable(source: Any, config: EngineConfig, on_one_gpu: bool = False) -> None:
    """Check, before processes are started for ``config.tp_size``, what is known of the target without loading it.

    ``on_one_gpu``: whether the processes share a GPU.

    Raises:
        ConfigError: the target is loaded already, the device is another one than transformers would take, or there are
            too few GPUs or heads.
        NotYetSupportedError: a setting needs whole weights, or there is no plan for the target.

    """
    setting = f"tp_size={config.tp_size}"
    if isinstance(source, nn.Module):
        raise ConfigError(
            f"{setting}, but the target is a loaded {type(source).__name__}, whole in this process; pass its name or "
            "folder, so that every process loads its own part."
        )
    _expect_devices(setting, config, 1 if on_one_gpu else config.tp_size)
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(f"{setting}: transformers needs accelerate to shard a model; pip install accelerate.")
    if is_gguf(os.fspath(source)):
        raise NotYetSupportedError(f"{setting} does not serve GGUF files yet; pass a folder of safetensors.")
    try:
        of_model = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception:  # loading says what is wrong with it
        return
    how = how_quantised_by(of_model)
    if how is not None and config.quantization in ROUNDINGS:
        raise quantised_already(repr(source), how, "quantization", config.quantization)
    if how is not None and how not in READABLE:
        raise NotYetSupportedError(f"{setting} does not serve checkpoints quantised by {how} yet; leave it out.")
    if not getattr(of_model.get_text_config(decoder=True), "base_model_tp_plan", None):
        raise _no_plan(config.tp_size, f"models of type {of_model.model_type!r}")
    expect_divisible_heads(of_model, config.tp_size)


def _expect_devices(setting: str, config: EngineConfig, num_gpus: int) -> None:
    """Raise a ConfigError unless the ranks can take the devices that transformers chooses: first GPUs, or the CPU."""
    device: Any = config.device
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device is not None and (device.type != kind or device.index):
        raise ConfigError(
            f"{setting}, device={device}: processes take the first devices of kind {kind!r}, one each; leave device "
            "out, and let CUDA_VISIBLE_DEVICES name the GPUs."
        )
    if kind == "cuda" and (found := torch.cuda.device_count()) < num_gpus:
        raise ConfigError(
            f"{setting}: every process takes a GPU of its own, and PyTorch sees {found}; leave tp_size out, or let "
            f"CUDA_VISIBLE_DEVICES name {num_gpus} GPUs."
        )

"""Taps: the hidden states of a model that a drafter asks for.

Tap l is the residual stream after l layers (0: the embeddings), before the final norm; ``"final"`` is the input of the
output layer, after the final norm. The last entry of ``hidden_states`` of transformers is ``"final"``, not tap L.

Hooks of PyTorch would forbid programs and graphs, and those of ``output_hidden_states`` stay once it was used. So the
``forward`` of a layer is replaced, only while a forward of the engine collects taps. No code names an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec_fast.errors import ConfigError, DrafterError, UnsupportedModelError

FINAL = "final"
# Receives the index of a tap and its tensor, ``[1, T, H]``. The model may change it in place afterwards.
Collect = Callable[[int, Tensor], None]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's taps: 2, L // 2, L - 3 (arXiv 2503.01840). Raises ConfigError below 7 layers."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ConfigError(
            f"a target of {num_layers} layers has no default taps, because {taps} are not three different layers in "
            f"rising order; pass three ids from 0 to {num_layers}."
        )
    return taps


def checked_taps(taps: Any, num_layers: int) -> tuple[int | str, ...]:
    """Return a drafter's taps; DrafterError unless they are different ids from 0 to ``num_layers`` or ``"final"``."""
    if not isinstance(taps, (tuple, list)):
        raise DrafterError(f"a drafter's taps are {taps!r}; expected a tuple of layer ids and {FINAL!r}.")
    wrong = [tap for tap in taps if tap != FINAL and not (type(tap) is int and 0 <= tap <= num_layers)]
    if wrong:
        raise DrafterError(
            f"a drafter's taps {tuple(taps)} contain {wrong[0]!r}; the target has {num_layers} layers, so expected ids "
            f"from 0 (the embeddings) to {num_layers}, or {FINAL!r}."
        )
    if len(set(taps)) < len(taps):
        raise DrafterError(f"a drafter's taps {tuple(taps)} contain an id twice; pass different ids.")
    return tuple(taps)


class _Place(NamedTuple):
    """A module whose ``forward`` is replaced, and the taps that are its input and its output."""

    module: nn.Module
    at_input: int | None
    at_output: int | None


class Taps:
    """Where a model's taps are read: ``ids``, from ``checked_taps``, in the order of ``Drafter.taps``.

    ``run`` runs a short forward over all its rows. Raises UnsupportedModelError if its decoder layers are not found, or
    pass on something else than one tensor of hidden states.
    """

    def __init__(
        self, model: nn.Module, ids: tuple[int | str, ...], num_layers: int, run: Callable[[], object]
    ) -> None:
        self.ids = ids
        self._name = type(model).__name__
        decoder = _decoder(model)
        layers = _decoder_layers(decoder, num_layers) if set(ids) != {FINAL} else nn.ModuleList()
        self._places = [self._place(tap, index, decoder, layers) for index, tap in enumerate(ids)]
        self._probe(model, run)

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """Return memory for the hidden states of ``num_rows`` rows: ``[num_rows, taps, H]``."""
        return torch.empty(num_rows, len(self.ids), self._size, dtype=self._dtype, device=device)

    @contextmanager
    def collected(self, collect: Collect) -> Iterator[None]:
        """Pass the taps of every forward in a ``with`` block to ``collect``; one thread at a time may do so."""
        before = []
        try:
            for module, at_input, at_output in self._places:
                before.append((vars(module), vars(module).get("forward")))
                vars(module)["forward"] = partial(_forward, module.forward, collect, at_input, at_output)
            yield
        finally:
            for attributes, forward in reversed(before):
                if forward is None:
                    attributes.pop("forward", None)
                else:  # it was replaced before: by the tap of another place, for example
                    attributes["forward"] = forward

    @contextmanager
    def written(self, hidden_states: Tensor) -> Iterator[None]:
        """Write the taps of a forward's first ``T`` rows into ``hidden_states [T, taps, H]``; the rest is padding."""
        num_rows = len(hidden_states)

        def write(index: int, hidden: Tensor) -> None:
            hidden_states[:, index].copy_(hidden[0, :num_rows])

        with self.collected(write):
            yield

    def _place(self, tap: int | str, index: int, decoder: nn.Module, layers: nn.ModuleList) -> _Place:
        if tap == FINAL:
            return _Place(decoder, None, index)
        assert isinstance(tap, int)
        return _Place(layers[tap], index, None) if tap < len(layers) else _Place(layers[-1], None, index)

    def _probe(self, model: nn.Module, run: Callable[[], object]) -> None:
        """Run the model once, to learn size and dtype of the taps, and whether each is what it is taken for."""
        hidden_states: list[tuple[int, Any]] = []
        places = list(self._places)
        output_layer = _output_layer(model) if FINAL in self.ids else None
        if output_layer is not None:
            self._places.append(_Place(output_layer, len(self.ids), None))
        try:
            with self.collected(lambda index, hidden: hidden_states.append((index, _copied(hidden)))):
                run()
        finally:
            self._places = places
        expected = list(range(len(self.ids) + (output_layer is not None)))
        tensors = [hidden for _, hidden in sorted(hidden_states, key=lambda pair: pair[0])]
        kinds = {(hidden.shape, hidden.dtype) for hidden in tensors if isinstance(hidden, Tensor)}
        has_each = sorted(index for index, _ in hidden_states) == expected
        is_one_each = has_each and all(isinstance(t, Tensor) for t in tensors)
        if not is_one_each or len(kinds) != 1 or tensors[0].dim() != 3 or len(tensors[0]) != 1:
            shown = [f"{list(t.shape)} in {t.dtype}" if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
            raise UnsupportedModelError(
                f"the layers of {self._name} do not pass on hidden states [1, rows, size] of one dtype, once each in a "
                f"forward, as the taps {self.ids} need (found: {'; '.join(shown) or 'none'})."
            )
        if output_layer is not None and not torch.equal(tensors[self.ids.index(FINAL)], tensors[-1]):
            raise UnsupportedModelError(
                f"{self._name} computes something between its decoder and its output layer, so {FINAL!r} is not what "
                "its decoder returns; ask for other taps."
            )
        self._size = tensors[0].shape[-1]
        self._dtype = tensors[0].dtype


def _forward(
    forward: Callable[..., Any],
    collect: Collect,
    at_input: int | None,
    at_output: int | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if at_input is not None:
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        collect(at_input, hidden)
    output = forward(*args, **kwargs)
    if at_output is not None:
        collect(at_output, output if isinstance(output, Tensor) else output[0])
    return output


def _copied(hidden: Any) -> Any:
    return hidden.clone() if isinstance(hidden, Tensor) else hidden


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the ``num_layers`` decoder layers of a causal model, or raise UnsupportedModelError."""
    return _decoder_layers(_decoder(model), num_layers)


def _decoder(model: Any) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(decoder, nn.Linear):  # ModernBERT calls its output layer "decoder"
        decoder = model.base_model
    if decoder is model:  # Llama-4 returns itself
        decoder = getattr(model, "model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder apart from its output layer (get_decoder).")
    return decoder


def _output_layer(model: Any) -> nn.Module:
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(layer, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} has no output layer (get_output_embeddings).")
    return layer


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the list of the layers: entry i contains the attention that calls itself layer i."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    for layers in lists:
        if all(_attends_as(i, layer) for i, layer in enumerate(layers)):
            return layers
    raise UnsupportedModelError(
        f"{type(decoder).__name__} has no ModuleList of {num_layers} layers whose entry i contains an attention with "
        "layer_idx i, so its hidden states are not found."
    )


def _attends_as(index: int, layer: nn.Module) -> bool:
    return any(getattr(module, "layer_idx", None) == index for module in layer.modules())

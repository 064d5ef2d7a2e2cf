"""The settings of a drafter's checkpoint: ``config.json``, read and checked entry by entry."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.activations import ACT2FN

from specdec_fast.errors import ConfigError

_KIND = "speculators_model_type"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies depend on no length
# The settings of a layer that are read, beside its rotary embedding; LlamaConfig has defaults for most.
LAYER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
)
_INTEGERS = {*LAYER_SIZES} - {"rms_norm_eps", "hidden_act"}
_LAYER_KEYS = (*LAYER_SIZES, "rope_theta", "rope_scaling", "rope_parameters")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Of a rotary embedding; which of them it reads depends on its type.
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
MOST_PARTS = 1000  # layers, heads or blocks of a drafter: the names of their weights are listed before any is read
_LARGEST_INTEGER = 2**31 - 1
_LARGEST_NUMBER = 1e18  # what every integer and float of torch holds


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What ``config.json`` says of every drafter made of transformer layers."""

    folder: Path  # where it was read
    layer: LlamaConfig  # sizes of its layers, their number, and rotary embedding; vocab_size is the target's
    sliding_windows: tuple[int | None, ...]  # per layer, the number of positions that a row sees; None: all
    draft_vocab_size: int  # number of ids that it can propose
    target_hidden_size: int  # width of one tap
    tap_layers: tuple[int, ...] | None = None  # as Drafter.taps counts; None: the checkpoint names none
    verifiers: tuple[str, ...] = ()  # classes of the targets that it was made for; empty: it does not say


class Settings:
    """The entries of a ``config.json``, checked as they are read. A null is a missing entry.

    Its methods raise ``ConfigError`` for a wrong value; the message names the file, the entry and what it may be.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Any]) -> None:
        self.folder = folder
        self.entries = dict(entries)

    @classmethod
    def read(cls, folder: Path, kind: str) -> Settings:
        """Read ``config.json`` of a folder of ``kind``, a name for messages such as ``"a Clover drafter"``."""
        path = folder / "config.json"
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {str(path)!r} ({error}); expected the folder of {kind}.") from None
        if not isinstance(entries, dict):
            raise ConfigError(f"{str(path)!r} holds a {type(entries).__name__}; expected a JSON object.")
        return cls(folder, entries)

    @classmethod
    def read_if_any(cls, folder: Path) -> Settings:
        """Read ``config.json`` of a folder; without a readable one there are no entries."""
        try:
            return cls.read(folder, "a drafter")
        except ConfigError:
            return cls(folder, {})

    @property
    def where(self) -> str:
        """The folder, as messages show it."""
        return repr(str(self.folder))

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __or__(self, other: Settings) -> Settings:
        given = {name: value for name, value in other.entries.items() if value is not None}
        return Settings(self.folder, self.entries | given)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry unchecked, null too; ``default`` if there is none."""
        return self.entries.get(name, default)

    def positive_integer(self, name: str, default: int | None, most: int = _LARGEST_INTEGER) -> int:
        """Return an integer from 1 to ``most``, ``default`` where none is given."""
        value = self._given(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(name, value, f"a positive integer up to {most}")
        return value

    def positive_number(self, name: str, default: float) -> float:
        """Return a positive finite number, ``default`` where none is given."""
        value = self._given(name, default)
        if type(value) not in (int, float) or not 0 < value < _LARGEST_NUMBER:
            raise self._wrong(name, value, f"a positive number below {_LARGEST_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false (also written as 1 or 0), ``default`` where none is given."""
        value = self._given(name, default)
        if type(value) not in (bool, int) or value not in (0, 1):
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def mapping(self, name: str) -> Settings:
        """Return the entries of a JSON object, none where it is not given."""
        value = self._given(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "a JSON object")
        return Settings(self.folder, value)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty where none is given."""
        value = self._given(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, value, "a list of names")
        return tuple(value)

    def layer_ids(self, name: str) -> tuple[int, ...] | None:
        """Return a list of ids of layers, None where none is given."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
            raise self._wrong(name, value, "a list of integers, the ids of layers")
        return tuple(value)

    def is_named(self, kind: str) -> bool:
        """Return whether a name among ``architectures`` contains ``kind``, in letters of any case."""
        return any(kind in name.lower() for name in self.names("architectures"))

    # The format of vLLM's speculators

    @property
    def is_speculators(self) -> bool:
        """Whether the format is that of ``speculators``."""
        return _KIND in self

    @property
    def speculators_kind(self) -> Any:
        """The kind of drafter, in the format of ``speculators``; None in other formats."""
        return self.get(_KIND)

    def expect_speculators_kind(self, *kinds: str) -> None:
        """Refuse a drafter of another kind in the format of ``speculators``."""
        if self.is_speculators and self.speculators_kind not in kinds:
            expected = ", ".join(map(repr, kinds))
            raise ConfigError(f"{self.where} is a drafter of kind {self.speculators_kind!r}; expected {expected}.")

    def tap_layers(self, *names: str) -> tuple[int, ...] | None:
        """Return ``LayerConfig.tap_layers`` from the first of some entries that is given.

        ``speculators`` counts taps as this library does. An id in other formats is that of the layer behind which a tap
        is read: tap - 1.
        """
        name = next((name for name in names if self.get(name)), None)
        ids = None if name is None else self.layer_ids(name)
        return ids if ids is None or self.is_speculators else tuple(layer + 1 for layer in ids)

    def layer_settings(self) -> Settings:
        """Return the entries that describe the drafter's layers; ``speculators`` has a JSON object for them."""
        if not self.is_speculators:
            return self
        if not isinstance(self.get("transformer_layer_config"), dict):
            raise ConfigError(f"{self.where}: config.json has no transformer_layer_config; take a complete checkpoint.")
        return self.mapping("transformer_layer_config")

    def verifiers(self) -> tuple[str, ...]:
        """Return ``LayerConfig.verifiers``."""
        return self.mapping("speculators_config").mapping("verifier").names("architectures")

    # Transformer layers

    def layer(self, num_layers: int = 1) -> LlamaConfig:
        """Return sizes and rotary embedding of the layers, ``num_layers`` of them where no number is given."""
        if missing := [name for name in _NEEDED if self.get(name) is None]:
            raise ConfigError(f"{self.where}: config.json lacks {', '.join(missing)}; take a complete checkpoint.")
        given = {name: self.entries[name] for name in _LAYER_KEYS if self.get(name) is not None}
        given.setdefault("num_hidden_layers", num_layers)
        for name in set(given) & _INTEGERS:
            self.positive_integer(name, given[name])
        self.positive_integer("num_hidden_layers", num_layers, MOST_PARTS)
        self.positive_number("rms_norm_eps", 1.0)
        for entries in (given, given.get("rope_scaling"), given.get("rope_parameters")):
            if isinstance(entries, dict):
                for name in _ROPE_NUMBERS:
                    Settings(self.folder, entries).positive_number(name, 1.0)
        act = given.get("hidden_act", "silu")
        if not isinstance(act, str) or act not in ACT2FN:
            raise self._wrong("hidden_act", act, "the name of an activation function of transformers, such as 'silu'")
        try:
            layer = LlamaConfig.from_dict(given)
            rope = layer.rope_parameters
        except Exception as error:  # transformers validates settings with errors of several types
            raise ConfigError(f"{self.where}: config.json is not valid: {error}") from error
        rope_type = rope.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"{self.where} has the rotary embedding {rope}; expected one of type {', '.join(_ROPE_TYPES)}, "
                "over whole heads."
            )
        if layer.num_attention_heads % layer.num_key_value_heads:
            raise ConfigError(
                f"{self.where} has {layer.num_attention_heads} heads and {layer.num_key_value_heads} KV heads "
                "(num_key_value_heads); expected whole groups of heads."
            )
        return layer

    def sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None if it sees all positions."""
        kinds = self.names("layer_types") or ("full_attention",) * num_layers
        if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"{self.where} has layer_types {list(kinds)}; expected full_attention or sliding_attention, each layer."
            )
        if "sliding_attention" not in kinds:
            return (None,) * num_layers
        window = self.positive_integer("sliding_window", None)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def expect_no_windows(self, num_layers: int) -> None:
        """Refuse a layer with a sliding window; without ``layer_types`` a ``sliding_window`` is of all."""
        window = self.get("sliding_window") if self.get("use_sliding_window", True) else None
        is_named = self.get("layer_types") is not None
        if any(self.sliding_windows(num_layers)) or (window is not None and not is_named):
            raise ConfigError(
                f"{self.where} has layers with a sliding window (sliding_window is {window!r}), which this library "
                "does not serve for this kind of drafter; expected full_attention in each layer."
            )

    def _given(self, name: str, default: Any) -> Any:
        return default if self.get(name) is None else self.entries[name]

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{str(self.folder / 'config.json')!r}: {name} is {reprlib.repr(value)}; expected {expected}."
        )

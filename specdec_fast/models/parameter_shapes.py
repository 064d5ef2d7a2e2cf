"""The shapes that a model's parameters should have, compared with those that a checkpoint has.

``transformers`` compares them itself, but not in all versions when a quantiser takes part in loading.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from specdec_fast.errors import ConfigError


class ParameterShapes:
    """Shapes by name, from a model whose weights are not loaded yet."""

    def __init__(self, model: nn.Module) -> None:
        self._expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.others: list[tuple[str, Sequence[int], Sequence[int]]] = []

    def note(self, name: str, tensor: Tensor) -> None:
        """Compare one that is loaded."""
        expected = self._expected.get(name, tensor.shape)
        if tensor.shape != expected:
            self.others.append((name, tensor.shape, expected))

    def note_all(self, model: nn.Module) -> None:
        """Compare those that a model has now."""
        for name, parameter in model.named_parameters():
            self.note(name, parameter)

    def expect_none(self) -> None:
        """Raise ConfigError if one had another shape."""
        if self.others:
            raise ConfigError(f"it has {other_shapes(self.others)}")


def other_shapes(mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> str:
    """Return the text about names with the shapes that were found and expected."""
    name, found, expected = sorted(mismatched)[0]
    return (
        f"weights of other shapes than its config says: {name} is {list(found)}, expected {list(expected)} "
        f"({len(mismatched)} in all); take a complete checkpoint, or correct its config."
    )

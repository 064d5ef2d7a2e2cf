"""The bundled pair, loaded once for many commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specdec_fast.assets import demo_pair
from specdec_fast.models.loading import load_model


@contextmanager
def bundled_models_loaded_once() -> Iterator[None]:
    """In the ``with`` block engines of the bundled pair share its models, which they do not change."""
    models: dict[Any, Any] = {}

    def loaded(source, dtype, device, role="target", quantization=None, tp_size=1, device_map=None):
        is_path = isinstance(source, (str, os.PathLike))
        is_plain = quantization is None and device_map is None
        if not is_plain or tp_size > 1 or not is_path or Path(source).parent != demo_pair():
            return load_model(source, dtype, device, role, quantization, tp_size, device_map)
        key = (str(source), dtype, device, role)
        if key not in models:
            models[key] = load_model(source, dtype, device, role)
        return models[key]

    engines = patch("specdec_fast.runner.loading.load_model", loaded)
    with engines, patch("specdec_fast.drafters.registry.load_model", loaded):
        yield

"""Fits recover the curves that made their points; a published form of k_opt is one of c0 + C / b."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.errors import ConfigError
from specdec_fast.planner.scylla import (
    best_draft_tokens,
    fit_batch_sizes,
    fit_layers,
    fit_training,
    fits_of,
    rows_at_balance,
)

CURVES = {
    "training": (fit_training, math.log),
    "layers": (fit_layers, math.log10),
    "batch": (fit_batch_sizes, lambda b: 1 / b),
}
numbers = st.floats(-1e3, 1e3)


@pytest.mark.parametrize("name", CURVES)
@given(slope=numbers, intercept=numbers)
def test_fits_recover_their_curves(name, slope, intercept):
    fit, transform = CURVES[name]
    x = [1, 2, 5, 30, 64]
    found = fit(x, [slope * transform(value) + intercept for value in x])
    scale = max(1.0, abs(slope), abs(intercept))
    assert found.slope == pytest.approx(slope, abs=1e-9 * scale)
    assert found.intercept == pytest.approx(intercept, abs=1e-9 * scale)
    assert found.r_squared == pytest.approx(1) or abs(slope) < 1e-3


def test_r_squared_is_the_share_explained():
    assert fit_layers([1, 10, 100], [1, 3, 2]).r_squared == pytest.approx(0.25)


def test_the_published_form_is_fitted():
    """27904 sqrt(1 + 0.034 / b) - 27897 is 477, 66, 37 and 14 at batch 1, 8, 16 and 64: about 7 + 474 / b."""
    batch_sizes = [1, 8, 16, 64]
    published = [27904 * math.sqrt(1 + 0.034 / b) - 27897 for b in batch_sizes]
    assert [round(k) for k in published] == [477, 66, 37, 14]
    found = fit_batch_sizes(batch_sizes, published)
    assert found.r_squared > 0.9999
    for b, k in zip(batch_sizes, published, strict=True):
        assert found.intercept + found.slope / b == pytest.approx(k, abs=1)


def test_draft_tokens_fill_the_rows_at_balance():
    rows = rows_at_balance(weight_bytes=2e9, flops_per_row=2e9, bandwidth=1e12, peak=1e14)
    assert rows == pytest.approx(100)
    assert [best_draft_tokens(rows, b) for b in (1, 10, 100, 1000)] == pytest.approx([99, 9, 0, 0])
    fitted = fit_batch_sizes([1, 2, 4, 8], [best_draft_tokens(rows, b) for b in (1, 2, 4, 8)])
    assert (fitted.slope, fitted.intercept) == pytest.approx((rows, -1))


@pytest.mark.parametrize(
    ("x", "y"), [([1], [2]), ([3, 3], [1, 2]), ([0, 1], [1, 2]), ([1, 2], [1, math.nan]), ([1, 2, 3], [1, 2])]
)
def test_too_few_or_wrong_points_are_refused(x, y):
    with pytest.raises(ConfigError, match="a fit needs pairs"):
        fit_training(x, y)


@pytest.mark.parametrize(
    "data", [{}, [], {"epochs": [[1, 2]]}, {"layers": [[1, 2], [3]]}, {"layers": 3}, {"layers": [["a", 1]]}]
)
def test_files_that_are_no_pairs_are_refused(data):
    with pytest.raises(ConfigError, match="expected"):
        fits_of(data)


def test_curves_of_a_file():
    found = fits_of({"training_tokens": [[math.e, 1], [math.e**2, 3]], "layers": [[1, 2], [10, 5]]})
    assert found["training_tokens"][:2] == pytest.approx((2, -1))
    assert found["layers"][:2] == pytest.approx((3, 2))


def test_equal_numbers_are_fitted_without_a_rest():
    """Their mean is rounded, and what is left of their variance is no measure."""
    assert fit_training([400, 800, 1600], [0.01064] * 3).r_squared == 1

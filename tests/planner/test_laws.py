"""Tables of trained drafters: the laws are found where they hold, and what was held out is not looked at."""

from __future__ import annotations

from itertools import accumulate
from math import inf, log, nan
from operator import mul

import pytest

from specdec_fast.errors import ConfigError
from specdec_fast.planner.law_table import read_laws
from specdec_fast.planner.laws import BATCH_SIZES, LAYERS, TRAINING, acceptance_like, forecast
from support.laws import TOKENS, K, accepted, costs, point, table


def changed(**entries):
    """A table whose first point, or whose own entries, are changed."""
    data = table()
    for name, value in entries.items():
        (data if name in data else data["points"][0])[name] = value
    return data


def test_laws_are_recovered():
    laws = read_laws(table())
    of_tokens = TRAINING.held_out(laws.by_tokens(2))
    assert (of_tokens.whole.slope, of_tokens.whole.r_squared) == pytest.approx((0.3, 1))
    assert of_tokens.error == pytest.approx(0, abs=1e-9)
    assert of_tokens.unchanged_error == pytest.approx(0.3 * log(10))
    of_layers = LAYERS.held_out(laws.by_layers(10_000))
    assert (of_layers.whole.slope, of_layers.xs) == (pytest.approx(0.5), (4,))
    assert of_layers.predicted == pytest.approx((accepted(4, 10_000),))


def test_what_is_held_out_does_not_change_its_prediction():
    curve = {1: 1.0, 10: 2.0, 100: 3.0, 1000: 9.0}
    held_out = TRAINING.held_out(curve)
    assert held_out.predicted == pytest.approx((4.0,))
    assert (held_out.measured, held_out.last) == ((9.0,), 3.0)
    assert held_out.error == pytest.approx(5)
    assert held_out.whole.slope > held_out.part.slope
    both = TRAINING.held_out({**curve, 100: 7.0}, 2)
    assert both.predicted == pytest.approx((3.0, 4.0))
    assert both.error == pytest.approx(((4**2 + 5**2) / 2) ** 0.5)
    assert TRAINING.held_out({1: 1.0, 10: 2.0}) is None
    assert TRAINING.held_out(curve, 3) is None


def test_points_that_do_not_follow_a_law_have_a_large_error():
    saturated = {1: 0.0, 10: 2.0, 100: 3.0, 1000: 3.1}
    held_out = TRAINING.held_out(saturated)
    assert held_out.error > held_out.unchanged_error
    assert held_out.whole.r_squared < 0.9


def test_seeds_are_averaged_and_their_deviation_pooled():
    data = table(layers=(1, 2))
    data["points"] += [point(1, tokens, seed=1, error=0.2) for tokens in TOKENS]
    laws = read_laws(data)
    assert laws.by_tokens(1) == pytest.approx({tokens: accepted(1, tokens) + 0.1 for tokens in TOKENS})
    assert laws.seed_deviation() == pytest.approx(0.2 / 2**0.5)
    assert read_laws(table()).seed_deviation() is None


def test_a_curve_has_the_seeds_of_all_its_points():
    """Otherwise the points of one seed would stand beside means of two."""
    data = table(layers=(1, 2))
    data["points"] += [point(1, tokens, seed=1, error=0.2) for tokens in TOKENS[:2]]
    laws = read_laws(data)
    assert laws.by_tokens(1) == {tokens: accepted(1, tokens) for tokens in TOKENS}
    data["points"] = [point(1, 1000, seed=0), point(2, 1000, seed=1), point(2, 1000, seed=2, error=0.2)]
    assert read_laws(data).by_layers(1000) == pytest.approx({1: accepted(1, 1000), 2: accepted(2, 1000) + 0.1})


def test_a_forecast_weighs_what_layers_accept_against_what_they_cost():
    laws = read_laws(table(layers=(1, 10)))
    one, ten = (forecast(laws, layers, 100_000, 1) for layers in (1, 10))
    assert (one.accepted_tokens, ten.accepted_tokens) == pytest.approx((accepted(1, 100_000), accepted(10, 100_000)))
    assert one.tokens_per_second > ten.tokens_per_second, "ten layers take half a step of the target for each token"
    data = table(layers=(1, 10))
    for each in data["costs"]:
        each["draft"] = [[0, 0.0], [1, 1e-6]]
    one, ten = (forecast(read_laws(data), layers, 100_000, 1) for layers in (1, 10))
    assert one.tokens_per_second < ten.tokens_per_second
    assert (ten.num_draft_tokens, ten.tokens_per_step) == (K, pytest.approx(1 + accepted(10, 100_000), rel=1e-6))


def test_a_forecast_stays_between_none_and_all():
    laws = read_laws(table())
    assert forecast(laws, 1, 1, 1).accepted_tokens == 0
    assert forecast(laws, 1, 10**15, 1).accepted_tokens == K
    nothing = forecast(laws, 1, 1, 1)
    assert (nothing.num_draft_tokens, nothing.tokens_per_second) == (0, nothing.plain_tokens_per_second)
    assert forecast(read_laws(table() | {"costs": []}), 1, 10_000, 1).tokens_per_second is None
    with pytest.raises(ConfigError, match="drafters of 1, 2, 4 layers, not of 3"):
        forecast(laws, 3, 10_000, 1)


def test_the_best_k_fills_the_rows_that_cost_nothing():
    data = table(layers=(1,))
    data["points"] = [point(1, TOKENS[-1])]
    data["costs"][0]["draft"] = [[0, 0.0], [1, 1e-9], [16, 1e-9]]
    best = read_laws(data).best_draft_tokens(1, [1, 2, 4, 8, 16])
    assert best == {1: K, 2: K, 4: 3, 8: 1, 16: 0}
    assert BATCH_SIZES.of({4: 3.0, 8: 1.0, 16: 0.0}).slope > 0


def test_the_least_seconds_of_the_target_count():
    data = table(layers=(1, 2))
    data["costs"][1]["verify"] = [[1, 0.5], [16, 3.0]]
    laws = read_laws(data)
    assert laws.costs[1].verify(1) == laws.costs[2].verify(1) == 0.5
    assert laws.costs[2].verify(16) == 1.0


@pytest.mark.parametrize("shape", [[0.3], [0.5] * 5, [0.9, 0.2, 0.6], [0.4, 0.0, 1.0, 0.5]], ids=str)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 1])
def test_an_acceptance_has_the_accepted_tokens_and_the_order_of_its_shape(shape, share):
    found = acceptance_like(shape, share * len(shape))
    assert sum(accumulate(found, mul)) == pytest.approx(share * len(shape), abs=1e-4)
    assert all(0 <= p <= 1 for p in found)
    order = sorted(range(len(shape)), key=shape.__getitem__)
    assert [found[i] for i in order] == sorted(found)


def test_a_shape_of_equal_acceptances_stays_equal():
    assert acceptance_like([0.7] * 3, 0.5 + 0.25 + 0.125) == pytest.approx([0.5] * 3)


def test_the_nearest_drafter_gives_the_shape():
    data = table(layers=(1,), tokens=(1_000, 100_000))
    data["points"][0]["accepted_per_position"] = [570_000, *[0] * (K - 1)]
    data["costs"][0]["draft"] = [[0, 0.0], [1, 0.2]]
    laws = read_laws(data)
    assert [laws.nearest(1, tokens).training_tokens for tokens in (1, 9_000, 11_000)] == [1_000, 1_000, 100_000]
    assert [forecast(laws, 1, tokens, 1).num_draft_tokens for tokens in (9_000, 11_000)] == [1, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [({}, "num_draft_tokens"), ({"num_draft_tokens": 6, "points": []}, "without points"),
     (changed(num_draft_tokens=0), "num_draft_tokens is 0"), (changed(points=3), "no table of laws"),
     (changed(points=[3]), "no table of laws"), (changed(layers=0), "layers is 0"),
     (changed(layers=True), "layers has True"), (changed(training_tokens=1.5), "training_tokens has 1.5"),
     (changed(accepted_tokens=nan), "accepted_tokens is nan"), (changed(accepted_tokens=inf), "accepted_tokens is inf"),
     (changed(accepted_tokens="2"), "accepted_tokens is '2'"), (changed(accepted_tokens=7), "at most num_draft_tokens"),
     (changed(accepted_per_position=[1]), "expected 6 counts"), (changed(num_drafts=1), "up to num_drafts, 1"),
     (changed(seed=None), "seed is None"), (changed(costs=[{"layers": 1}]), "no table of laws"),
     (changed(costs=[costs(1) | {"verify": []}]), "verify has no seconds"),
     (changed(costs=[costs(1) | {"draft": [[1, nan]]}]), "draft is nan"),
     (changed(costs=[costs(1) | {"verify": [[1]]}]), "no table of laws")],
)  # fmt: skip
def test_tables_of_another_shape_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        read_laws(data)

"""The equivalence report: what it compares, how it counts, and the benchmark that runs it at length."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bench import exactness as bench_exactness
from bench.engine_ import acceptance
from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.compare import Comparison, Setting, best_logits, compare
from specdec_fast.equivalence.report import Matrix, Report, run
from specdec_fast.sampling_params import SamplingParams
from support.models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_compare_counts_outputs_tokens_and_bits(model):
    want = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    got = [[1, 2, 9, 4], [5, 6], [7, 8]]
    logprobs = (
        [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5], [-1.0, -2.0]],
        [[-1.0, -2.0, 0.0, 0.0], [-1.0, -2.0], [-1.0] * 3],
    )
    found = compare(Setting("eqspec", 2), model, [[1], [2], [3]], got, want, logprobs)
    assert found.exact_match == pytest.approx(1 / 3)
    assert found.partial_match == pytest.approx(6 / 9)
    assert found.equal_logprobs == pytest.approx(4 / 6)
    assert [(d.index, d.position) for d in found.divergences] == [(0, 2), (2, 2)]
    assert found.divergences[0].best_logits == best_logits(model, [1, 1, 2])
    assert found.divergences[0].gap == found.divergences[0].best_logits[0] - found.divergences[0].best_logits[1] > 0
    assert compare(Setting("eqspec", 2), model, [[1]], [[4]], [[4]]).equal_logprobs is None


def test_best_logits_are_the_models_own(model):
    logits = model(torch.tensor([[3, 4]])).logits[0, -1].sort(descending=True).values
    assert best_logits(model, [3, 4]) == pytest.approx(tuple(logits[:2].tolist()))


def comparison(exact, bits=1.0, **setting):
    return Comparison(Setting("eqspec", 2, **setting), exact, 1.0, [], bits)


@pytest.mark.parametrize(
    ("report", "holds"),
    [
        (Report(), True),
        (Report([comparison(1.0)], control=[comparison(0.5)], noise_floor=[comparison(0.5)]), True),
        (Report([comparison(1.0), comparison(0.99)]), False),
        (Report([comparison(1.0, bits=0.99)]), False),
        (Report([comparison(1.0)], [comparison(0.5, None, dtype="bfloat16")]), True),
        (Report([comparison(1.0)], [comparison(0.5, None, dtype="float32")]), False),
    ],
    ids=["empty", "control and noise may differ", "token", "bit", "bf16 parts from transformers", "fp32 parts from it"],
)  # fmt: skip
def test_what_the_promise_is(report, holds):
    assert report.holds is holds


def test_matrix_is_the_product_of_its_settings():
    params = SamplingParams()
    matrix = Matrix("t", ("d", "ngram"), EngineConfig(), ("float32",), {"greedy": params}, ("exspec",), (1, 4), (0, 3))
    settings = [(s.batch_size, s.num_draft_tokens, s.drafter) for s in matrix.settings()]
    assert settings == [(b, k, d) for b in (1, 4) for k, d in ((0, "none"), (3, "d"), (3, "ngram"))]


def test_rounds_limit_what_a_setting_decodes(model):
    calls = []

    class Recorded(Engine):
        def generate(self, prompts, *args, **kwargs):
            calls.append((self.config.max_batch_size, len(prompts)))
            return super().generate(prompts, *args, **kwargs)

    params = SamplingParams(max_new_tokens=2)
    matrix = Matrix(
        model, (), EngineConfig(), ("float32",), {"greedy": params}, ("autoregressive",), (1, 2, 4), (0,), 2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_fast.equivalence.report.Engine", Recorded)
        report = run(matrix, [[i] for i in range(1, 7)], lambda text: None)
    settings = [(1, 2), (2, 4), (4, 6)]
    has_program = Engine(model, None).describe()["forward_program"]
    controls = [settings[0], (1, 6), *settings[1:]] if has_program else settings  # with a reference of its own
    assert calls == [(1, 6), *settings, *controls]
    assert all(c.setting.enforce_eager for c in report.control)
    assert not any(c.setting.enforce_eager for c in report.comparisons)
    assert report.holds


@pytest.mark.grid
def test_bench_reports_and_fails_by_what_it_finds(tmp_path, monkeypatch, capsys):
    argv = ["--num-prompts", "4", "--max-new-tokens", "8", "--batch-sizes", "2", "--num-draft-tokens", "0,2"]
    argv += ["--repeats", "1", "--json", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit) as ended:
        bench_exactness.main(argv)
    assert ended.value.code == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["comparisons"]) == 3 * (1 + 2 * 3)
    assert result["determinism"]["speed_with_over_without"] > 0
    assert 1 <= result["acceptance"]["keyed_noise_tokens_per_step"] <= 6
    monkeypatch.setattr(Report, "holds", property(lambda self: False))
    with pytest.raises(SystemExit) as ended:
        bench_exactness.main([*argv, "--parts", "acceptance"])
    assert ended.value.code == 1
    capsys.readouterr()


class TestRejectionSampling:
    def test_all_and_nothing(self):
        assert acceptance._tokens_per_step([np.ones(61)], 5) == pytest.approx(6.0)
        assert acceptance._tokens_per_step([np.zeros(60)], 5) == 1.0

    def test_constant_overlap_gives_the_geometric_sum(self):
        """Leviathan et al., equation 1: (1 - a^(K + 1)) / (1 - a)."""
        expected = (1 - 0.7**5) / (1 - 0.7)
        assert acceptance._tokens_per_step([np.full(2000, 0.7)], 4) == pytest.approx(expected, rel=0.01)

    def test_overlap_is_one_minus_the_total_variation(self, model):
        other = tiny_model("llama", seed=1)
        overlaps = acceptance._overlaps(model, other, [3, 4], [5, 6])
        p, q = (m(torch.tensor([[3, 4, 5]])).logits[0, 1:].double().softmax(-1) for m in (model, other))
        np.testing.assert_allclose(overlaps, (1 - 0.5 * (p - q).abs().sum(-1)).detach().numpy(), rtol=1e-9)
        np.testing.assert_allclose(acceptance._overlaps(model, model, [3, 4], [5, 6]), 1.0)

"""Every program of ``examples/`` runs, and computes what the engine computes."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support.source_tree import ROOT

EXAMPLES = ROOT / "examples"
PROMPT = "One day, a little bird"


def load(name: str) -> dict:
    """Return the names of an example that is not run as a program."""
    return runpy.run_path(str(EXAMPLES / name))


@pytest.fixture(scope="module")
def plain():
    """Plain decoding of the bundled target, in the checkpoint's dtype as in the examples."""
    return sd.Engine(str(demo_pair() / "target"), None)


def text_of(plain, prompt, **params):
    (output,) = plain.generate([prompt], sd.SamplingParams(**params))
    return output.text


def test_every_example_is_listed_and_run():
    listed = (EXAMPLES / "README.md").read_text()
    elsewhere = ("tests/server/test_clients.py", "tests/integrations/test_ray_cluster.py")
    run = Path(__file__).read_text() + "".join((ROOT / name).read_text() for name in elsewhere)
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(names) >= 5
    assert [name for name in names if f"`examples/{name}`" not in listed or f'"{name}"' not in run] == []


def test_stream(capsys):
    runpy.run_path(str(EXAMPLES / "stream.py"), run_name="__main__")
    engine = sd.Engine(str(demo_pair() / "target"), None, dtype="float32")
    assert PROMPT + text_of(engine, PROMPT, max_new_tokens=40) in capsys.readouterr().out


def test_nearest_context(capsys, plain):
    runpy.run_path(str(EXAMPLES / "nearest_context.py"), run_name="__main__")
    found = re.fullmatch(r"40 tokens in (\d+) steps: (.*)\n", capsys.readouterr().out)
    assert found[2] == repr(text_of(plain, "Count from 3 to 9: 3,", max_new_tokens=40))
    assert int(found[1]) < 40, "some of its tokens are accepted"


def test_nearest_context_of_a_prompt_of_one_token(plain):
    """The first step has no hidden state to compare with."""
    drafter = load("nearest_context.py")["NearestContext"]()
    engine = sd.Engine(str(demo_pair() / "target"), drafter, num_draft_tokens=3)
    (output,) = engine.generate([[5]], sd.SamplingParams(max_new_tokens=20))
    assert output.raise_for_error().text == text_of(plain, [5], max_new_tokens=20)


def test_batch_job(tmp_path, capsys, plain):
    lines = [{"prompt": PROMPT}, {"prompt": [0, -1]}, {"prompt": "Count from 3 to 9: 3,", "max_new_tokens": 3}]
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = load("batch_job.py")["main"]([str(prompts), str(results), "--max-new-tokens", "9"])
    found = sorted((json.loads(line) for line in results.read_text().splitlines()), key=lambda result: result["line"])
    assert status == 1
    assert "3 requests, 1 failed" in capsys.readouterr().out
    assert [result["text"] for result in (found[0], found[2])] == [
        text_of(plain, PROMPT, max_new_tokens=9),
        text_of(plain, lines[2]["prompt"], max_new_tokens=3),
    ]
    assert (found[1]["finish_reason"], "-1" in found[1]["error"]) == ("error", True)


def test_fastapi_service(plain):
    testclient = pytest.importorskip("starlette.testclient")
    names = load("fastapi_service.py")
    engine = names["make_engine"]()
    with testclient.TestClient(names["make_service"](engine)) as client:
        text = client.post("/continue", json={"prompt": PROMPT, "max_new_tokens": 20}).text
        best = client.post("/best", json={"prompt": PROMPT, "max_new_tokens": 8, "num_samples": 3}).json()
        served = client.post("/openai/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "temperature": 0})
    assert engine.is_closed
    assert text == served.json()["choices"][0]["text"] == text_of(plain, PROMPT, max_new_tokens=20)
    assert best["text"] in [text_of(plain, PROMPT, max_new_tokens=8, temperature=0.8, seed=seed) for seed in range(3)]
    assert best["mean_logprob"] < 0


def test_fastapi_service_shows_errors(monkeypatch, caplog):
    """With the statuses of OpenAI's API; an error after the first text breaks off the response."""
    testclient = pytest.importorskip("starlette.testclient")
    names = load("fastapi_service.py")
    engine = names["make_engine"]()
    step, steps = engine.engine.core.step, []

    def fail_later():
        steps.append(len(steps))
        return step() if len(steps) < 3 else 1 / 0

    with testclient.TestClient(names["make_service"](engine)) as client:
        for path in ("/continue", "/best"):
            for prompt, message in (("", "empty string"), ("word " * 600, "can serve 512 positions")):
                refused = client.post(path, json={"prompt": prompt, "num_samples": 1})
                assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True)
        monkeypatch.setattr(engine.engine.core, "step", fail_later)
        with pytest.raises(RuntimeError, match="response already started") as caught:
            client.post("/continue", json={"prompt": PROMPT, "max_new_tokens": 40})
        failed = client.post("/continue", json={"prompt": PROMPT})
        client.portal.call(engine.close)
        closed = [client.post(path, json={"prompt": PROMPT}).status_code for path in ("/continue", "/best")]
    assert isinstance(caught.value.__cause__, sd.StepError)
    assert (failed.status_code, "the step" in failed.json()["error"]["message"]) == (500, True)
    assert any(record.exc_info and record.exc_info[0] is sd.StepError for record in caplog.records)
    assert closed == [503, 503]


def test_notebook(monkeypatch, capsys):
    """The cells run in order, and the last one compares the step with the engine's."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "one_step.ipynb").read_text())
    names: dict = {}
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)  # a diff shows code alone
            exec(compile("".join(cell["source"]), f"one_step.ipynb, cell {index}", "exec"), names)
    names["plt"].close("all")
    assert [second for _, second, *_ in names["chunks"]] == names["emitted"]
    assert len(set(names["num_accepted"])) > 1, "the pictures should show sequences that differ"


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")  # of TRL, about its experimental features
def test_grpo(capsys):
    pytest.importorskip("trl", reason="the extra rl is not installed")
    status = load("grpo.py")["main"](["--steps", "2", "--drafts", "model,self"])
    assert status == 0
    assert capsys.readouterr().out.count("the same completions, the same weights after 2 steps") == 2

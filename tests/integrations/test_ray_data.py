"""BatchGenerator as a worker of Ray Data calls it, without a cluster; ``test_ray_cluster.py`` has one."""

from __future__ import annotations

import numpy as np
import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.integrations.ray_data import BatchGenerator, sum_stats

PAIR = str(demo_pair() / "target"), str(demo_pair() / "draft")
LIMIT = sd.SamplingParams(max_new_tokens=12)


def column(values):
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = value
    return found


@pytest.fixture(scope="module")
def worker():
    return BatchGenerator(*PAIR, params=LIMIT)


@pytest.fixture(scope="module")
def plain():
    return sd.Engine(PAIR[0], None)


def test_rows_get_the_outputs_of_the_engine_and_keep_their_columns(worker, plain, prompts):
    batch = {"id": np.arange(5), "prompt": np.array(prompts[:5])}
    found = worker(batch)
    expected = plain.generate(prompts[:5], LIMIT)
    assert list(found)[:2] == ["id", "prompt"]
    assert found["id"] is batch["id"]
    assert list(found["output_text"]) == [output.text for output in expected]
    assert list(found["output_token_ids"]) == [output.token_ids for output in expected]
    assert list(found["output_finish_reason"]) == [output.finish_reason for output in expected]
    assert list(found["output_error"]) == [""] * 5
    assert "output_logprobs" not in found


def test_prompts_that_begin_alike_share_pages_unless_the_config_says_otherwise(worker):
    prompts = np.array([[*range(40), i] for i in range(2)])
    for _ in range(2):
        worker({"prompt": prompts})
    assert worker.engine.last_run.num_cached_tokens == 2 * 32
    assert BatchGenerator(*PAIR, params=LIMIT, prefix_cache=False).engine.config.prefix_cache is False


@pytest.mark.parametrize("as_array", [True, False])
def test_prompts_may_be_ids(worker, plain, prompts, as_array):
    ids = [plain.encode(prompt) for prompt in prompts[:3]]
    rows = [np.array(row) for row in ids] if as_array else ids
    found = worker({"prompt": column(rows)})
    assert list(found["output_token_ids"]) == [output.token_ids for output in plain.generate(ids, LIMIT)]


def test_a_matrix_of_ids_is_one_prompt_per_row(worker, plain):
    """Ray Data makes one of lists of equal length."""
    ids = [[0, 5, 9], [0, 7, 2]]
    found = worker({"prompt": np.array(ids)})
    assert list(found["output_token_ids"]) == [output.token_ids for output in plain.generate(ids, LIMIT)]


def test_messages_lose_the_keys_that_arrow_added(plain):
    template = "{% for message in messages %}{{ message.keys() | list }}{% endfor %}"
    worker = BatchGenerator(*PAIR, params=LIMIT, chat_template=template)
    chats = [[{"role": "user", "content": "Hi", "name": None}], [{"role": "user", "content": "Hi", "name": "Ann"}]]
    found = worker({"prompt": column(chats)})
    texts = ["['role', 'content']", "['role', 'content', 'name']"]
    expected = plain.generate(texts, LIMIT, add_special_tokens=False)
    assert list(found["output_token_ids"]) == [output.token_ids for output in expected]


@pytest.mark.parametrize("bad", [[0, -1], None, 7, "", {"role": "user", "content": "Hi"}])
def test_a_bad_row_fails_alone(worker, plain, prompts, bad):
    found = worker({"prompt": column([prompts[0], bad, prompts[1]])})
    expected = plain.generate(prompts[:2], LIMIT)
    assert [found["output_token_ids"][i] for i in (0, 2)] == [output.token_ids for output in expected]
    assert list(found["output_finish_reason"] == "error") == [False, True, False]
    assert found["output_error"][1]
    assert found["output_error"][0] == found["output_error"][2] == ""
    assert found["output_token_ids"][1] == []


def test_a_batch_of_bad_rows_is_a_batch(worker):
    found = worker({"prompt": column([None, 3.5])})
    assert list(found["output_finish_reason"]) == ["error"] * 2
    assert sum_stats([{"output_stats": stats} for stats in found["output_stats"]]) == sd.DecodingStats(
        accepted_per_position=[0] * 5
    )


def test_parameters_of_each_row_fix_its_noise_wherever_it_falls(prompts, plain):
    def params(row):
        return sd.SamplingParams(max_new_tokens=10, temperature=1.0, seed=int(row["id"]), logprobs=True)

    worker = BatchGenerator(*PAIR, params=params, max_batch_size=3)
    ids, texts = np.arange(6), np.array([prompts[0]] * 6)
    whole = worker({"id": ids, "prompt": texts})
    halves = [worker({"id": ids[part], "prompt": texts[part]}) for part in (slice(4, 6), slice(0, 4))]
    again = [*halves[1]["output_logprobs"], *halves[0]["output_logprobs"]]
    expected = plain.generate(list(texts), [params({"id": i}) for i in ids])
    assert list(whole["output_token_ids"]) == [output.token_ids for output in expected]
    assert list(whole["output_logprobs"]) == again == [output.logprobs for output in expected]
    assert len({tuple(tokens) for tokens in whole["output_token_ids"]}) > 1


def test_a_row_whose_parameters_are_wrong_fails_alone(prompts):
    worker = BatchGenerator(*PAIR, params=lambda row: sd.SamplingParams(max_new_tokens=row["limit"]))
    found = worker({"limit": np.array([3, 0]), "prompt": np.array(prompts[:2])})
    assert list(found["output_finish_reason"]) == ["length", "error"]
    assert "max_new_tokens=0" in found["output_error"][1]


def test_several_texts_of_a_row_are_refused(prompts):
    with pytest.raises(sd.InvalidParamsError, match="n=2: a row has one output"):
        BatchGenerator(*PAIR, params=sd.SamplingParams(n=2))
    worker = BatchGenerator(*PAIR, params=lambda row: sd.SamplingParams(max_new_tokens=2, n=int(row["n"]), logprobs=2))
    found = worker({"prompt": np.array(prompts[:2]), "n": np.array([2, 1])})
    assert "n=2: a row has one output" in found["output_error"][0]
    assert [len(each) for each in found["output_logprobs"]] == [0, 2]


def test_sampling_without_a_seed_is_refused(prompts):
    unseeded = sd.SamplingParams(temperature=0.5)
    with pytest.raises(sd.InvalidParamsError, match="seed"):
        BatchGenerator(*PAIR, params=unseeded)
    found = BatchGenerator(*PAIR, params=lambda row: unseeded)({"prompt": np.array(prompts[:1])})
    assert "seed" in found["output_error"][0]


def test_statistics_add_up_to_those_of_one_run(worker, prompts):
    engine = sd.Engine(*PAIR)
    engine.generate(prompts, LIMIT, progress=False)
    parts = [worker({"prompt": np.array(prompts[i : i + 8])}) for i in range(0, 32, 8)]
    rows = [{"output_stats": stats} for part in parts for stats in part["output_stats"]]
    assert sum_stats(rows) == engine.last_run.decoding
    assert engine.last_run.decoding.num_accepted_tokens > 0
    assert {len(row["output_stats"]["accepted_per_position"]) for row in rows} == {5}


def test_columns_have_names_of_their_own(prompts):
    worker = BatchGenerator(PAIR[0], None, params=LIMIT, prompt_column="text", output_prefix="")
    batch = {"text": np.array(prompts[:1])}
    with pytest.raises(sd.ConfigError, match="column text already; pass another output_prefix"):
        worker(batch)
    with pytest.raises(sd.ConfigError, match="no column 'text' for the prompts; the rows have prompt"):
        worker({"prompt": batch["text"]})
    with pytest.raises(sd.ConfigError, match="batch_format='numpy'"):
        worker(object())


def test_tables_keep_the_types_of_their_columns(prompts, plain):
    pa = pytest.importorskip("pyarrow")

    def params(row):
        return sd.SamplingParams(max_new_tokens=row["limit"], logprobs=True)

    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    worker = BatchGenerator(*PAIR, params=params, chat_template=template)
    chats = [[{"role": "user", "content": prompts[0]}], [{"role": "user", "content": "Hi", "name": "Ann"}], None]
    table = pa.table({"limit": [3, 4, 5], "prompt": chats})
    found = worker(table)
    expected = plain.generate(
        [prompts[0], "Hi"], [params({"limit": 3}), params({"limit": 4})], add_special_tokens=False
    )
    assert found.select(["limit", "prompt"]) == table
    assert found["output_token_ids"].to_pylist() == [*(output.token_ids for output in expected), []]
    assert found["output_logprobs"].to_pylist() == [*(output.logprobs for output in expected), []]
    assert found["output_finish_reason"].to_pylist() == ["length", "length", "error"]
    assert sum_stats(found.to_pylist()).num_emitted_tokens == 7
    nothing = worker(pa.table({"limit": [3], "prompt": pa.array([None], table["prompt"].type)}))
    assert nothing.schema == found.schema, "files of a job must have one schema"


def test_wrong_keywords_are_refused_before_a_model_is_loaded():
    with pytest.raises(sd.ConfigError, match="belongs to a request"):
        BatchGenerator("no/such/model", None, temperature=0.5)
    with pytest.raises(sd.InvalidParamsError, match="params is a dict"):
        BatchGenerator("no/such/model", None, params={"temperature": 0.5})


def test_without_the_extra_the_name_says_so(monkeypatch):
    import specdec_fast.integrations.ray as public

    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    for name in public.__all__:
        with pytest.raises(sd.ConfigError, match=r"pip install '\.\[ray\]'"):
            getattr(public, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        public.nothing  # noqa: B018

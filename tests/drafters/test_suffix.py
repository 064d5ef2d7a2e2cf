"""The drafter ``"suffix"``: its copies are those of a scan over all texts, and it learns from finished requests."""

from __future__ import annotations

from collections import Counter
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import specdec_fast as sd
from specdec_fast.drafters.suffix.drafter import heaviest_chain, heaviest_tree, weights_of
from specdec_fast.drafters.suffix.index import LONGEST_MATCH, MOST_COPIES, SIZES, Copy, SuffixIndex
from specdec_fast.trees.parents import ROOT
from support.demo import MAX_NEW_TOKENS
from support.grids import grid

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6)


def copies_by_scan(texts, tokens):
    """Every place behind a copy of the last n tokens, for the longest n with any: each with the tokens that agree."""
    for n in SIZES:
        found = Counter()
        for text in texts:
            for end in range(n, len(text)):
                if len(tokens) >= n and text[end - n : end] == tokens[-n:]:
                    agreeing = n
                    while agreeing < min(end, len(tokens), LONGEST_MATCH) and (
                        text[end - agreeing - 1] == tokens[-agreeing - 1]
                    ):
                        agreeing += 1
                    found[tuple(text), end, agreeing] += 1
        if found:
            return found
    return Counter()


@settings(max_examples=150)
@given(TEXTS, st.randoms())
def test_copies_are_those_of_a_scan_while_texts_grow(texts, random):
    index = SuffixIndex(10_000)
    numbers = [index.begin() for _ in texts]
    grown = [[] for _ in texts]
    for _ in range(2 * len(texts)):
        i = random.randrange(len(texts))
        grown[i] = texts[i][: random.randint(len(grown[i]), len(texts[i]))]
        index.extend(numbers[i], grown[i])
        found = index.copies(grown[i])
        wanted = copies_by_scan(grown, grown[i])
        assert len(found) == min(MOST_COPIES, sum(wanted.values()))
        assert not Counter((tuple(c.token_ids), c.follows, c.length) for c in found) - wanted
    assert index.num_tokens == sum(map(len, grown))


def test_texts_that_were_not_used_for_longest_leave():
    index = SuffixIndex(30)
    for i in range(40):
        number = index.begin()
        index.extend(number, [100 + i, 200 + i, 300 + i, 400 + i, 500 + i])
        index.end(number)
        assert index.copies([100, 200]), "used in every round, so it never leaves"
        assert index.num_tokens <= 30
    assert [text[0] for text in index.finished()] == [100 + i for i in (35, 36, 37, 38, 39, 0)]
    assert not index.copies([110, 210]), "left"
    tables = index._tables.values()
    assert sum(len(positions) for table in tables for positions in table.values()) < 3 * 2 * 30, "made anew"


def test_a_text_that_grows_does_not_leave():
    index = SuffixIndex(4)
    growing = index.begin()
    index.extend(growing, [1, 2, 3, 4, 5, 6])
    for _ in range(3):
        index.end(index.begin())
    assert index.copies([1, 2])[0].follows == 2
    index.end(growing)
    assert not index.copies([1, 2])


COPIES = st.lists(
    st.builds(Copy, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.just(0), st.integers(1, 4)), max_size=6
)


@settings(max_examples=150)
@given(COPIES, st.integers(1, 5), st.integers(1, 9))
def test_trees_are_the_heaviest_paths_and_chains_their_heaviest_children(copies, depth, num_nodes):
    weights = Counter()
    for copy, weight in zip(copies, weights_of(copies), strict=True):
        for length in range(1, min(depth, len(copy.token_ids)) + 1):
            weights[tuple(copy.token_ids[:length])] += weight
    total = sum(weights_of(copies)) + 1
    tree = heaviest_tree(copies, depth, num_nodes)
    paths = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    assert len(set(paths)) == len(paths) == min(num_nodes, len(weights))
    assert [exp(score) for score in tree.scores] == pytest.approx([weights[path] / total for path in paths])
    left = [weights[path] for path in weights if path not in paths]
    assert min((weights[path] for path in paths), default=0) >= max(left, default=0)
    chain = heaviest_chain(copies, depth)
    path = ()
    for token, score in chain:
        siblings = {p: w for p, w in weights.items() if p[:-1] == path}
        path = (*path, token)
        assert siblings[path] == max(siblings.values())
        assert exp(score) == pytest.approx(weights[path] / total)
    assert not any(p[:-1] == path for p in weights) or len(path) == depth


@pytest.mark.parametrize(
    ("batch_size", "tree"), grid([(1, None), (4, None), (4, 8), (1, 3), (8, "chain")], keep=[(4, None), (4, 8)])
)
def test_outputs_are_exact_and_later_runs_draft_from_earlier_ones(target, prompt_ids, expected, batch_size, tree):
    engine = sd.Engine(target, "suffix", max_batch_size=batch_size, num_draft_tokens=4, draft_tree=tree)
    num_steps = []
    for _ in range(2):
        outputs = engine.generate(prompt_ids, PARAMS)
        assert [output.token_ids for output in outputs] == expected
        num_steps.append(sum(output.stats.num_steps for output in outputs))
    assert num_steps[1] < 0.5 * num_steps[0]
    assert not engine.drafter._numbers, "released sequences grow no more"
    assert engine.describe()["draft"]["num_tokens"] == 2 * sum(map(len, prompt_ids + expected))


def test_samples_of_one_prompt_draft_from_each_other(target, prompt_ids):
    params = sd.SamplingParams(max_new_tokens=48, temperature=0.5, seed=3, n=12)
    plain = sd.generate(target, None, prompt_ids[:1], params)
    steps = {}
    for draft in ("ngram", "suffix"):
        outputs = sd.generate(target, draft, prompt_ids[:1], params, max_batch_size=4)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        steps[draft] = sum(output.stats.num_steps for output in outputs)
    assert steps["suffix"] < 0.9 * steps["ngram"]


def test_a_preempted_request_has_one_text(target, prompt_ids):
    params = sd.SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [prompt[:10] for prompt in prompt_ids]
    engine = sd.Engine(target, "suffix", max_batch_size=4, kv_cache_tokens=120, page_size=4)
    outputs = engine.generate(prompts, params)
    assert engine.last_run.num_preemptions
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    assert sorted(engine.drafter.index.finished()) == sorted(texts)


def test_a_cancelled_request_may_leave(target, prompt_ids):
    engine = sd.Engine(target, "suffix", max_batch_size=2)
    engine.drafter.index.max_tokens = 0
    stream = engine.stream(prompt_ids[:2], sd.SamplingParams(max_new_tokens=60, ignore_eos=True))
    for _ in range(4):
        next(stream)
    stream.close()
    engine.generate(prompt_ids[:1], PARAMS)
    assert engine.drafter.index.num_tokens == 0


def test_texts_are_saved_and_loaded(target, prompt_ids, expected, tmp_path):
    first = sd.Engine(target, "suffix")
    first.generate(prompt_ids, PARAMS)
    first.drafter.save(tmp_path / "texts.safetensors")
    second = sd.Engine(target, f"suffix:{tmp_path / 'texts.safetensors'}")
    assert list(second.drafter.index.finished()) == list(first.drafter.index.finished())
    outputs = second.generate(prompt_ids, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    assert second.last_run.num_steps < 0.5 * first.last_run.num_steps
    second.drafter.clear()
    assert second.describe()["draft"]["num_tokens"] == 0


IDS = torch.arange(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, r"not texts that SuffixDrafter\.save wrote"),
        ({"token_ids": IDS}, r"not texts that SuffixDrafter\.save wrote"),
        ({"token_ids": IDS, "lengths": torch.tensor([3, 4])}, "its lengths do not divide its token_ids"),
        ({"token_ids": IDS, "lengths": torch.tensor([7, -1])}, "its lengths do not divide its token_ids"),
        ({"token_ids": IDS.float(), "lengths": torch.tensor([6])}, "its lengths do not divide its token_ids"),
        ({"token_ids": IDS - 1, "lengths": torch.tensor([6])}, "it has ids from -1 to 4"),
        ({"token_ids": IDS + 10**6, "lengths": torch.tensor([6])}, "it was saved for another target"),
    ],
)
def test_a_file_of_other_content_is_refused(target, tmp_path, tensors, message):
    file = tmp_path / "texts.safetensors"
    if tensors is None:
        file.write_bytes(b"no tensors")
    else:
        save_file(tensors, file)
    with pytest.raises(sd.ConfigError, match=message):
        sd.Engine(target, f"suffix:{file}")


def test_settings_that_it_cannot_follow_are_refused(target, tmp_path):
    with pytest.raises(sd.ConfigError, match=r"not texts that SuffixDrafter\.save wrote"):
        sd.Engine(target, f"suffix:{tmp_path / 'none'}")
    with pytest.raises(sd.ConfigError, match="takes a number of nodes"):
        sd.Engine(target, "suffix", draft_tree=((0,), (1,)))
    with pytest.raises(sd.OutputError):
        sd.Engine(target, "suffix").drafter.save(tmp_path / "no folder" / "texts.safetensors")

"""What a request allows, adds and forbids: exact under speculation, for chains and trees, in every batch."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specdec_fast as sd
from specdec_fast.batch import sampling_batch
from specdec_fast.engine import core
from specdec_fast.request.token_masks import TokenMasks
from specdec_fast.runner import verification
from support import clover, eagle3, medusa, specblock
from support.choice import KINDS, PROMPTS, params_of, texts_by_transformers
from support.grids import grid
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.scripted_trees import RandomTrees

TRIPLES = list(combinations(KINDS, 3))
ALL = tuple(KINDS)
SINGLES = [(kind,) for kind in KINDS]


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    return SimpleNamespace(target=target, draft=truncated_copy(target, 2))


def decode(engine, params):
    outputs = engine.generate(PROMPTS, params, progress=False)
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def plain(target, params, **settings):
    return decode(sd.Engine(target, None, max_batch_size=1, page_size=4, **settings), params)


def tokens(outputs):
    return [token_ids for token_ids, _ in outputs]


@pytest.mark.parametrize("kinds", grid({"-".join(kinds): kinds for kinds in [*SINGLES, ALL]}, keep=["-".join(ALL)]))
def test_tokens_are_those_of_transformers_operations(pair, kinds):
    params = params_of(*kinds)
    expected = texts_by_transformers(pair.target, params)
    assert tokens(plain(pair.target, params)) == expected
    assert sum(text != other for text, other in zip(expected, tokens(plain(pair.target, params_of())), strict=True)) > 1
    engine = sd.Engine(pair.target, pair.draft, max_batch_size=4, num_draft_tokens=4)
    assert tokens(decode(engine, params)) == expected


@pytest.mark.grid
@pytest.mark.parametrize("kinds", TRIPLES, ids="-".join)
def test_three_at_a_time_are_those_of_transformers_operations(pair, kinds):
    params = params_of(*kinds)
    engine = sd.Engine(pair.target, pair.draft, max_batch_size=4, num_draft_tokens=4)
    assert tokens(decode(engine, params)) == texts_by_transformers(pair.target, params)


# Drafters of chains and trees with one-call, eager and graphless loops; several batch sizes, K and schedulers.
ENGINES = {
    "draft model": {"draft": "model", "max_batch_size": 3, "num_draft_tokens": 5},
    "draft model alone": {"draft": "model", "max_batch_size": 1, "num_draft_tokens": 2, "method": "eqspec"},
    "draft model auto": {"draft": "model", "max_batch_size": 6, "num_draft_tokens": "auto"},
    "self": {"draft": "self", "max_batch_size": 4, "num_draft_tokens": 3},
    "ngram": {"draft": "ngram", "max_batch_size": 2, "num_draft_tokens": 4},
    "ngram-trie": {"draft": "ngram-trie", "max_batch_size": 3, "num_draft_tokens": 4},
    "random trees": {"draft": "trees", "max_batch_size": 4, "num_draft_tokens": 5},
    "pytorch": {"draft": "trees", "max_batch_size": 2, "num_draft_tokens": 4, "backend": "torch"},
    "preempted": {"draft": "trees", "max_batch_size": 6, "num_draft_tokens": 4, "kv_cache_tokens": 48, "page_size": 4},
}


def engine_of(pair, name, params, expected):
    settings = dict(ENGINES[name])
    draft = settings.pop("draft")
    if draft == "model":
        draft = pair.draft
    elif draft == "trees":
        draft = RandomTrees(tokens(expected), max_nodes=12)
    return sd.Engine(pair.target, draft, **settings)


@pytest.mark.parametrize(
    ("kinds", "name"),
    grid(
        product([*SINGLES, ALL], ENGINES),
        keep=lambda case: case[0] == ALL and case[1] in ("random trees", "preempted", "draft model"),
    ),
)
def test_speculation_changes_nothing(pair, kinds, name):
    params = params_of(*kinds, logprobs=True)
    settings = {"backend": "torch"} if name == "pytorch" else {}
    expected = plain(pair.target, params, **settings)
    engine = engine_of(pair, name, params, expected)
    assert decode(engine, params) == expected
    assert engine.last_run.num_preemptions > 0 or name != "preempted"
    if "trees" in name:
        assert engine.last_run.decoding.mean_acceptance_length > 1.3, "the trees held little of the text"


@pytest.mark.grid
@pytest.mark.parametrize(("kinds", "name"), [*product(TRIPLES, ["draft model", "random trees", "preempted"])])
def test_three_at_a_time_change_nothing(pair, kinds, name):
    params = params_of(*kinds, logprobs=True)
    expected = plain(pair.target, params)
    assert decode(engine_of(pair, name, params, expected), params) == expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory, pair):
    root = tmp_path_factory.mktemp("drafters")
    hidden = pair.target.config.hidden_size
    eagle3.write_checkpoint(root / "eagle3", pair.target, draft_vocab_size=60)
    specblock.write_checkpoint(root / "specblock", pair.target, draft_vocab_size=60)
    medusa.write_heads(root / "medusa", medusa.named(medusa.random_heads(VOCAB_SIZE, hidden), "safetensors"))
    clover.write_clover(root / "clover", clover.random_clover(), VOCAB_SIZE)
    return root


LEARNED = {
    "eagle3": {},
    "eagle3 trees": {"draft_tree": 12},
    "medusa": {"draft_tree": [[0], [0, 0], [1], [0, 1]]},
    "clover": {"draft_tree": [[0], [0, 0], [1], [0, 1]]},
    "specblock": {},
}


@pytest.mark.parametrize(
    ("name", "eager"),
    grid(product(LEARNED, [False, True]), keep=[("eagle3 trees", False), ("medusa", False)]),
)
def test_learned_drafters(pair, folders, name, eager):
    params = params_of(*ALL)
    kind = name.split()[0]
    engine = sd.Engine(
        pair.target, f"{kind}:{folders / kind}", max_batch_size=3, num_draft_tokens=3, enforce_eager=eager,
        **LEARNED[name],
    )  # fmt: skip
    assert decode(engine, params) == plain(pair.target, params, enforce_eager=eager)
    assert engine.last_run.decoding.num_draft_tokens > 0


@pytest.mark.parametrize(
    "kind", grid([kind for kind in KINDS if kind != "processors"], keep=["bad_words", "frequency"])
)
def test_the_draft_model_chooses_by_the_same_rule(pair, kind):
    """With the target as its own draft every draft token is accepted: masks, biases and counts follow its drafts."""
    engine = sd.Engine(pair.target, pair.target, max_batch_size=4, num_draft_tokens=4)
    engine.generate(PROMPTS, params_of(kind), progress=False)
    decoding = engine.last_run.decoding
    assert 0 < decoding.num_draft_tokens == decoding.num_accepted_tokens


def test_neighbours_without_restrictions_keep_their_bits(pair):
    """Restricted requests beside plain ones: both have the outputs that they have alone."""
    restricted, free = params_of(*ALL, logprobs=True), params_of(logprobs=True)
    alone = plain(pair.target, restricted), plain(pair.target, free)
    mixed = [restricted[i] if i % 2 else free[i] for i in range(len(PROMPTS))]
    expected = [alone[0][i] if i % 2 else alone[1][i] for i in range(len(PROMPTS))]
    for drafter in (pair.draft, RandomTrees(tokens(expected), max_nodes=12)):
        engine = sd.Engine(pair.target, drafter, max_batch_size=6, num_draft_tokens=4)
        assert decode(engine, mixed) == expected


def test_no_token_is_emitted_that_a_request_forbids(pair):
    params = params_of("allowed", "bad_words", "min_tokens")
    for prompt, (token_ids, _) in zip(PROMPTS, plain(pair.target, params), strict=True):
        words = {word for word in map(tuple, KINDS["bad_words"]["bad_words"]) if len(word) == 2}
        assert set(token_ids) <= set(KINDS["allowed"]["allowed_token_ids"]) - {3, 40}
        assert not words & set(zip([prompt[-1], *token_ids], token_ids, strict=False))
        assert len(token_ids) >= 11


# Negative controls: mistakes that the comparisons above must show.
def with_rejected_tokens(monkeypatch):
    """Counts of penalties keep the draft tokens that were rejected."""
    rejected: dict[int, list[int]] = {}
    commit, describe = core.commit_emissions, sampling_batch.sampling_of

    def remembering(step, emissions, *others):
        first = 0
        for sequence, count, emission in zip(step.batch, step.draft.num_draft_tokens, emissions, strict=True):
            drafted = step.draft.token_ids[first : first + count].tolist()
            rejected.setdefault(id(sequence), []).extend(drafted[len(emission) - 1 :])
            first += count
        return commit(step, emissions, *others)

    def counting(batch, device, ahead=0, allowed=None):
        copies = []
        for sequence in batch:
            more = rejected.get(id(sequence), [])
            copy = SimpleNamespace(
                params=sequence.params, samples=sequence.samples, seed=sequence.seed, length=sequence.length,
                prompt_length=sequence.prompt_length, token_ids=[*sequence.token_ids, *more],
            )  # fmt: skip
            copies.append(copy)
        return describe(copies, device, ahead, allowed)

    monkeypatch.setattr(core, "commit_emissions", remembering)
    monkeypatch.setattr(verification, "sampling_of", counting)


def with_rows_that_stay(monkeypatch):
    """The rows of masks that a step has made are those of later steps as well."""
    follow = TokenMasks._follow

    def keeping(masks, emitted):
        rows = dict(masks._rows)
        follow(masks, emitted)
        masks._rows.update(rows)

    monkeypatch.setattr(TokenMasks, "_follow", keeping)


def with_masks_of_the_root(monkeypatch):
    """Every row of a sequence has the mask of its first row."""
    original = verification.mask_rows

    def wrong(sequences, drafted, num_draft_tokens, *others):
        rows = original(sequences, drafted, num_draft_tokens, *others)
        firsts = np.repeat(np.cumsum([0, *(count + 1 for count in num_draft_tokens)])[:-1], np.add(num_draft_tokens, 1))
        return rows._replace(words=rows.words[firsts])

    monkeypatch.setattr(verification, "mask_rows", wrong)


def without_counts_of_the_path(monkeypatch):
    """Penalties count committed tokens, and no draft token of the row's path."""
    monkeypatch.setattr(
        verification, "sampling_of", lambda *args, **more: frozen(sampling_batch.sampling_of(*args, **more))
    )


def frozen(sampling):
    empty = torch.zeros_like(sampling.seen_ids)[:0]
    return sampling_batch.replace(
        sampling,
        seen_ids=empty,
        cu_seen=torch.zeros_like(sampling.cu_seen),
        adjustments=sampling_batch.replace(
            sampling.adjustments, num_prompt=torch.zeros_like(sampling.adjustments.num_prompt)
        ),
    )


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (with_rejected_tokens, "frequency"),
        (with_rejected_tokens, "presence"),
        (without_counts_of_the_path, "presence"),
        (with_rows_that_stay, "bad_words"),
        (with_masks_of_the_root, "bad_words"),
        (with_masks_of_the_root, "min_tokens"),
    ],
)
def test_mistakes_change_texts(pair, monkeypatch, mistake, kind):
    params = params_of(kind)
    expected = tokens(plain(pair.target, params))
    mistake(monkeypatch)
    engine = sd.Engine(pair.target, pair.draft, max_batch_size=3, num_draft_tokens=5)
    outputs = engine.generate(PROMPTS, params, progress=False)
    assert [output.token_ids for output in outputs] != expected

"""The replaying drafter: the requested acceptance, the inner drafter's work, and never a wrong token."""

from __future__ import annotations

import pytest
import torch
from pair_report import walk_rounds

from bench.common.replay import ReplayDrafter
from specdec_fast import Draft, Drafter, Engine, SamplingParams, TreeDrafter
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.ops import resolve
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.trees.parents import depths_of
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.recording_drafter import Recording

CPU = torch.device("cpu")
NEW_TOKENS = 40
PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(VOCAB_SIZE, (n,), generator=GENERATOR).tolist() for n in (3, 9, 5, 1, 12, 7)]


class Sevens(Drafter):
    """Proposes as many 7s as it may, and notes what it was called with."""

    name = "sevens"

    def __init__(self):
        self.asked = []

    def propose(self, sequences, limits):
        self.asked.append([sequence.index for sequence in sequences])
        return Draft(torch.full((sum(limits),), 7), limits)


def sequence(index, prompt, emitted):
    tokens = [*prompt, *emitted]
    return Sequence(index, tokens, len(prompt), len(tokens) + 100, PARAMS, frozenset())


def proposals(drafter, index, transcript):
    """All proposals for one prompt if every one is accepted."""
    return drafter.propose([sequence(index, [0], [])], [len(transcript)]).token_ids.tolist()


@pytest.mark.parametrize("probability", [0.0, 0.6, 0.8, 1.0])
def test_as_many_tokens_are_right_as_asked(probability):
    transcripts = torch.randint(1000, (50, 400), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = ReplayDrafter(Sevens(), transcripts, probability, 1000, CPU)
    drafted = torch.tensor([proposals(drafter, i, transcript) for i, transcript in enumerate(transcripts)])
    right = (drafted == torch.tensor(transcripts)).double()
    deviation = (probability * (1 - probability) / right.numel()) ** 0.5  # of the mean of independent draws
    assert float(right.mean()) == pytest.approx(probability, abs=4 * deviation)
    assert 0 <= int(drafted.min()) <= int(drafted.max()) < 1000


class Twos(TreeDrafter):
    """Proposes binary trees of three levels."""

    name = "twos"
    max_nodes = 6
    PARENTS = (-1, 0, 1, 1, 0, -1)  # depths 1, 2, 3, 3, 2, 1

    def propose_trees(self, sequences, limits, node_limits):
        count = len(sequences)
        parents = torch.tensor(self.PARENTS * count, dtype=torch.int32)
        return Draft(torch.full((6 * count,), 7), [6] * count, parents)


@pytest.mark.parametrize(("probability", "siblings"), [(1.0, 0.0), (0.7, 0.5), (0.0, 1.0), (0.0, 0.0)])
def test_a_tree_has_the_tokens_on_one_path(probability, siblings):
    transcripts = torch.randint(1000, (300, 40), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = ReplayDrafter(Twos(), transcripts, probability, 1000, CPU, among_siblings=siblings)
    firsts = seconds = 0
    for index, transcript in enumerate(transcripts):
        draft = drafter.propose_trees([sequence(index, [0], transcript[:5])], [3], [6])
        draft.check([3], [6])
        tokens = draft.token_ids.tolist()
        right = [tokens[node] == transcript[5 + depth - 1] for node, depth in enumerate(depths_of(list(Twos.PARENTS)))]
        assert not (right[0] and right[5])
        firsts += right[0]
        seconds += right[5]
        assert all(right[parent] for node, parent in enumerate(Twos.PARENTS) if right[node] and parent >= 0)
    share = firsts / len(transcripts)
    second_share = seconds / len(transcripts)
    assert share == pytest.approx(probability, abs=4 * (0.25 / len(transcripts)) ** 0.5)
    expected = (1 - probability) * siblings
    assert second_share == pytest.approx(expected, abs=4 * (0.25 / len(transcripts)) ** 0.5)


def test_draws_belong_to_seed_prompt_and_position():
    transcript = list(range(200))
    first = ReplayDrafter(Sevens(), [transcript, transcript], 0.5, 500, CPU, seed=1)
    alone = proposals(first, 0, transcript)
    assert proposals(first, 1, transcript) != alone
    other = ReplayDrafter(Sevens(), [transcript, transcript], 0.5, 500, CPU, seed=2)
    assert proposals(other, 0, transcript) != alone
    batch = [sequence(1, [0, 0], transcript[:9]), sequence(0, [0], transcript[:50])]
    assert first.propose(batch, [2, 3]).token_ids.tolist()[2:] == alone[50:53], (
        "in any batch, from any place of the text"
    )


def test_the_inner_drafter_is_asked_and_what_is_beyond_the_transcript_stays_its_own():
    inner = Sevens()
    drafter = ReplayDrafter(inner, [[1, 2, 3], [4]], 1.0, 500, CPU)
    draft = drafter.propose([sequence(1, [0], []), sequence(0, [0], [1, 2])], [3, 2])
    assert draft.token_ids.tolist() == [4, 7, 7, 3, 7]
    assert draft.num_draft_tokens == [3, 2]
    assert inner.asked == [[1, 0]]
    assert drafter.name == "replay over sevens"


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("qwen3")
    return target, RaggedModel(truncated_copy(target, 1), resolve(CPU))


def decode(target, drafter, **config):
    engine = Engine(target, drafter, **config)
    outputs = engine.generate(PROMPTS, PARAMS, progress=False)
    return [output.raise_for_error() for output in outputs], engine


@pytest.fixture(scope="module")
def transcripts(pair):
    outputs, _ = decode(pair[0], None, max_batch_size=1, method="eqspec")
    return [output.token_ids for output in outputs]


SETTINGS = [("eqspec", 1, 4), ("eqspec", 4, 4), ("exspec", 2, 4), ("exspec", 4, 2)]


@pytest.mark.parametrize(("method", "batch_size", "k"), SETTINGS)
def test_engine_accepts_what_was_drawn_and_nothing_else(pair, transcripts, method, batch_size, k):
    target, draft = pair
    drafter = ReplayDrafter(ModelDrafter(draft, VOCAB_SIZE), transcripts, 0.7, VOCAB_SIZE, CPU)
    outputs, engine = decode(target, drafter, method=method, max_batch_size=batch_size, num_draft_tokens=k)
    assert [output.token_ids for output in outputs] == transcripts
    reader = ReplayDrafter(Sevens(), transcripts, 0.7, VOCAB_SIZE, CPU)
    for index, (output, transcript) in enumerate(zip(outputs, transcripts, strict=True)):
        agrees = [a == b for a, b in zip(proposals(reader, index, transcript), transcript, strict=True)]
        rounds = [0, *walk_rounds(agrees[1:], k)]  # nothing is drafted before the first token
        assert (output.stats.num_steps, output.stats.num_accepted_tokens) == (len(rounds), sum(rounds))
    assert engine.drafter.inner.draft_kv_length == {}, "every sequence was released"


def test_the_draft_model_works_as_hard_as_it_would_by_itself(pair, transcripts, monkeypatch):
    """All is accepted with and without replay, so the steps agree, and so must the rows of every draft forward."""
    target, _ = pair
    draft = RaggedModel(target, resolve(CPU))
    rows, forward, draft_tokens = [], draft.forward, draft.program and draft.program.draft

    def counting(batch, *args):
        rows.append(len(batch.token_ids))
        return forward(batch, *args)

    def counting_all(spans, token_ids, counts, *args):
        rows.append((len(token_ids), *counts))
        return draft_tokens(spans, token_ids, counts, *args)

    monkeypatch.setattr(draft, "forward", counting)
    if draft.program:
        monkeypatch.setattr(draft.program, "draft", counting_all)
    by_itself, inner = (ModelDrafter(draft, VOCAB_SIZE) for _ in range(2))
    counted = []
    for drafter in (by_itself, ReplayDrafter(inner, transcripts, 1.0, VOCAB_SIZE, CPU)):
        rows.clear()
        outputs, _ = decode(target, drafter, max_batch_size=3, num_draft_tokens=3)
        assert [output.token_ids for output in outputs] == transcripts
        counted.append(list(rows))
    assert counted[0] == counted[1]
    assert len(counted[0]) > 20


def test_a_drafter_with_taps_receives_what_it_would_by_itself(pair, transcripts):
    """The drafter asserts by itself that no hidden states are missing or come twice."""
    target, _ = pair
    received = []
    for replays in (False, True):
        inner = Recording((0, 1, "final"), lambda sequence, limit: next_tokens(transcripts, sequence, limit))
        drafter = ReplayDrafter(inner, transcripts, 1.0, VOCAB_SIZE, CPU) if replays else inner
        outputs, engine = decode(target, drafter, max_batch_size=2, num_draft_tokens=3)
        assert [output.token_ids for output in outputs] == transcripts
        assert engine.last_run.decoding.num_accepted_tokens == engine.last_run.decoding.num_draft_tokens
        received.append(inner)
    assert received[0].num_observed == received[1].num_observed
    assert sum(received[0].num_observed) == sum(len(prompt) - 1 for prompt in PROMPTS)
    for own, replayed in zip(received[0].released, received[1].released, strict=True):
        assert own[0] == replayed[0]
        assert torch.equal(own[1], replayed[1])


def next_tokens(transcripts, sequence, limit):
    start = sequence.length - sequence.prompt_length
    return transcripts[sequence.index][start : start + limit]

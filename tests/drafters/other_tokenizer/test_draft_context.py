"""What a draft model reads: the committed text in its own tokens, and which of its KV entries stay true."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.drafters.draft_model.draft_context import ContextReader, DraftContext
from specdec_fast.drafters.draft_model.joint_vocabulary import join_vocabularies
from specdec_fast.drafters.draft_model.text_tokens import TextTokens
from support.other_tokenizers import byte_level, sentencepiece

TEXTS = ["One day, a little bird flew over the park. ", "Zoë ate 3 crêpes — naïve!\n\n", "数 を 数える 🙂🙂 "] * 8
OTHERS = ["The bird of the day, and the little park over there. Zoé, 数える: 🙂 3 "] * 20
KINDS = {
    "bytes to bytes": (byte_level(TEXTS, 330), byte_level(OTHERS, 360)),
    "bytes to sentencepiece": (byte_level(TEXTS, 330), sentencepiece(OTHERS, 360)),
    "sentencepiece to bytes": (sentencepiece(TEXTS, 330), byte_level(OTHERS, 360)),
}
PAIRS = {kind: tuple(TextTokens.of(tokenizer, len(tokenizer)) for tokenizer in pair) for kind, pair in KINDS.items()}

texts = st.lists(
    st.sampled_from(
        [" the", " bird", " 🙂", "🙂", "🙃", " Zoë", "é", "数", " park", ".", "\n", "  ", "ere", " a", "3"]
    ),
    min_size=1,
    max_size=14,
).map("".join)


def joint_of(pair):
    return join_vocabularies(*pair, 400, 400, torch.device("cpu"))


@pytest.mark.parametrize("translation", ["tokens", "text"])
@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_a_context_has_the_committed_text(kind, translation, text, data):
    target, draft = PAIRS[kind]
    reader = ContextReader(target, draft, joint_of(PAIRS[kind]), translation)
    token_ids = target.encode_beginning(text)
    of_byte = {piece: token for token, piece in draft.bytes_by_id.items() if len(piece) == 1}
    context = DraftContext()
    length = 0
    while length < len(token_ids):
        length += data.draw(st.integers(1, 4))
        committed = token_ids[:length]
        had = context.token_ids + context.proposed
        reader.read(context, committed)
        found = draft.bytes_of(context.token_ids) + context.held
        assert found.lstrip(b" ") == target.bytes_of(committed).lstrip(b" ")  # one may put a space before a text
        assert context.token_ids[: context.num_same] == had[: context.num_same]
        # drafted: the text that comes, in tokens of the draft's choice, and something else behind
        ahead = text.encode()[len(target.bytes_of(committed)) - target.adds_space :][: data.draw(st.integers(0, 9))]
        context.proposed = [of_byte[bytes([byte])] for byte in ahead if bytes([byte]) in of_byte]
        context.proposed += data.draw(st.lists(st.sampled_from(list(draft.bytes_by_id)), max_size=2))


def test_what_was_drafted_and_accepted_stays_as_it_was_drafted():
    target, draft = PAIRS["bytes to bytes"]
    reader = ContextReader(target, draft, joint_of(PAIRS["bytes to bytes"]), "text")
    context = DraftContext()
    token_ids = target.encode_beginning("the bird flew over the")
    reader.read(context, token_ids[:-2])
    begun = list(context.token_ids)
    rest = target.bytes_of(token_ids[-2:])
    of_byte = {piece: token for token, piece in draft.bytes_by_id.items() if len(piece) == 1}
    context.proposed = [of_byte[bytes([byte])] for byte in rest] + [of_byte[b"z"]]
    reader.read(context, token_ids)
    assert context.token_ids == begun + [of_byte[bytes([byte])] for byte in rest]
    assert context.num_same == len(context.token_ids)


def test_special_tokens_are_translated_by_content_and_by_role():
    target = byte_level(TEXTS, 330)
    draft = sentencepiece(TEXTS, 360)
    for tokenizer in (target, draft):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    pair = TextTokens.of(target, len(target)), TextTokens.of(draft, len(draft))
    joint = joint_of(pair)
    assert joint.draft_of_target[target.eos_token_id] == draft.eos_token_id
    user = target.convert_tokens_to_ids("<|user|>")
    assert joint.draft_of_target[user] == draft.convert_tokens_to_ids("<|user|>")
    context = DraftContext()
    ContextReader(*pair, joint, "text").read(context, [user, *target.encode("the bird")])
    assert context.token_ids[:2] == [draft.bos_token_id, joint.draft_of_target[user]]
    assert pair[1].bytes_of(context.token_ids[2:]).strip() == b"the bird"


def test_a_character_waits_until_it_is_complete():
    target, draft = PAIRS["bytes to sentencepiece"]
    reader = ContextReader(target, draft, joint_of(PAIRS["bytes to sentencepiece"]), "text")
    of_byte = {piece: token for token, piece in target.bytes_by_id.items() if len(piece) == 1}
    token_ids = [*target.encode_beginning("a bird "), *(of_byte[bytes([byte])] for byte in "🙃".encode())]
    context = DraftContext()
    for length in range(len(token_ids) - 4, len(token_ids) + 1):
        reader.read(context, token_ids[:length])
        assert context.held == b"" if length in (len(token_ids) - 4, len(token_ids)) else context.held
    assert draft.bytes_of(context.token_ids).endswith("🙃".encode())

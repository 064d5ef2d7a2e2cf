"""The search for stop strings against its definition, in random texts, tokens and blocks; and its cost."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.request.detokenizer import Detokenizer
from specdec_fast.request.stopping import StopStrings
from specdec_fast.request.string_search import StringSearch
from support.fuzzing import fuzz
from support.scripted import INCOMPLETE, ByteTokenizer


def arguments_of_check(alphabet, most_characters, most_cuts, longest_stop):
    """Strategies for a text, the places where its bytes are cut into tokens, stop strings, and lengths of blocks."""
    stop_strings = st.text(alphabet, min_size=1, max_size=longest_stop)
    return {
        "text": st.text(alphabet, max_size=most_characters),
        "cuts": st.lists(st.integers(0, 100), max_size=most_cuts),
        "stop": st.lists(stop_strings, min_size=1, max_size=3).map(tuple),
        "blocks": st.lists(st.integers(1, 6), max_size=12),
    }


class TestAgainstTheDefinition:
    """Random texts in random tokens and random blocks."""

    def cut_by_definition(self, pieces, stop):
        """Whether and after how many tokens the certain text first has a stop string in it, and the text before it."""
        for n in range(len(pieces) + 1):
            certain = b"".join(pieces[:n]).decode(errors="replace").rstrip(INCOMPLETE)
            begins = [certain.index(s) for s in stop if s in certain]
            if begins:
                return True, n, certain[: min(begins)]
        return False, len(pieces), b"".join(pieces).decode(errors="replace")

    def given_out_by_definition(self, certain, stop):
        held = max(n for s in stop for n in range(len(s)) if certain.endswith(s[:n]))
        return certain[: len(certain) - held]

    def check(self, text, cuts, stop, blocks):
        data = text.encode()
        bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        pieces = [data[a:b] for a, b in pairwise(bounds)]
        tokenizer = ByteTokenizer(pieces)
        found, num_tokens, text = self.cut_by_definition(pieces, stop)
        watched = StopStrings(Detokenizer(tokenizer), stop)
        ends = [0, *accumulate(blocks), len(pieces)]
        taken, emitted = "", []
        for start, end in pairwise(min(end, len(pieces)) for end in ends):
            block = list(range(start, end))
            tokens, reason = watched.cut(block, None)
            emitted += tokens
            assert (reason == "stop") == (found and len(emitted) == num_tokens)
            taken += watched.take(last=reason is not None)
            if reason is not None:
                break
            certain = tokenizer.decode(emitted).rstrip(INCOMPLETE)
            assert taken == self.given_out_by_definition(certain, stop)
        taken += watched.take(last=True)
        assert (len(emitted), taken) == (num_tokens, text)

    @fuzz(250)
    @given(**arguments_of_check("ab", most_characters=25, most_cuts=25, longest_stop=5))
    def test_two_letters(self, text, cuts, stop, blocks):
        self.check(text, cuts, stop, blocks)

    @fuzz(300)
    @given(**arguments_of_check("aü€🚀", most_characters=12, most_cuts=40, longest_stop=3))
    def test_characters_of_many_bytes(self, text, cuts, stop, blocks):
        self.check(text, cuts, stop, blocks)


class TestManyStringsAtOnce:
    """The automaton against a search for every string by itself, over a text in several parts."""

    @fuzz(150)
    @given(
        strings=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=12).map(tuple),
        parts=st.lists(st.text("abc", max_size=8), max_size=6),
    )
    def test_against_the_definition(self, strings, parts):
        search, state, text = StringSearch(strings), 0, ""
        for part in parts:
            state, found = search.advance(state, part)
            start, text = len(text), text + part
            begins = [
                end - len(string) - start
                for string in strings
                for end in range(start + 1, len(text) + 1)
                if text[:end].endswith(string)
            ]
            assert found == min(begins, default=None)
            assert search.depths[state] == max(n for s in strings for n in range(len(s) + 1) if text.endswith(s[:n]))

    def test_a_character_costs_the_same_whatever_the_number_of_strings(self):
        class Counted(dict):
            num_reads = 0

            def get(self, key):
                self.num_reads += 1
                return super().get(key)

        text = "0000abcd" * 20
        for strings in (("0000",), tuple(f"{i:04}" for i in range(1024)), ("0" * 9000 + "1",)):
            search = StringSearch(strings)
            search._edges = Counted(search._edges)
            search.advance(0, text)
            assert search._edges.num_reads <= 2 * len(text)


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens it is made to decode."""

    num_decoded = 0

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def test_long_text_costs_no_more_per_token():
    costs = []
    for length in (100, 400):
        tokenizer = CountingTokenizer([b"ab"] * length)
        watched = StopStrings(Detokenizer(tokenizer), ("abc", "x"))
        watched.cut(list(range(length)), None)
        costs.append(tokenizer.num_decoded / length)
    assert costs[1] <= 1.1 * costs[0]

"""How reasoning is marked: texts divided whole and in pieces, prompts that begin or end it, names and wrong values."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.structured_outputs.reasoning import (
    REASONING_FORMATS,
    ReasoningReader,
    reasoning_of_template,
    state_behind_prompt,
)

AHEAD, BEGUN, ENDED = sd.ReasoningState.AHEAD, sd.ReasoningState.BEGUN, sd.ReasoningState.ENDED
THINK = sd.Reasoning()
TEXTS = [
    (AHEAD, "<think>\nHm, 1 < 2.\n\nSo yes.\n</think>\n\nYes, it is.\n", "Hm, 1 < 2.\n\nSo yes.", "Yes, it is.\n"),
    (AHEAD, "\n <think></think>Yes", "", "Yes"),
    (AHEAD, "<think>Hm </thin", "Hm </thin", ""),
    (AHEAD, "<thin air", "", "<thin air"),
    (AHEAD, "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    (AHEAD, "<think>a</think> b </think> c", "a", "b </think> c"),
    (AHEAD, "<thi", "", "<thi"),
    (AHEAD, "", "", ""),
    (BEGUN, "\nHm.\n</think>\n\n<think>", "Hm.", "<think>"),
    (BEGUN, "Hm, <think> again", "Hm, <think> again", ""),
    (BEGUN, " \n ", "", ""),
    (ENDED, "<think>Yes</think>", "", "<think>Yes</think>"),
    (ENDED, "\n Yes", "", "\n Yes"),
]


@pytest.mark.parametrize(("state", "text", "reasoning", "answer"), TEXTS)
def test_a_text_is_divided(state, text, reasoning, answer):
    assert THINK.split(text, state) == (reasoning, answer)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("state", "text", "reasoning", "answer"), TEXTS)
def test_pieces_join_to_the_same(state, text, reasoning, answer, size):
    reader = ReasoningReader(THINK, state)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = [reader.add(piece) for piece in pieces] + [reader.add("", is_last=True)]
    assert "".join(part for part, _ in found) == reasoning
    assert "".join(part for _, part in found) == answer


def test_what_is_certain_is_not_held_back():
    reader = ReasoningReader(THINK, AHEAD)
    assert reader.add("<think>Let me ") == ("Let me", "")
    assert reader.add("see </") == (" see", "")
    assert reader.add("b>") == (" </b>", "")
    assert reader.add("</think>Yes, ") == ("", "Yes, ")
    assert reader.add("it is <") == ("", "it is <")


@pytest.mark.parametrize(
    ("prompt", "is_continued", "state"),
    [
        ("<|im_start|>assistant\n", False, AHEAD),
        ("<|im_start|>assistant\n<think>\n", False, BEGUN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, ENDED),
        ("Write <think>!<|im_end|><|im_start|>assistant\n", False, AHEAD),
        ("<think>old</think>Hi<|im_start|>assistant\n<think>\nLet me", True, BEGUN),
        ("<think>old</think>Hi<|im_start|>assistant\n<think>\nLet me", False, AHEAD),
        ("<think>old</think>Hi", True, AHEAD),
        ("", False, AHEAD),
    ],
)
def test_a_prompt_may_begin_or_end_reasoning(prompt, is_continued, state):
    assert THINK.state_behind(prompt, is_continued) is state


class Letters:
    """A tokenizer whose tokens are bytes, so marks of several tokens are long."""

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("mark", ["<think>", "思" * 60])
def test_long_marks_are_found_at_the_end_of_a_prompt(mark):
    reasoning = sd.Reasoning(begin=mark, end="<end>")
    prompt = list(f"Hello {mark} \n\n".encode())
    assert state_behind_prompt(reasoning, Letters(), prompt) is BEGUN


@pytest.mark.parametrize(
    ("begin", "message", "state"),
    [
        ("<think>", "It is", AHEAD),
        ("<think>", "<think>\nIt is", BEGUN),
        ("<s>", "<s>It is", BEGUN),  # a special token of this tokenizer
    ],
)
def test_an_earlier_message_may_speak_of_marks(tokenizer, begin, message, state):
    """Special tokens divide the messages."""
    prompt = tokenizer(f"<pad>What does {begin} mean?</s><pad>{message}", add_special_tokens=False).input_ids
    assert state_behind_prompt(sd.Reasoning(begin=begin), tokenizer, prompt, is_continued=True) is state


def test_whitespace_before_a_mark_is_no_part_of_it():
    assert sd.Reasoning(begin="\n<a>", end="</a>").split("\n<a>Hm</a>Yes") == ("Hm", "Yes")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "think"),
        ("{% if '</think>' in content %}", "think"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<seed:think>{{ x }}</seed:think>", "seed_oss"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_shows_a_format(template, name):
    assert reasoning_of_template(template) == (None if name is None else REASONING_FORMATS[name])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("thoughts", "'thoughts' is no format; expected one of think"),
        (3, "it is a int"),
        ({"start": "<a>"}, "unknown field 'start'"),
        ({"end": ""}, "end=''"),
        ({"begin": " \n"}, r"begin=' \\n'"),
        ({"end": "x" * 257}, "1 to 256 characters"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
    ],
)
def test_wrong_values_are_named(value, message):
    with pytest.raises(sd.InvalidParamsError, match=message):
        sd.SamplingParams(reasoning=value)


def test_names_and_mappings_are_read():
    assert sd.SamplingParams(reasoning="qwen3").reasoning == THINK
    assert sd.SamplingParams(reasoning={"max_tokens": 5}).reasoning == sd.Reasoning(max_tokens=5)
    assert sd.SamplingParams().reasoning is None

"""Messages as prompts: the ids of the tokenizer's own chat template, one BOS, and errors of one request."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
import torch

import specdec_fast as sd
from specdec_fast.request import chat
from support.chats import HELLO, LOOP, TEMPLATE, chat_tokenizer
from support.scripted import ByteTokenizer

PARAMS = sd.SamplingParams(max_new_tokens=3)
BOS = 0
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def engine(target):
    return sd.Engine(target, "ngram", tokenizer=chat_tokenizer())


@pytest.fixture(scope="module")
def templated(engine):
    return engine.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)


def prompt_kinds(tokenizer):
    """What a caller may have in its hands for one chat."""

    def applied(**options):
        return tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, **options)

    parts = [{"type": "text", "text": "Be brief."}]
    return {
        "messages": HELLO,
        "tuple": tuple(HELLO),
        "text parts": [{"role": "system", "content": parts}, HELLO[1]],
        "text": applied(tokenize=False),
        "ids": applied(return_dict=False),
        "dict": dict(applied()),
        "encoding": applied(),
        "padded encoding": applied(padding="max_length", max_length=80),
        "tensors": applied(return_tensors="pt"),
    }


@pytest.mark.parametrize("kind", prompt_kinds(chat_tokenizer()))
def test_every_kind_of_prompt_gives_the_ids_of_the_template(engine, templated, kind):
    prompt = prompt_kinds(engine.tokenizer)[kind]
    assert templated.count(BOS) == 1
    assert engine.encode(prompt) == templated
    whole = engine.generate(prompt, PARAMS)
    (chunk, *_) = engine.stream([[5, 6], prompt], PARAMS)
    assert chunk.error is None
    assert [output.prompt_ids for output in whole] == [templated]


@pytest.mark.parametrize("kind", prompt_kinds(chat_tokenizer()))
def test_the_asynchronous_engine_accepts_every_kind(target, templated, kind):
    async def main():
        async with sd.AsyncEngine(target, "ngram", tokenizer=chat_tokenizer()) as engine:
            prompt = prompt_kinds(engine.engine.tokenizer)[kind]
            output = await engine.generate(prompt, PARAMS)
            tokens = [token async for chunk in engine.stream(prompt, PARAMS) for token in chunk.token_ids]
            assert tokens == output.token_ids
            return output

    assert asyncio.run(main()).prompt_ids == templated


def test_a_message_appended_after_the_call_is_not_part_of_it(target):
    async def main():
        messages, is_appended = [USER], Event()
        async with sd.AsyncEngine(target, None, tokenizer=chat_tokenizer()) as engine:
            engine._encoders.submit(is_appended.wait)  # the prompt is encoded after this
            stream = engine.stream(messages, PARAMS)
            messages.append({"role": "error"})
            is_appended.set()
            assert [chunk.error async for chunk in stream][-1] is None

    asyncio.run(main())


def test_a_batch_mixes_prompts_of_every_kind(engine, templated):
    kinds = prompt_kinds(engine.tokenizer)
    outputs = engine.generate([[3, 4], "Hi", *kinds.values(), [USER]], PARAMS)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert [output.prompt_ids for output in outputs[2:-1]] == [templated] * len(kinds)
    assert outputs[-1].prompt_ids == engine.encode([USER])


@pytest.mark.parametrize(
    ("prompts", "number"),
    [(HELLO, 1), ([HELLO], 1), ([HELLO, [USER]], 2), (tuple(HELLO), 1), ([{"content": "no role"}], 1),
     ([USER, {"input_ids": [5]}], 2), ([{"input_ids": [5]}, {"input_ids": [6]}], 2), ([USER, "text"], 2)],
)  # fmt: skip
def test_one_chat_and_a_list_of_prompts_are_told_apart(engine, prompts, number):
    assert len(engine.generate(prompts, PARAMS)) == number


def test_a_mapping_with_a_role_is_a_message_whatever_else_it_has(engine):
    """Clients choose the fields of their messages, so none may replace the ids of the template."""
    message = USER | {"input_ids": [7, 8]}
    ids = engine.encode([USER])
    assert engine.encode([message]) == ids
    for prompts in ([message], [[message]]):
        assert [output.prompt_ids for output in engine.generate(prompts, PARAMS)] == [ids]
    (output,) = engine.generate([message, [USER]], PARAMS)[:1]
    assert "expected a list of messages" in str(output.error)
    with pytest.raises(sd.ConfigError, match="put the message into a list"):
        engine.generate(message, PARAMS)


class TestBos:
    """No prompt gets a second BOS, and none loses its first."""

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("writes_bos", [True, False])
    def test_messages_and_their_text(self, target, adds_bos, writes_bos):
        template = TEMPLATE if writes_bos else TEMPLATE.removeprefix("{{ bos_token }}")
        tokenizer = chat_tokenizer(template, adds_bos)
        engine = sd.Engine(target, None, tokenizer=tokenizer)
        ids = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
        text = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
        assert ids.count(BOS) == writes_bos
        assert engine.encode(HELLO) == ids
        assert engine.encode(text) == (ids if writes_bos or not adds_bos else [BOS, *ids])
        assert engine.encode(text, add_special_tokens=False) == ids

    def test_plain_text_gets_what_the_tokenizer_adds(self, engine):
        assert engine.encode("Hello") == engine.tokenizer("Hello").input_ids
        assert engine.encode("Hello").count(BOS) == 1
        assert engine.encode("say <s>").count(BOS) == 2, "BOS is not the beginning"

    def test_the_caller_decides(self, engine):
        assert engine.encode("<s>Hello", add_special_tokens=True)[:2] == [BOS, BOS]
        assert engine.encode("Hello", add_special_tokens=False).count(BOS) == 0
        assert engine.encode(HELLO, add_special_tokens=True) == [BOS, *engine.encode(HELLO)]
        assert engine.generate("Hello", PARAMS, add_special_tokens=False)[0].prompt_ids.count(BOS) == 0

    def test_bos_that_the_tokenizer_takes_for_text(self, target):
        tokenizer = chat_tokenizer()
        tokenizer.split_special_tokens = True
        ids = sd.Engine(target, None, tokenizer=tokenizer).encode("<s>Hello")
        assert ids == tokenizer("<s>Hello").input_ids
        assert ids.count(BOS) == 1


class TestOptions:
    """Options go to the template."""

    @pytest.mark.parametrize(
        ("options", "same"),
        [
            ({"chat_template_kwargs": {"think": 7}}, {"think": 7, "add_generation_prompt": True}),
            ({"tools": [{"name": "f"}]}, {"tools": [{"name": "f"}], "add_generation_prompt": True}),
            ({"add_generation_prompt": False}, {}),
            ({"continue_final_message": True}, {"continue_final_message": True}),
            ({"chat_template": "{{ messages[0].content }}"}, {"chat_template": "{{ messages[0].content }}"}),
        ],
        ids=lambda value: next(iter(value), ""),
    )
    def test_as_apply_chat_template_takes_them(self, engine, options, same):
        ids = engine.tokenizer.apply_chat_template(HELLO, return_dict=False, **same)
        assert engine.encode(HELLO, **options) == ids
        assert engine.encode(HELLO) != ids
        assert engine.generate(HELLO, PARAMS, **options)[0].prompt_ids == ids

    def test_of_generate_with_names(self, target, templated):
        options = {"chat_template": TEMPLATE, "num_draft_tokens": 2}
        (output,) = sd.generate(target, "ngram", HELLO, PARAMS, tokenizer=chat_tokenizer(None), **options)
        assert output.prompt_ids == templated

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"template": "x"}, "unknown keyword 'template'"),
            ({"chat_template": 5}, "chat_template=5: expected a Jinja template"),
            ({"chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\]: expected a dictionary"),
            ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs has tokenize"),
            ({"add_special_tokens": "no"}, "add_special_tokens='no': expected True"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "are both True"),
        ],
    )
    def test_wrong_options_are_refused_at_once(self, engine, options, message):
        for call in (engine.generate, engine.stream, engine.encode):
            with pytest.raises(sd.ConfigError, match=message):
                call([[5]], **options)

    def test_options_of_prompts_are_none_of_the_engine(self, target):
        with pytest.raises(sd.ConfigError, match="'chat_template' belongs to prompts; pass it"):
            sd.Engine(target, None, chat_template="x")


class TestErrors:
    """A wrong chat fails alone, and the error says what to do."""

    @pytest.mark.parametrize(
        ("prompt", "error", "message"),
        [
            ([{"role": "error", "content": ""}], sd.ChatTemplateError, "template cannot write.*TemplateError: no such"),
            ([{"content": "x"}], sd.InvalidPromptError, "message 0 has the role None"),
            ([{"prompt": "x"}], sd.InvalidPromptError, "a field 'prompt', whose value is a prompt by itself"),
            ([USER, {"role": "user"}], sd.InvalidPromptError, "message 1 has the content None"),
            ([USER, "text"], sd.InvalidPromptError, "message 1 is a str"),
            ([USER | {"content": [{"type": "image_url"}]}], sd.InvalidPromptError, "part 0 of message 0 is type"),
            ([{"role": "user", "content": ["x"]}], sd.InvalidPromptError, "part 0 of message 0 is a str"),
            (USER, sd.InvalidPromptError, "mapping of 'role', 'content'; expected a list of messages"),
            ({"input_ids": [[5], [6]]}, sd.InvalidPromptError, "for 2 texts; expected one"),
            ({"input_ids": [5], "attention_mask": [2]}, sd.InvalidPromptError, "attention_mask of prompt 0"),
        ],
    )  # fmt: skip
    def test_of_one_request(self, engine, prompt, error, message):
        good, bad, other = engine.generate([[5, 6], prompt, HELLO], PARAMS)
        assert good.error is None
        assert other.error is None
        assert bad.finish_reason == "error"
        with pytest.raises(error, match=message):
            bad.raise_for_error()

    @pytest.mark.parametrize("options", [{}, {"add_special_tokens": True}], ids=["ids", "text"])
    @pytest.mark.parametrize(
        "content", ["One \ud83d", [{"type": "text", "text": "One \ud83d"}]], ids=["content", "part"]
    )
    def test_half_of_a_surrogate_pair_is_named(self, engine, content, options):
        """As in a prompt that is a text."""
        with pytest.raises(sd.InvalidPromptError, match=r"'\\ud83d', is half of a surrogate pair") as refused:
            engine.encode([USER, {"role": "user", "content": content}], **options)
        assert options or "the content of message 1, whose character 4" in str(refused.value)
        with pytest.raises(sd.ChatTemplateError, match="cannot write the messages"):
            engine.encode([{"role": "error", "content": "\ud83d"}], **options)

    @pytest.mark.parametrize("template", ["{% if %}", "{{ messages[9].x.y }}", "{{ 1 / 0 }}"])
    def test_templates_that_fail(self, engine, template):
        with pytest.raises(sd.ChatTemplateError, match="cannot write the messages"):
            engine.encode(HELLO, chat_template=template)
        with pytest.raises(sd.InvalidPromptError, match="has no tokens"):
            engine.encode(HELLO, chat_template="{{ nothing }}")

    def test_a_template_that_does_not_end_is_ended(self, engine, templated, monkeypatch):
        options = {"chat_template_kwargs": {"n": 10**5}, "chat_template": LOOP + TEMPLATE}
        with monkeypatch.context() as patch:
            patch.setattr(chat, "TEMPLATE_SECONDS", 0.01)
            bad, good = engine.generate([HELLO, [5, 6]], PARAMS, **options)
        with pytest.raises(sd.ChatTemplateError, match=r"longer than 0.01 s; correct the messages, chat_template_kw"):
            bad.raise_for_error()
        assert good.error is None
        assert engine.encode(HELLO, chat_template=LOOP + TEMPLATE) == templated

    @pytest.mark.parametrize("tokenizer", [chat_tokenizer(None), ByteTokenizer([b"a"] * 1024)], ids=["None", "own"])
    def test_tokenizers_without_a_template(self, target, tokenizer):
        engine = sd.Engine(target, None, tokenizer=tokenizer)
        first, second = engine.generate([[5], HELLO], PARAMS)
        assert first.error is None
        with pytest.raises(sd.ChatTemplateError, match="has no chat template; pass chat_template="):
            second.raise_for_error()

    def test_no_tokenizer(self, target):
        engine = sd.Engine(target, None)
        engine.tokenizer = None
        with pytest.raises(sd.MissingTokenizerError, match="a list of messages, but no tokenizer"):
            engine.encode(HELLO)

    def test_one_message_that_is_no_list(self, engine):
        with pytest.raises(sd.ConfigError, match="put the message into a list"):
            engine.generate(USER)

    def test_of_the_asynchronous_engine(self, target):
        async def main():
            async with sd.AsyncEngine(target, None, tokenizer=chat_tokenizer()) as engine:
                with pytest.raises(sd.ChatTemplateError):
                    await engine.generate([{"role": "error", "content": ""}], PARAMS)
                with pytest.raises(sd.ConfigError, match="2 prompts in one request"):
                    await engine.generate([HELLO, HELLO], PARAMS)
                with pytest.raises(sd.ConfigError, match="unknown keyword"):
                    await engine.generate(HELLO, PARAMS, template="x")
                assert (await engine.generate(HELLO, PARAMS, chat_template_kwargs={"think": 1})).error is None

        asyncio.run(main())


def test_stop_strings_and_prompt_lookup_see_the_answer_and_the_chat(engine, templated):
    """The text of the chat stops nothing, and drafts come from it."""
    plain = sd.Engine(engine.target.model, None, tokenizer=engine.tokenizer)
    params = sd.SamplingParams(max_new_tokens=30, ignore_eos=True)
    (expected,) = plain.generate(HELLO, params)
    (found,) = engine.generate(HELLO, params)
    assert found.token_ids == expected.token_ids
    stop = expected.text[8:11]
    (stopped,) = engine.generate(HELLO, sd.SamplingParams(max_new_tokens=30, ignore_eos=True, stop=["Be brief", stop]))
    assert stopped.text == expected.text[: expected.text.index(stop)]
    assert torch.equal(torch.tensor(stopped.prompt_ids), torch.tensor(templated))

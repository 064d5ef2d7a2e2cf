"""The texts that a drafter is trained on: what the target itself writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.whole_files import replaced

_CALL = 256  # largest number of pairs of texts per call of the engine: the bar moves after each
_FIRST_CALL = 16  # of the first call, which shows how long texts are
_TYPICAL = 64  # tokens of a pair of short texts
_SHORTEST = 4  # tokens; a shorter text has no position to learn from
_INTEGERS = (torch.int32, torch.int64)
_LONGEST_PROMPT = 48  # tokens of a text that are kept as the prompt of a greedy one


@dataclass(frozen=True)
class Texts:
    """Token ids of many texts."""

    token_ids: Tensor  # [sum of lengths] int32, text after text
    lengths: Tensor  # [N] int32

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Texts:
        """Join lists of token ids."""
        flat = torch.tensor([token for text in texts for token in text], dtype=torch.int32, device="cpu")
        return cls(flat, torch.tensor([len(text) for text in texts], dtype=torch.int32, device="cpu"))

    def split(self, num_held_out: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the texts to train on and the last ``num_held_out`` ones, each ``[length]`` int64.

        The text before these is in neither: it may have the beginning of the first of them. See ``write_texts``.
        """
        texts = list(self.token_ids.long().split(self.lengths.tolist()))
        first = len(texts) - num_held_out
        return texts[: first - 1 if num_held_out else first], texts[first:]

    def save(self, path: Path) -> None:
        """Write one safetensors file; an interrupt leaves none.

        Raises:
            OutputError: it cannot be written.
        """
        with replaced(path) as unfinished:
            save_file({"token_ids": self.token_ids, "lengths": self.lengths}, unfinished)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Read the file of ``save``.

        Raises:
            ConfigError: it is damaged, or another kind of file, or has a text that is too short to learn from.
        """
        try:
            tensors = load_file(path)
            texts = cls(tensors["token_ids"], tensors["lengths"])
        except (SafetensorError, KeyError) as error:
            raise ConfigError(
                f"{str(path)!r} is no file of training texts ({error}); delete it, or correct the path."
            ) from None
        are_lists = all(ids.ndim == 1 and ids.dtype in _INTEGERS for ids in (texts.token_ids, texts.lengths))
        if not are_lists or int(texts.lengths.sum()) != len(texts.token_ids):
            raise ConfigError(
                f"{str(path)!r} is damaged: it should have lists of token ids and of lengths that add up; delete it."
            )
        if len(texts.lengths) and (shortest := int(texts.lengths.min())) < _SHORTEST:
            raise ConfigError(
                f"{str(path)!r} has a text of {shortest} tokens; expected at least {_SHORTEST}, because a shorter one "
                "has no position to learn from; remove it, or delete the file."
            )
        return texts

    def expect_fit(self, vocab_size: int, max_positions: int | None) -> None:
        """Check that a target of so many ids and positions (None: no limit) could have written the texts.

        Raises:
            ConfigError: there is an id that the target does not have, or a text that is too long for it.
        """
        remedy = "they are another target's; delete them, or copy those of this target."
        foreign = self.token_ids[(self.token_ids < 0) | (self.token_ids >= vocab_size)]
        if len(foreign):
            raise ConfigError(f"the texts have the id {int(foreign[0])}, but the target has {vocab_size} ids; {remedy}")
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        if max_positions is not None and longest > max_positions + 1:  # the last token needs no position
            raise ConfigError(
                f"the texts have one of {longest} tokens, but the target has {max_positions} positions; {remedy}"
            )


def write_texts(engine: Engine, prompts: Sequence[Any], num_tokens: int, longest: int, seed: int) -> Texts:
    """Let the target write texts, in turn at temperature 1 and greedily, until they have ``num_tokens`` tokens.

    Without prompts of the caller's, a sampled text begins with the target's first token alone, and a greedy one
    continues the beginning of a sampled one. With prompts, each is continued both ways; when they are used up, again at
    temperature 1. The two texts of a beginning, or of a prompt, are neighbours, in a random order of all pairs.

    Args:
        engine: the target, without a drafter.
        prompts: what ``Engine.generate`` takes, or an empty list.
        num_tokens: at least 1, those of prompts included; the last pair may exceed it.
        longest: largest number of tokens that are emitted per text.
        seed: the texts depend on it alone.

    Raises:
        ConfigError: the target has no token that begins a text, and there are no prompts; or every text is too short.
    """
    pairs: list[list[list[int]]] = []
    nothing: list[int] = []  # beside a sampled text whose prompt has its greedy one
    first = [] if prompts else [_first_token(engine)]
    generator = torch.Generator(device="cpu").manual_seed(seed)
    total = num_begun = 0
    with tqdm(total=num_tokens, desc="texts", unit="token", unit_scale=True) as bar:
        while total < num_tokens:
            size = _next_size(num_tokens - total, total, num_begun)
            begun = range(num_begun, num_begun + size)
            seeds = [seed + 2 * i for i in begun]
            if prompts:
                sampled = _written(engine, [prompts[i % len(prompts)] for i in begun], longest, seeds)
                greedy = _written(engine, prompts[begun.start : begun.stop], longest, None)
            else:
                sampled = list(filter(_is_long, _written(engine, [first] * size, longest, seeds)))
                cuts = torch.randint(2, _LONGEST_PROMPT, (len(sampled),), generator=generator, device="cpu").tolist()
                beginnings = [text[: min(cut, len(text) - 1)] for text, cut in zip(sampled, cuts, strict=True)]
                greedy = _written(engine, beginnings, longest, None)
            new = [list(filter(_is_long, pair)) for pair in zip_longest(sampled, greedy, fillvalue=nothing)]
            pairs += new
            added = sum(map(_num_tokens, new))
            total = total + added
            num_begun = begun.stop
            if not total and num_begun >= _CALL:
                raise ConfigError(
                    f"the target ends its texts within {_SHORTEST} tokens; pass prompts that it can continue."
                )
            bar.update(added)
    while total - _num_tokens(pairs[-1]) >= num_tokens:
        total -= _num_tokens(pairs.pop())
    order = torch.randperm(len(pairs), generator=generator, device="cpu").tolist()
    return Texts.of([text for i in order for text in pairs[i]])


def _next_size(num_missing: int, total: int, num_begun: int) -> int:
    """Return the number of pairs of the next call: as many as are expected to have the missing tokens."""
    if not num_begun:
        return max(1, min(_FIRST_CALL, num_missing // _TYPICAL))
    return min(_CALL, math.ceil(num_missing * num_begun / total)) if total else _CALL


def _num_tokens(pair: list[list[int]]) -> int:
    return sum(map(len, pair))


def _is_long(text: list[int]) -> bool:
    return len(text) >= _SHORTEST


def _written(engine: Engine, prompts: Sequence[Any], longest: int, seeds: list[int] | None) -> list[list[int]]:
    """Return prompt and continuation of each prompt: sampled with ``seeds``, or greedy."""
    if seeds is None:
        params = [SamplingParams(max_new_tokens=longest)] * len(prompts)
    else:
        params = [SamplingParams(max_new_tokens=longest, temperature=1.0, seed=seed) for seed in seeds]
    outputs = engine.generate(list(prompts), params, progress=False)
    if (error := next((output.error for output in outputs if output.error is not None), None)) is not None:
        raise ConfigError(f"the target cannot continue a prompt: {error}") from error
    return [[*output.prompt_ids, *output.token_ids] for output in outputs]


def _first_token(engine: Engine) -> int:
    token = getattr(engine.target.model.config.get_text_config(decoder=True), "bos_token_id", None)
    token = getattr(engine.tokenizer, "bos_token_id", None) if token is None else token
    if not isinstance(token, int):
        raise ConfigError(
            "the target has no token that begins a text (bos_token_id); pass prompts that it can continue."
        )
    return token


def frequent_ids(texts: Texts, vocab_size: int, count: int | None) -> Tensor | None:
    """Return the ``count`` most frequent ids of texts, ``[count]`` int64 in rising order; None if that is all ids.

    Raises:
        ConfigError: ``count`` is not from 1 to ``vocab_size``.
    """
    if count is None or count == vocab_size:
        return None
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {count} ids; expected 1 to {vocab_size}, the target's.")
    frequencies = torch.bincount(texts.token_ids.long(), minlength=vocab_size)
    return frequencies.argsort(descending=True, stable=True)[:count].sort().values


def rarest_id(texts: Texts, vocab_size: int) -> int:
    """Return the id that texts use least, among equals the largest: it will stand for tokens to be drafted."""
    frequencies = torch.bincount(texts.token_ids.long(), minlength=vocab_size)
    return vocab_size - 1 - int(frequencies.flip(0).argmin())

"""The API in one call: :func:`generate`."""

from __future__ import annotations

from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.engine.engine import Engine
from specdec_fast.request.prompt_options import PROMPT_KEYWORDS, PromptOptions
from specdec_fast.results import GenerationOutput


def generate(
    target: str | PathLike[str] | PreTrainedModel,
    draft: str | PathLike[str] | PreTrainedModel | Drafter | None,
    prompts: Any,
    params: Any = None,
    *,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
    progress: bool | None = None,
    **keywords: Any,
) -> list[GenerationOutput]:
    """Decode ``prompts`` with ``target``, sped up by ``draft``; the tokens are those of plain decoding.

    Args:
        target: name, folder or loaded Hugging Face causal model.
        draft: the same for a small model; the name of a drafter, such as ``"ngram"``;
            ``"auto"``, which chooses between ``"self"`` and ``"ngram"``; a Drafter; None (or ``"none"``) for plain
            decoding.
        prompts: a prompt, or a list of prompts of any kinds. A prompt is a string, a list of token ids, a list of
            messages (``[{"role": "user", "content": "Hello"}]``), or the result of a tokenizer.
        params: SamplingParams or a transformers GenerationConfig for all, or a list with one each; None is greedy.
        tokenizer: the target's; None loads the one beside the model.
        draft_tokenizer: the draft model's, which may be another one; None loads the one beside that model.
        progress: show a progress bar; None shows it on a terminal.
        **keywords: fields of EngineConfig, such as ``method``, ``max_batch_size``, ``num_draft_tokens``, and of
            PromptOptions, such as ``add_special_tokens`` and ``chat_template_kwargs``.

    Returns:
        One GenerationOutput per prompt, in input order; see ``Engine.generate`` for requests that fail.

    Raises:
        SpecDecError: an argument is invalid; a subclass is raised before any decoding, see ``Engine``.
    """
    # Both are checked before a model is loaded.
    prompt_options = {name: keywords.pop(name) for name in PROMPT_KEYWORDS if name in keywords}
    PromptOptions.from_keywords(prompt_options)
    config = EngineConfig.from_keywords(keywords)
    with Engine(target, draft, config, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer) as engine:
        return engine.generate(prompts, params, progress=progress, **prompt_options)

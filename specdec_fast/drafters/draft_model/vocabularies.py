"""Whether a draft model has the target's vocabulary, and the drafter that it makes."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from specdec_fast.config import EngineConfig
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.drafters.draft_model.text_tokens import TextTokens
from specdec_fast.drafters.draft_model.translating_drafter import TranslatingDrafter
from specdec_fast.errors import ConfigError, NotYetSupportedError, VocabularyMismatchError
from specdec_fast.request.detokenizer import load_tokenizer, same_vocabulary
from specdec_fast.runner.ragged_model import RaggedModel

_WITHOUT_MODEL = "'ngram', 'suffix' or 'self'"


def drafter_of_model(
    draft: RaggedModel, target: RaggedModel, config: EngineConfig, tokenizer: Any | None, draft_tokenizer: Any | None
) -> ModelDrafter:
    """Return the drafter of a draft model: one that translates, if its tokenizer is another one.

    Args:
        draft: the draft model.
        target: the target.
        config: the engine's settings.
        tokenizer: the target's; None: not known.
        draft_tokenizer: the draft model's; None: that in its folder, if there is one.

    Raises:
        VocabularyMismatchError: it has another vocabulary, and a tokenizer is missing or of a kind that is not known.
        NotYetSupportedError: it has another vocabulary and recurrent layers.
    """
    if draft_tokenizer is None:
        draft_tokenizer = tokenizer_beside(draft.path)
    if _is_same(draft, target, tokenizer, draft_tokenizer):
        return ModelDrafter(draft, target.vocab_size, config.max_prefill_tokens, config.max_batch_size)
    found = {
        "draft": TextTokens.of(draft_tokenizer, draft.vocab_size),
        "target": TextTokens.of(tokenizer, target.vocab_size),
    }
    if unknown := [role for role, tokens in found.items() if tokens is None]:
        raise VocabularyMismatchError(
            f"draft {draft.name} has another tokenizer than target {target.name}, and the bytes of the tokens of the "
            f"{' and the '.join(unknown)} are not known: fast tokenizers of transformers over bytes, or of the kind of "
            "SentencePiece, are translated, if no step of them is written in Python; pass another draft, or a drafter "
            f"without a model: {_WITHOUT_MODEL}."
        )
    if draft.layout.states:
        raise NotYetSupportedError(
            f"draft {draft.name} has another tokenizer than target {target.name}, and recurrent layers, whose states "
            "cannot go back to where the text is encoded otherwise; pass a draft model that attends, or one with the "
            "target's tokenizer."
        )
    assert found["target"] is not None
    assert found["draft"] is not None
    return TranslatingDrafter(
        draft, found["target"], found["draft"], target.vocab_size, config.max_prefill_tokens, config.max_batch_size
    )


def tokenizer_beside(path: str | PathLike[str] | None) -> Any | None:
    """Return the tokenizer beside a draft model; None if there is none, or it needs code of its own."""
    try:
        return load_tokenizer(None if path is None else fspath(path))
    except ConfigError:
        return None


def _is_same(draft: RaggedModel, target: RaggedModel, tokenizer: Any | None, draft_tokenizer: Any | None) -> bool:
    """Return whether both have one vocabulary; widths may differ by padding."""
    if draft_tokenizer is not None and tokenizer is not None:
        is_same = same_vocabulary(draft_tokenizer, tokenizer)
        if is_same is not None:
            return is_same
    if draft.vocab_size == target.vocab_size:
        return True
    missing = [
        keyword
        for keyword, known in {"tokenizer": tokenizer, "draft_tokenizer": draft_tokenizer}.items()
        if known is None
    ]
    how = f"pass {' and '.join(f'{keyword}=...' for keyword in missing)}" if missing else "pass fast tokenizers"
    raise VocabularyMismatchError(
        f"draft {draft.name} has {draft.vocab_size} ids, target {target.name} has {target.vocab_size}, and without "
        f"both tokenizers nothing shows whether the extra ids are padding, or what ids stand for; {how}, or a draft of "
        f"the same family, or a drafter without a model: {_WITHOUT_MODEL}."
    )

"""The drafters by name: what ``draft=`` may be, and what is made of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.drafters.base import Drafter, DrafterContext, NoDrafter
from specdec_fast.drafters.clover.checkpoint import is_clover
from specdec_fast.drafters.clover.drafter import CloverDrafter
from specdec_fast.drafters.dflash.checkpoint import is_dflash
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from specdec_fast.drafters.draft_model.drafter import ROWS_EACH, ModelDrafter
from specdec_fast.drafters.draft_model.vocabularies import drafter_of_model
from specdec_fast.drafters.eagle3.checkpoint import is_eagle3
from specdec_fast.drafters.eagle3.drafter import Eagle3Drafter
from specdec_fast.drafters.medusa.checkpoint import is_medusa
from specdec_fast.drafters.medusa.drafter import MedusaDrafter
from specdec_fast.drafters.mtp.drafter import MtpDrafter, holds_mtp
from specdec_fast.drafters.ngram.drafter import NgramDrafter
from specdec_fast.drafters.ngram.trie_drafter import NgramTrieDrafter
from specdec_fast.drafters.self_draft.drafter import Int8SelfDrafter, SelfDrafter
from specdec_fast.drafters.specblock.checkpoint import is_specblock
from specdec_fast.drafters.specblock.drafter import SpecBlockDrafter
from specdec_fast.drafters.suffix.drafter import SuffixDrafter, is_texts_file
from specdec_fast.errors import ConfigError, DrafterError
from specdec_fast.models.loading import load_model
from specdec_fast.models.placement import devices_of
from specdec_fast.models.probe import named_failures
from specdec_fast.ops import resolve_all
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.graphs.buckets import MOST_PROMPT_ROWS, GraphLimits
from specdec_fast.runner.profiling import most_proposed
from specdec_fast.runner.ragged_model import RaggedModel

NO_DRAFT = "none"  # the same as None; the command line needs a string
AUTO_DRAFT = "auto"  # the engine chooses one of DRAFTERS

# Every drafter that has a name, and the function that makes it. Any other string names a draft model or its folder.
DRAFTERS: dict[str, Callable[[DrafterContext], Drafter]] = {
    "mtp": MtpDrafter,
    "ngram": NgramDrafter,
    "ngram-trie": NgramTrieDrafter,
    NO_DRAFT: NoDrafter,
    "self": SelfDrafter,
    "self:int4": SelfDrafter,
    "self:int8": Int8SelfDrafter,
    "suffix": SuffixDrafter,
}

# Drafters of checkpoints, asked for as "kind:FOLDER": what makes one, and whether a folder holds one.
CHECKPOINT_DRAFTERS: dict[str, tuple[Callable[[DrafterContext, str], Drafter], Callable[[Path], bool]]] = {
    "dflash": (DFlashDrafter, is_dflash),
    "specblock": (SpecBlockDrafter, is_specblock),  # before EAGLE-3, which any draft_vocab_size is taken for
    "clover": (CloverDrafter, is_clover),
    "eagle3": (Eagle3Drafter, is_eagle3),
    "medusa": (MedusaDrafter, is_medusa),
    "mtp": (MtpDrafter, holds_mtp),
    "suffix": (SuffixDrafter, is_texts_file),
}

_SETTINGS = ("tap_layers", "draft_tree", "draft_quantization")  # those that are for some drafters only


def checked_draft(draft: Any, config: EngineConfig, draft_tokenizer: Any | None = None) -> Any:
    """Return ``draft``, or None for plain decoding. The engine calls this before it loads anything.

    Raises:
        ConfigError: ``draft`` has a type that ``make_drafter`` does not accept, or looks like a misspelt drafter; or
            ``draft_quantization`` or ``draft_tokenizer`` is given, and the drafter does not read it; or it is a copy of
            a target that ``quantization`` rounds.
    """
    if not isinstance(draft, (str, PathLike, nn.Module, Drafter)) and draft is not None:
        raise ConfigError(
            f"draft is a {type(draft).__name__}; expected a model, its name or folder, "
            f"{', '.join(map(repr, (AUTO_DRAFT, *DRAFTERS)))}, a Drafter (an instance, not its class), or None."
        )
    if isinstance(draft, str) and draft != AUTO_DRAFT and draft not in DRAFTERS:
        kind, _, folder = draft.partition(":")
        if kind in CHECKPOINT_DRAFTERS and not folder:
            raise ConfigError(f"draft={draft!r} needs a checkpoint: pass '{kind}:FOLDER'.")
        if kind not in CHECKPOINT_DRAFTERS and (close := difflib.get_close_matches(draft, (AUTO_DRAFT, *DRAFTERS))):
            raise ConfigError(
                f"draft={draft!r}: did you mean {close[0]!r}? For a folder of that name, pass './{draft}'."
            )
    unread = None
    if config.draft_quantization is not None and "draft_quantization" not in _settings_of(draft):
        unread = f"draft_quantization={config.draft_quantization!r}"
    elif draft_tokenizer is not None and not is_draft_model(draft):
        unread = "draft_tokenizer"
    if unread is not None:
        raise ConfigError(
            f"{unread} has no effect with draft={draft.name if isinstance(draft, Drafter) else draft!r}: draft models "
            "read it; leave it out, or pass a draft model."
        )
    if config.quantization is not None and copied_quantization(draft) is not None:
        raise ConfigError(
            f"draft={draft!r} drafts with a copy of the target in few bits, which gains nothing beside quantization="
            f"{config.quantization!r}; leave quantization out, or pass another drafter."
        )
    is_plain = not config.most_draft_tokens or (isinstance(draft, str) and draft == NO_DRAFT)
    return None if is_plain else draft


def make_drafter(
    draft: str | PathLike[str] | PreTrainedModel | Drafter | None,
    target: RaggedModel,
    config: EngineConfig,
    tokenizer: Any | None,
    draft_tokenizer: Any | None = None,
) -> Drafter:
    """Make the drafter.

    Args:
        draft: from ``checked_draft``.
        target: the model that will verify its tokens.
        config: the engine's settings; a model that this function loads gets their dtype.
        tokenizer: the target's, if known.
        draft_tokenizer: the draft model's; None: that in its folder, if there is one.

    Raises:
        VocabularyMismatchError: the draft model has another vocabulary than the target, and they cannot be joined.
        NotYetSupportedError: it has another vocabulary and recurrent layers.
        DrafterError: the function registered under the name did not return a Drafter.
    """
    if isinstance(draft, Drafter):
        return draft
    if draft is None:
        draft = NO_DRAFT
    if isinstance(draft, str) and draft in DRAFTERS:
        return _expect_drafter(draft, DRAFTERS[draft](DrafterContext(target, config, tokenizer)))
    if isinstance(draft, (str, PathLike)) and (checkpoint := _checkpoint(fspath(draft))) is not None:
        kind, folder = checkpoint
        return CHECKPOINT_DRAFTERS[kind][0](DrafterContext(target, config, tokenizer), folder)
    loaded = isinstance(draft, nn.Module)
    dtype: Any = None if loaded else config.dtype
    module = load_model(draft, dtype, target.layout.device, "draft", config.draft_quantization)
    with named_failures(module):
        most = most_proposed(config.most_draft_tokens)
        ops = target.ops
        if target.layout.is_spread or len(devices_of(module)) > 1:
            ops = resolve_all(devices_of(module), config.backend, module.dtype)
        model = RaggedModel(module, ops, config.page_size, config.enforce_eager, most)
        if config.deterministic:
            make_deterministic(model)
        model.release_memory()
    model.use_graphs(
        GraphLimits(config.max_batch_size, ROWS_EACH, config.most_draft_tokens, prompt_rows=MOST_PROMPT_ROWS)
    )
    return drafter_of_model(model, target, config, tokenizer, draft_tokenizer)


def expect_settings_read(drafter: Drafter, config: EngineConfig) -> None:
    """Check that the drafter reads every setting for drafters that was given.

    ``draft_tree="chain"`` is also for drafters that propose chains anyway.

    Raises:
        ConfigError: one of them would have no effect.
    """
    is_chain_anyway = config.draft_tree == "chain" and not drafter.max_nodes
    for name in _SETTINGS:
        value = None if is_chain_anyway and name == "draft_tree" else getattr(config, name)
        if value is not None and name not in drafter.settings:
            reads = f"it reads {' and '.join(drafter.settings)} only" if drafter.settings else "it has no such setting"
            raise ConfigError(
                f"{name}={value!r} has no effect on the drafter {drafter.name!r}: {reads}; leave it out, or pass a "
                "drafter that reads it (docs/drafters.md)."
            )


def configs_for(drafts: Many[Any], config: EngineConfig) -> list[EngineConfig]:
    """Return the settings for each of several drafters that are given one set of settings.

    A setting that one of them reads is left out for those that do not. One that none of them reads is left to be
    refused by the engine. Each draft is as ``Engine`` takes it.
    """
    read = [set(_settings_of(draft)) for draft in drafts]
    unread: list[dict[str, Any]] = [dict.fromkeys(set().union(*read) - names) for names in read]
    return [replace(config, **names) for names in unread]


def draft_tokenizers_for(drafts: Many[Any], draft_tokenizer: Any | None) -> list[Any | None]:
    """Return the draft tokenizer for each of several drafters: those without a model get none, unless all are such."""
    are_models = [is_draft_model(draft) for draft in drafts]
    return [draft_tokenizer if is_model or not any(are_models) else None for is_model in are_models]


def _settings_of(draft: Any) -> tuple[str, ...]:
    """Return what ``Drafter.settings`` will be, before the drafter is made; all, if only the made one can tell."""
    if draft is None or draft == AUTO_DRAFT:
        return ()
    if is_draft_model(draft):
        return ModelDrafter.settings
    made: Any = draft
    if not isinstance(draft, Drafter):
        checkpoint = None if draft in DRAFTERS else _checkpoint(fspath(draft))
        made = DRAFTERS[draft] if checkpoint is None else CHECKPOINT_DRAFTERS[checkpoint[0]][0]
    return getattr(made, "settings", _SETTINGS)


def is_draft_model(draft: Any) -> bool:
    """Return whether ``draft``, from ``checked_draft``, is a draft model or the name or folder of one."""
    if isinstance(draft, nn.Module):
        return True
    if not isinstance(draft, (str, PathLike)) or draft == AUTO_DRAFT or draft in DRAFTERS:
        return False
    return _checkpoint(fspath(draft)) is None


def copied_quantization(draft: Any) -> str | None:
    """Return how ``draft``, from ``checked_draft``, rounds its copy of the target; None if it is no such copy."""
    made: Any = DRAFTERS.get(draft) if isinstance(draft, str) else type(draft)
    return made.quantization if isinstance(made, type) and issubclass(made, SelfDrafter) else None


def has_weights(draft: Any) -> bool:
    """Return whether ``draft``, from ``checked_draft``, has weights, as far as is known before it is made."""
    if draft is None:
        return False
    made: Any = DRAFTERS.get(draft) if isinstance(draft, str) else draft
    return getattr(made, "weights", None) is not Drafter.weights


def _checkpoint(draft: str) -> tuple[str, str] | None:
    """Return kind and folder of a drafter that is a checkpoint; None if ``draft`` names something else."""
    kind, _, folder = draft.partition(":")
    if folder and kind in CHECKPOINT_DRAFTERS:
        return kind, folder
    kinds = (kind for kind, (_, is_kind) in CHECKPOINT_DRAFTERS.items() if is_kind(Path(draft)))
    return next(((kind, draft) for kind in kinds), None)


def _expect_drafter(name: str, made: Any) -> Drafter:
    if not isinstance(made, Drafter):
        raise DrafterError(f"DRAFTERS[{name!r}] made a {type(made).__name__}; expected a Drafter.")
    return made

"""Drafters: they propose the tokens that the target verifies."""

from __future__ import annotations

from specdec_fast.drafters.auto import DraftChoice, choose_draft
from specdec_fast.drafters.base import Drafter, DrafterContext, StepResult, TreeDrafter
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.registry import (
    AUTO_DRAFT,
    CHECKPOINT_DRAFTERS,
    DRAFTERS,
    NO_DRAFT,
    checked_draft,
    configs_for,
    copied_quantization,
    draft_tokenizers_for,
    expect_settings_read,
    has_weights,
    is_draft_model,
    make_drafter,
)

__all__ = [
    "AUTO_DRAFT",
    "CHECKPOINT_DRAFTERS",
    "DRAFTERS",
    "NO_DRAFT",
    "Draft",
    "DraftChoice",
    "Drafter",
    "DrafterContext",
    "StepResult",
    "TreeDrafter",
    "checked_draft",
    "choose_draft",
    "configs_for",
    "copied_quantization",
    "draft_tokenizers_for",
    "expect_settings_read",
    "has_weights",
    "is_draft_model",
    "make_drafter",
]

"""specdec_fast: exact, fast, batched speculative decoding of Hugging Face language models.

    import specdec_fast as sd
    outputs = sd.generate("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", prompts, sd.SamplingParams(max_new_tokens=128))

Words, the same everywhere in this library:

=================  ========================================================================================
target, draft      the model whose output is wanted; the small model that proposes
draft tokens, K    what the drafter proposes for one sequence in one step (``num_draft_tokens``)
verify             one target forward over the last committed token and the draft tokens of every sequence,
                   and the rows of prompts that join
accepted           draft tokens equal to what the target itself would have emitted
next token         the target's own token after the accepted ones: a correction, or a bonus
committed          prompt plus emitted tokens of a sequence; their number is its ``length``
step               plan, draft, verify, accept and commit for one batch of sequences
acceptance length  tokens emitted per sequence and step with draft tokens: accepted + 1
ragged             different per sequence; flat rows plus ``cu_seqlens``, never padded
page, block table  a fixed number of KV positions; the map from a sequence's positions to pages
=================  ========================================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_fast.api import generate
    from specdec_fast.config import EngineConfig
    from specdec_fast.drafters import Draft, Drafter, StepResult, TreeDrafter
    from specdec_fast.engine.engine import Engine
    from specdec_fast.errors import (
        BackendError,
        ChatTemplateError,
        ConfigError,
        DeadlineExceededError,
        DeterminismError,
        DetokenizationError,
        DrafterError,
        EngineBusyError,
        EngineClosedError,
        EngineCopyError,
        EngineOverloadedError,
        ForkedProcessError,
        GrammarError,
        InvalidLogitsError,
        InvalidParamsError,
        InvalidPromptError,
        KVCacheAllocationError,
        KVCacheTooSmallError,
        LengthPolicyError,
        LogitsProcessorError,
        MemoryBudgetError,
        MissingChatTemplateError,
        MissingTokenizerError,
        NoAllowedTokenError,
        NotYetSupportedError,
        OutputError,
        PromptTooLongError,
        RankError,
        RequestCancelledError,
        RequestError,
        RequestMemoryError,
        SchedulerError,
        SpecDecError,
        StepError,
        StoppingCriteriaError,
        TokenMaskError,
        TooManyDraftTokensError,
        TrainingError,
        UnknownTokenError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from specdec_fast.request.prompt_options import PromptOptions
    from specdec_fast.request.sequence import Sequence
    from specdec_fast.results import DecodingStats, GenerationOutput, RunStats, ScoreOutput, StreamChunk
    from specdec_fast.sampling_params import SamplingParams
    from specdec_fast.service import AsyncEngine, AsyncStream
    from specdec_fast.speculation_length import LengthPolicy, StepObservation
    from specdec_fast.structured_outputs.parameters import StructuredOutputs
    from specdec_fast.structured_outputs.reasoning import Reasoning, ReasoningState

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "AsyncStream",
    "BackendError",
    "ChatTemplateError",
    "ConfigError",
    "DeadlineExceededError",
    "DecodingStats",
    "DeterminismError",
    "DetokenizationError",
    "Draft",
    "Drafter",
    "DrafterError",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineCopyError",
    "EngineOverloadedError",
    "ForkedProcessError",
    "GenerationOutput",
    "GrammarError",
    "InvalidLogitsError",
    "InvalidParamsError",
    "InvalidPromptError",
    "KVCacheAllocationError",
    "KVCacheTooSmallError",
    "LengthPolicy",
    "LengthPolicyError",
    "LogitsProcessorError",
    "MemoryBudgetError",
    "MissingChatTemplateError",
    "MissingTokenizerError",
    "NoAllowedTokenError",
    "NotYetSupportedError",
    "OutputError",
    "PromptOptions",
    "PromptTooLongError",
    "RankError",
    "Reasoning",
    "ReasoningState",
    "RequestCancelledError",
    "RequestError",
    "RequestMemoryError",
    "RunStats",
    "SamplingParams",
    "SchedulerError",
    "ScoreOutput",
    "Sequence",
    "SpecDecError",
    "StepError",
    "StepObservation",
    "StepResult",
    "StoppingCriteriaError",
    "StreamChunk",
    "StructuredOutputs",
    "TokenMaskError",
    "TooManyDraftTokensError",
    "TrainingError",
    "TreeDrafter",
    "UnknownTokenError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "generate",
]

# Importing torch and transformers takes seconds, so names are imported when they are first used (PEP 562).
_MODULES = {
    "generate": "api",
    "EngineConfig": "config",
    "Draft": "drafters",
    "Drafter": "drafters",
    "TreeDrafter": "drafters",
    "StepResult": "drafters",
    "Engine": "engine.engine",
    "PromptOptions": "request.prompt_options",
    "Sequence": "request.sequence",
    "DecodingStats": "results",
    "GenerationOutput": "results",
    "RunStats": "results",
    "ScoreOutput": "results",
    "StreamChunk": "results",
    "SamplingParams": "sampling_params",
    "AsyncEngine": "service",
    "AsyncStream": "service",
    "LengthPolicy": "speculation_length",
    "StepObservation": "speculation_length",
    "StructuredOutputs": "structured_outputs.parameters",
    "Reasoning": "structured_outputs.reasoning",
    "ReasoningState": "structured_outputs.reasoning",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        return _submodule(name)
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def _submodule(name: str) -> Any:
    """Import a module of the package that is used as an attribute, such as ``sd.drafters``."""
    path = f"{__name__}.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The typed errors of specdec_fast.

Every message says what came, what was expected and what to do. Errors that concern one request only derive from
:class:`RequestError`: the engine puts them on that request's output and goes on with the others. All the rest
concern the whole call; but for a DrafterError and a LengthPolicyError they are raised before any token is decoded.
"""


class SpecDecError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(SpecDecError, ValueError):
    """A setting of the engine (method, sizes, keyword) is unknown or out of range."""


class MemoryBudgetError(ConfigError):
    """``memory_bytes`` is too small for the weights, the KV entries asked for, and a plain step of one sequence."""


class InvalidParamsError(SpecDecError, ValueError):
    """A sampling parameter is out of range."""


class NotYetSupportedError(SpecDecError, NotImplementedError):
    """The request is sensible and planned, but this version cannot serve it."""


class UnsupportedModelError(SpecDecError):
    """The model cannot be run on ragged rows and a paged KV cache (not a decoder, exotic layers, other bits)."""


class VocabularyMismatchError(SpecDecError, ValueError):
    """Draft and target do not share a vocabulary, so a draft token would mean another word to the target."""


class DrafterError(SpecDecError, ValueError):
    """A drafter of the caller's own broke its contract: wrong counts, or more tokens than it was allowed."""


class LengthPolicyError(SpecDecError, ValueError):
    """A policy for K of the caller's own broke its contract: wrong counts, or more draft tokens than it may ask for."""


class TrainingError(SpecDecError, ArithmeticError):
    """The training of a drafter diverged."""


class BackendError(SpecDecError, RuntimeError):
    """An explicitly requested backend cannot be loaded or has no such op."""


class KVCacheAllocationError(SpecDecError, MemoryError):
    """The page pool does not fit into the device's memory."""


class DeterminismError(SpecDecError, RuntimeError):
    """On this machine no row count gives the model's rows the same bits in every batch."""


class EngineBusyError(SpecDecError, RuntimeError):
    """A step called its own engine, or a call found the engine's core at work for requests added to it directly."""


class EngineClosedError(SpecDecError, RuntimeError):
    """A request came to an AsyncEngine that has been closed."""


class EngineCopyError(SpecDecError, TypeError):
    """An engine was to be pickled or copied deeply."""


class ForkedProcessError(SpecDecError, RuntimeError):
    """An engine was used, or made, in a process forked from one that had made an engine: it would hang."""


class RequestError(SpecDecError):
    """Something wrong with one request; the others of its batch are not touched."""


class InvalidPromptError(RequestError, ValueError):
    """The prompt is empty, of the wrong type, or holds ids outside the vocabulary; or a message of it is wrong."""


class ChatTemplateError(RequestError, ValueError):
    """The prompt is messages, but the tokenizer has no chat template, or the template fails."""


class MissingTokenizerError(RequestError, ValueError):
    """The request has stop strings, or its prompt is messages, but no tokenizer is known."""


class DetokenizationError(RequestError, ValueError):
    """The tokenizer cannot decode the request's tokens; they are kept, its text ends where the tokenizer failed."""


class TooManyDraftTokensError(RequestError, ValueError):
    """The request allows itself more draft tokens than any step of the engine has."""


class PromptTooLongError(RequestError, ValueError):
    """The prompt alone has more tokens than the model has positions."""


class KVCacheTooSmallError(RequestError):
    """The request alone needs more KV positions than the whole page pool holds."""


class EngineOverloadedError(RequestError, RuntimeError):
    """A service serves as many requests, or as many KV positions, as it may; the request can be sent again later."""


class DeadlineExceededError(RequestError, TimeoutError):
    """The request has not ended within the time that it was given."""


class RequestCancelledError(RequestError, RuntimeError):
    """The request was cancelled by its id, or because its engine was closed."""


class RequestMemoryError(RequestError, MemoryError):
    """There is not enough memory to serve the request, even alone: for its KV entries, or for one row of a forward."""


class StepError(RequestError, RuntimeError):
    """A step that served this request failed; its ``__cause__`` says how. Requests outside that step go on."""


class InvalidLogitsError(RequestError, ArithmeticError):
    """The target produced NaN logits for this request."""

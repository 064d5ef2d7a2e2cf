"""The typed errors of specdec_fast.

Every message says what was received, what was expected and what to do. An error that concerns one request derives from
:class:`RequestError`: the engine sets it on that request's output and goes on with the others. All other errors concern
the whole call. They are raised before any token is decoded, except for those of broken contracts (DrafterError,
LengthPolicyError, SchedulerError), and for OutputError and TrainingError, which commands and training raise.
"""


class SpecDecError(Exception):
    """Base of all errors of this library."""


class ConfigError(SpecDecError, ValueError):
    """A setting of the engine (method, sizes, keyword) is unknown or out of range."""


class MemoryBudgetError(ConfigError):
    """``memory_bytes`` is too small for the weights, the KV entries asked for, and a plain step of one sequence."""


class InvalidParamsError(SpecDecError, ValueError):
    """A sampling parameter is out of range."""


class NotYetSupportedError(SpecDecError, NotImplementedError):
    """The call is valid, but this version does not support it."""


class UnsupportedModelError(SpecDecError):
    """The model does not run on ragged rows and a paged KV cache (no decoder, unknown layers, other logits)."""


class VocabularyMismatchError(SpecDecError, ValueError):
    """Draft and target do not share a vocabulary, so one token id means different texts to them."""


class DrafterError(SpecDecError, ValueError):
    """A drafter broke its contract: wrong counts, or more tokens than it was allowed."""


class LengthPolicyError(SpecDecError, ValueError):
    """A policy for K broke its contract: wrong counts, or more draft tokens than it may ask for."""


class SchedulerError(SpecDecError, ValueError):
    """A scheduler broke its contract: it chose no sequence, one that is not resident, or too many."""


class OutputError(SpecDecError, OSError):
    """A file that a command writes cannot be written, because the disk is full, for example."""


class TrainingError(SpecDecError, ArithmeticError):
    """The training of a drafter diverged."""


class BackendError(SpecDecError, RuntimeError):
    """An explicitly requested backend cannot be loaded or has no such op."""


class KVCacheAllocationError(SpecDecError, MemoryError):
    """The page pool does not fit into the device's memory."""


class DeterminismError(SpecDecError, RuntimeError):
    """The model's rows differ in bits between batches on this machine, even if each is computed alone."""


class RankError(SpecDecError, RuntimeError):
    """A process of a target that ``tp_size`` shards has ended or failed; the engine serves no request any more."""


class EngineBusyError(SpecDecError, RuntimeError):
    """A step called its own engine, or requests that were added to ``engine.core`` directly have not ended."""


class EngineClosedError(SpecDecError, RuntimeError):
    """An AsyncEngine, or an Engine with ``tp_size``, received a request after it was closed."""


class EngineCopyError(SpecDecError, TypeError):
    """An engine can be neither pickled nor deep-copied."""


class ForkedProcessError(SpecDecError, RuntimeError):
    """An engine was used or made in a process that was forked from one with an engine; it could wait forever."""


class RequestError(SpecDecError):
    """Base of the errors that concern one request; the other requests of its batch are not affected."""


class InvalidPromptError(RequestError, ValueError):
    """The prompt is empty, of the wrong type, or has ids outside the vocabulary; or one of its messages is wrong."""


class ChatTemplateError(RequestError, ValueError):
    """The prompt is messages, which the chat template cannot write, or not within its limit of time."""


class MissingChatTemplateError(ChatTemplateError):
    """The prompt is messages, but the tokenizer has no chat template."""


class MissingTokenizerError(RequestError, ValueError):
    """The request has stop strings, or its prompt is messages, but no tokenizer is known."""


class GrammarError(RequestError, InvalidParamsError):
    """The request's ``structured_outputs`` is wrong, or no matcher can be made of it within the limits.

    Attributes:
        place: the JSON pointer of what is wrong in a schema; None if it is no single place.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


class DetokenizationError(RequestError, ValueError):
    """The tokenizer cannot decode the request's tokens. The output has all tokens, and the text up to the failure."""


class TooManyDraftTokensError(RequestError, ValueError):
    """The request's ``num_draft_tokens`` exceeds the largest K of the engine."""


class PromptTooLongError(RequestError, ValueError):
    """The prompt alone has more tokens than the model has positions."""


class KVCacheTooSmallError(RequestError):
    """The request alone needs more KV positions than the whole page pool holds."""


class EngineOverloadedError(RequestError, RuntimeError):
    """The service has as many requests or KV positions as it may have; send the request again later."""


class DeadlineExceededError(RequestError, TimeoutError):
    """The request has not ended within the time that it was given."""


class RequestCancelledError(RequestError, RuntimeError):
    """The request was cancelled by its id, or because its engine was closed."""


class RequestMemoryError(RequestError, MemoryError):
    """There is not enough memory to serve the request, even alone: for its KV entries, or for one row of a forward."""


class StepError(RequestError, RuntimeError):
    """A step of this request raised the exception in ``__cause__``. Requests outside that step go on."""


class InvalidLogitsError(RequestError, ArithmeticError):
    """The target produced NaN logits for this request, or infinite ones where it asked for log-probabilities."""


class NoAllowedTokenError(RequestError, ValueError):
    """The request's own restrictions leave no token that may follow its tokens."""


class TokenMaskError(RequestError, RuntimeError):
    """What restricts the tokens of this request raised the exception in ``__cause__``."""


class LogitsProcessorError(RequestError, RuntimeError):
    """A logits processor of this request raised the exception in ``__cause__``, or returned no logits of numbers."""


class StoppingCriteriaError(RequestError, RuntimeError):
    """A stopping criterion of transformers, of this request, raised the exception in ``__cause__``."""


class UnknownTokenError(RequestError, ValueError):
    """The request's parameters name a token id outside the target's vocabulary, or a word that has no tokens."""

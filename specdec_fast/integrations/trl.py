"""TRL: a ``rollout_func`` for ``GRPOTrainer`` that decodes with an engine over the trainer's own weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import checked_draft
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.integrations.transformers.kept_engines import Drafting, KeptEngine, asked_config
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams

_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")  # accelerate's names of what may cut weights into parts
_OF_TRANSFORMERS = ("cache_implementation", "disable_compile")  # fields that concern transformers' own decoding

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]


def rollout_func(
    draft: Any = None,
    *,
    seed: int = 0,
    config: EngineConfig | None = None,
    num_draft_tokens: Any = None,
    draft_tokenizer: Any = None,
) -> RolloutFunc:
    """Return a ``rollout_func`` for TRL's ``GRPOTrainer``: it decodes one completion of each prompt that TRL passes.

    The engine shares the weights of the trainer's model, and takes notice of their updates before each rollout
    (``Engine.sync_weights``). It is made again if the model's tensors or modules are others. Completions are those of
    plain decoding with the weights of the step: they depend on the weights, the prompts and the seed, not on the
    drafter. The row's seed is made of ``seed``, the process, the trainer's ``global_step``, the number of rollouts in
    this step so far, and the row, so training that is resumed at a checkpoint has the same completions.

    Args:
        draft: the drafter, as ``Engine`` takes it; None decodes plainly.
        seed: of all rollouts, an integer >= 0.
        config: further settings of the engine, such as ``EngineConfig(prefix_cache=True)``.
        num_draft_tokens: K; None: the engine's default.
        draft_tokenizer: the draft model's, if it has another one than the trainer.

    Returns:
        A function of the prompts (texts or chats) and the trainer. It returns ``prompt_ids``, ``completion_ids`` and
        ``logprobs``, a list of each per prompt. The log-probabilities have the bits of ``Engine.score``: they are those
        of the model's own logits, before temperature and filters.

    Raises:
        ConfigError: an argument is wrong. The function raises it if the trainer has settings that rule rollouts out.
        NotYetSupportedError: by the function: adapters (PEFT), sharded weights, tools, images, or a field of the
            trainer's ``generation_kwargs`` without counterpart.
        RequestError: by the function: a prompt cannot be decoded; a subclass says why.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected an integer >= 0.")
    checked_draft(draft, asked_config(config, num_draft_tokens, 1)[0], draft_tokenizer)
    numbers = _RolloutNumbers()

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        expect_supported(trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = _prompt_ids(prompts, trainer)
        place = (seed, trainer.accelerator.process_index, *numbers.next(trainer.state.global_step))
        params = _params_of_rows(trainer, _seeds(place, len(prompts)))

        def decode(engine: Engine) -> list[GenerationOutput]:
            engine.sync_weights()
            return engine.generate(prompt_ids, params, progress=False)

        drafting = Drafting(draft, trainer.processing_class, draft_tokenizer)
        with _decoding(model):
            outputs = KeptEngine.of(model).run(model, drafting, config, num_draft_tokens, len(prompts), decode)
        for output in outputs:
            output.raise_for_error()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [output.token_ids for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }

    return rollout


def expect_supported(trainer: Any) -> None:
    """Check that rollouts of a trainer can be decoded here; see ``rollout_func`` for what is raised."""
    if getattr(trainer.args, "use_vllm", False):
        raise ConfigError("use_vllm=True decodes rollouts with vLLM; unset it, or leave rollout_func out.")
    model = trainer.model
    if hasattr(model, "peft_config"):
        raise NotYetSupportedError(
            f"the trainer's model is a {type(model).__name__} with adapters, which the engine does not decode; train "
            "the whole model, or merge the adapters first (merge_and_unload)."
        )
    kind = getattr(trainer.accelerator.distributed_type, "value", None)
    if kind in _SHARDED:
        raise NotYetSupportedError(
            f"the trainer runs under {kind}, which may cut the model's weights into parts, and the engine shares whole "
            "ones; train in one process, or in several with a whole model each (DDP)."
        )
    if getattr(trainer, "tools", None) or getattr(trainer, "environments", None):
        raise NotYetSupportedError("rollouts with tools or environments have several turns; leave rollout_func out.")
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        name = type(trainer.processing_class).__name__
        raise NotYetSupportedError(f"the trainer's processing_class is a {name}; rollouts take a tokenizer, and texts.")
    temperature = trainer.generation_config.temperature
    if getattr(trainer.args, "off_policy_mask_threshold", None) is not None and temperature != 1:
        raise ConfigError(
            f"off_policy_mask_threshold compares log-probabilities at temperature={temperature}, and those of rollouts "
            "are of the model's own logits; set temperature=1, or leave off_policy_mask_threshold out."
        )


class _RolloutNumbers:
    """Counts the rollouts of each step of the optimizer."""

    def __init__(self) -> None:
        self._step = -1
        self._count = 0

    def next(self, step: int) -> tuple[int, int]:
        """Return the step, and the number of its rollouts before this one."""
        self._count = self._count + 1 if step == self._step else 0
        self._step = step
        return step, self._count


def _seeds(place: tuple[int, ...], num_rows: int) -> list[int]:
    """Return a seed for each row: 63 bits, which are others for every place."""
    return [int(word >> np.uint64(1)) for word in np.random.SeedSequence(place).generate_state(num_rows, np.uint64)]


def _params_of_rows(trainer: Any, seeds: list[int]) -> list[SamplingParams]:
    config = copy.deepcopy(trainer.generation_config)
    for name in _OF_TRANSFORMERS:
        setattr(config, name, None)
    params = SamplingParams.from_generation_config(config)
    if params.n != 1:
        raise ConfigError(
            f"generation_kwargs sets num_return_sequences={params.n}; TRL repeats the prompts, so set num_generations "
            "of GRPOConfig instead."
        )
    return [replace(params, seed=seed, logprobs=True) for seed in seeds]


def _prompt_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    tokenizer = trainer.processing_class
    if all(isinstance(prompt, str) for prompt in prompts):
        encoded = tokenizer(text=prompts)
    else:
        options = getattr(trainer.args, "chat_template_kwargs", None) or {}
        encoded = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **options
        )
    return [list(ids) for ids in encoded["input_ids"]]


@contextmanager
def _decoding(model: Any) -> Iterator[None]:
    """Put a model that is being trained into the state in which it decodes, and back.

    Its modules are in evaluation mode. What training adds around its forward is taken away, because an engine computes
    the model's own: the hook by which gradient checkpointing asks the embeddings for gradients, accelerate's forward,
    which calls another one under ``torch.autocast``, and TRL's, which computes losses in parts if it is asked to.
    """
    training = [module for module in model.modules() if module.training]
    hooks = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    replaced = {name: vars(model)[name] for name in ("forward",) if name in vars(model)}
    model.eval()
    try:
        for present, before in hooks:
            for number in [number for number, hook in before.items() if _asks_for_gradients(hook)]:
                del present[number]
        if replaced:
            del model.forward
            forward = _without_wrappers(replaced["forward"], model)
            if getattr(forward, "__func__", forward) is not type(model).forward:
                model.forward = forward
        yield
    finally:
        for present, before in hooks:
            present.clear()
            present.update(before)  # with the same numbers, by which their handles remove them
        vars(model).update(replaced)
        for module in training:
            module.training = True


def _asks_for_gradients(hook: Any) -> bool:
    """Return whether transformers has made the hook; its ``disable_input_require_grads`` removes the latest alone."""
    return getattr(hook, "__qualname__", "").startswith("PreTrainedModel.enable_input_require_grads.")


def _without_wrappers(forward: Any, model: Any) -> Any:
    """Return the forward that accelerate's and TRL's call: the model's own, unless the user has replaced it."""
    forward = vars(model).get("_original_forward", forward)
    function = getattr(forward, "__func__", forward)
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("trl."):
        return inspect.getclosurevars(function).nonlocals.get("original_forward", forward)
    return forward

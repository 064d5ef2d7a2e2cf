"""Rollouts for TRL: refusals and what surrounds a rollout without TRL, and training by ``GRPOTrainer`` with it."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.integrations.trl import rollout_func
from support.self_draft import codes_of

TEXTS = ["Once upon a time", "One day, a little bird"] * 2
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


@pytest.fixture
def model(target):
    """A copy of the bundled target that a test may train."""
    return copy_of(target)


def copy_of(model):
    made = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    made.load_state_dict(model.state_dict())
    return made.eval()


def trainer_of(model, tokenizer, *, kind="NO", sampling=None, **others):
    """What a rollout reads of a trainer."""
    choice = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "eos_token_id": [1], "disable_compile": True}
    fields = {
        "model": model,
        "accelerator": SimpleNamespace(
            unwrap_model=lambda model: model, process_index=0, distributed_type=SimpleNamespace(value=kind)
        ),
        "args": SimpleNamespace(),
        "state": SimpleNamespace(global_step=0),
        "processing_class": tokenizer,
        "generation_config": GenerationConfig(**(choice | (sampling or {}))),
    }
    return SimpleNamespace(**(fields | others))


def updated(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


@pytest.mark.parametrize("change", [updated, replaced])
def test_rollouts_are_those_of_the_present_weights(model, tokenizer, change):
    """A trainer that shards, offloads or casts replaces tensors; an optimizer updates them in place."""
    rollout = rollout_func("self", seed=3, config=sd.EngineConfig(prefix_cache=True))
    former = rollout(TEXTS, trainer_of(model, tokenizer))
    assert [former["completion_ids"][i] == former["completion_ids"][i + 2] for i in range(2)] == [False, False]
    change(model)
    step = SimpleNamespace(global_step=1)
    found = rollout(TEXTS, trainer_of(model, tokenizer, state=step))
    plain = rollout_func(seed=3)
    assert found == plain(TEXTS, trainer_of(copy_of(model), tokenizer, state=step)) != former
    scores = sd.Engine(copy_of(model), None).score([found["prompt_ids"][0] + found["completion_ids"][0]])[0].logprobs
    assert scores[-len(found["logprobs"][0]) :] == found["logprobs"][0]


def test_greedy_rollouts_of_chats(model, tokenizer):
    """The chat template's options are those of the trainer."""
    args = SimpleNamespace(chat_template_kwargs={"chat_template": TEMPLATE})
    chats = trainer_of(model, tokenizer, sampling={"do_sample": False}, args=args)
    found = rollout_func("ngram")(CHATS[:2], chats)
    prompt_ids = [tokenizer(f"{text}\nA:", add_special_tokens=False).input_ids for text in TEXTS[:2]]
    params = sd.SamplingParams(max_new_tokens=12)
    outputs = sd.Engine(copy_of(model), None).generate(prompt_ids, params)
    assert found["prompt_ids"] == prompt_ids
    assert found["completion_ids"] == [output.token_ids for output in outputs]


def test_every_row_step_rollout_and_process_has_other_seeds(model, tokenizer):
    def completions(rollout, process=0, step=0):
        trainer = trainer_of(model, tokenizer, state=SimpleNamespace(global_step=step), sampling={"temperature": 9.0})
        trainer.accelerator.process_index = process
        return rollout(TEXTS[:1] * 2, trainer)["completion_ids"]

    first = rollout_func(seed=1)
    found = [completions(first), completions(first), completions(first, step=1)]
    found += [completions(rollout_func(seed=1), process=1), completions(rollout_func(seed=2))]
    texts = {tuple(ids) for rows in found for ids in rows}
    assert len(texts) == 2 * len(found)
    assert completions(rollout_func(seed=1), step=1) == found[2], "as of training that is resumed there"


def test_a_model_in_training_is_left_as_it_was(model, tokenizer):
    """Also what gradient checkpointing and mixed precision have put around its forward, which no program would call."""
    for _ in range(2):  # as TRL does; transformers removes the last hook alone
        model.enable_input_require_grads()
    handle = model.model.embed_tokens._forward_hooks
    hooks = dict(handle)
    model.train()
    model.model.norm.eval()
    training = {name: module.training for name, module in model.named_modules()}
    model._original_forward = model.forward

    @wraps(model._original_forward.__func__)
    def forward(*args, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return model._original_forward(*args, **options)

    model.forward = forward
    found = rollout_func()(TEXTS, trainer_of(model, tokenizer))
    assert vars(model)["_specdec_fast_engine"]._kept.engine.target.has_program
    assert found == rollout_func()(TEXTS, trainer_of(copy_of(model), tokenizer))
    assert (dict(handle), vars(model)["forward"]) == (hooks, forward)
    assert {name: module.training for name, module in model.named_modules()} == training


def test_a_forward_of_the_user_is_not_set_aside(model, tokenizer):
    """Not even where accelerate's stands before it."""
    trainer = trainer_of(model, tokenizer, sampling={"do_sample": False})
    own = model.forward

    def negated(*args, **options):
        outputs = own(*args, **options)
        outputs.logits = -outputs.logits
        return outputs

    expected = rollout_func()(TEXTS, trainer)["completion_ids"]
    model.forward = model._original_forward = negated
    found = rollout_func()(TEXTS, trainer)["completion_ids"]
    assert found != expected
    row = torch.tensor([tokenizer(TEXTS[0]).input_ids])
    assert found[0][0] == model(row).logits[0, -1].argmax()


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (ConfigError, "use_vllm=True", {"args": SimpleNamespace(use_vllm=True)}),
        (ConfigError, "off_policy_mask_threshold", {
            "args": SimpleNamespace(off_policy_mask_threshold=0.5), "sampling": {"temperature": 0.7},
        }),
        (ConfigError, "num_generations", {"sampling": {"num_return_sequences": 2}}),
        (NotYetSupportedError, "num_beams", {"sampling": {"num_beams": 4}}),
        (NotYetSupportedError, "FSDP", {"kind": "FSDP"}),
        (NotYetSupportedError, "tools", {"tools": [print]}),
        (NotYetSupportedError, "processing_class is a SimpleNamespace", {"processing_class": SimpleNamespace()}),
        (NotYetSupportedError, "merge_and_unload", {"model": SimpleNamespace(peft_config={})}),
    ],
)  # fmt: skip
def test_trainers_that_are_not_served_are_told_so(model, tokenizer, error, message, wrong):
    with pytest.raises(error, match=message):
        rollout_func()(TEXTS, trainer_of(**{"model": model, "tokenizer": tokenizer, **wrong}))


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("seed=-1", {"seed": -1}),
        ("seed=True", {"seed": True}),
        ("did you mean 'ngram'", {"draft": "ngrm"}),
        ("num_draft_tokens=-1", {"num_draft_tokens": -1}),
        ("quantization='int4', but the model is loaded", {"config": sd.EngineConfig(quantization="int4")}),
        ("draft_tokenizer has no effect", {"draft": "ngram", "draft_tokenizer": object()}),
    ],
)
def test_wrong_arguments_are_refused_before_training(message, wrong):
    with pytest.raises(ConfigError, match=message):
        rollout_func(**wrong)


def test_a_prompt_that_cannot_be_decoded_is_an_error(model, tokenizer):
    with pytest.raises(sd.RequestError, match="512 positions"):
        rollout_func()(["word " * 600], trainer_of(model, tokenizer))


def reward(completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


def grpo(model, tokenizer, rollout, folder, **settings):
    """Train a model for three steps, with TRL's defaults of mixed precision and gradient checkpointing."""
    datasets = pytest.importorskip("datasets", reason="the extra rl is not installed")
    trl = pytest.importorskip("trl", reason="the extra rl is not installed")
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    dataset = datasets.Dataset.from_dict({"prompt": TEXTS})
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer,
        rollout_func=rollout,
    )  # fmt: skip
    trainer.train()


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")  # of TRL, about its experimental features
@pytest.mark.parametrize(
    ("draft", "settings"),
    [
        ("self", {}),
        ("self", {"bf16": False}),
        ("model", {"bf16": False, "gradient_checkpointing": False, "temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_training_with_trl(model, tokenizer, tmp_path, draft, settings):
    """Every rollout is plain decoding with the weights of its step, which differ from those of the others."""
    name = str(demo_pair() / "draft") if draft == "model" else draft
    speculative = rollout_func(name, seed=5, config=sd.EngineConfig(prefix_cache=True))
    plain = rollout_func(seed=5)
    engines = []
    weights = []

    def compared(prompts, trainer):
        assert len(prompts) == 8
        found = speculative(prompts, trainer)
        fresh = copy_of(trainer.model)
        others = ("accelerator", "args", "state", "processing_class", "generation_config")
        same = SimpleNamespace(model=fresh, **{name: getattr(trainer, name) for name in others})
        assert found == plain(prompts, same)
        engines.append(vars(trainer.model)["_specdec_fast_engine"]._kept.engine)
        weights.append(fresh.lm_head.weight.detach().clone())
        assert engines[-1].target.has_program
        if draft == "self":
            assert codes_of(engines[-1]) == codes_of(sd.Engine(fresh, "self"))
        return found

    grpo(model, tokenizer, compared, tmp_path, **settings)
    assert len(engines) == 3
    assert len(set(map(id, engines))) == 1, "updates in place need no new engine"
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])

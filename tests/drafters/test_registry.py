"""A drafter that is named in ``DRAFTERS`` can be used by name in the API and on the command line."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import generate, verify
from specdec_fast.drafters import DRAFTERS, DrafterContext
from support.demo import MAX_NEW_TOKENS
from support.source_tree import ROOT

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


class NearestToken(sd.Drafter):
    """Proposes the token whose embedding is nearest the last token's: it needs the weights, K and the device."""

    name = "nearest"

    def __init__(self, context: DrafterContext) -> None:
        self.context = context
        with torch.inference_mode():
            weight = context.target.model.get_input_embeddings().weight.float()
            self.nearest = (weight @ weight.T).argmax(dim=-1).to(context.device)
        self.largest_limit = context.config.most_draft_tokens

    def propose(self, sequences, limits):
        assert max(limits) <= self.largest_limit
        last = torch.tensor([s.token_ids[-1] for s in sequences], device=self.context.device)
        repeats = torch.tensor(limits, device=self.context.device)
        return sd.Draft(self.nearest[last].repeat_interleave(repeats), limits)


@pytest.fixture
def nearest(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "nearest", NearestToken)


def test_registered_drafter_is_made_with_target_config_and_device(nearest, target, prompt_ids, expected):
    engine = sd.Engine(target, "nearest", num_draft_tokens=2, max_batch_size=4)
    context = engine.drafter.context
    assert (context.target, context.config, context.device) == (engine.target, engine.config, target.device)
    assert context.tokenizer is engine.tokenizer
    assert engine.describe()["drafter"] == "nearest"
    outputs = engine.generate(prompt_ids, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0, "it drafts"


def test_generate_finds_a_registered_drafter_by_name(nearest, target, prompt_ids, expected):
    outputs = sd.generate(target, "nearest", prompt_ids[:3], PARAMS)
    assert [output.token_ids for output in outputs] == expected[:3]


def test_command_line_decodes_with_a_registered_drafter(nearest, tmp_path, prompt_ids, expected):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": prompt_ids[0]}) + "\n")
    options = ["--target", str(demo_pair() / "target"), "--draft", "nearest", "--prompts", str(prompts)]
    assert main(["generate", *options, "--output", str(out), "--max-new-tokens", str(MAX_NEW_TOKENS)]) == 0
    assert json.loads(out.read_text())["token_ids"] == expected[0]


def test_command_line_compares_a_registered_drafter(nearest, tmp_path, prompt_ids):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "report.json"
    prompts.write_text(json.dumps({"prompt_ids": prompt_ids[0]}) + "\n")
    options = ["--target", str(demo_pair() / "target"), "--draft", "nearest", "--prompts", str(prompts)]
    options += ["--json", str(out), "--max-new-tokens", "4", "--methods", "eqspec", "--batch-sizes", "1"]
    assert main(["verify", *options, "--num-draft-tokens", "2", "--dtypes", "float32"]) == 0
    assert {c["drafter"] for c in json.loads(out.read_text())["comparisons"]} == {"nearest"}


@pytest.mark.parametrize("command", [generate, verify], ids=["generate", "verify"])
def test_help_names_every_registered_drafter(nearest, command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    (draft,) = (action for action in parser._actions if "--draft" in action.option_strings)
    assert all(name in draft.help for name in DRAFTERS)


def test_misspelt_name_is_compared_with_registered_ones(nearest, target):
    with pytest.raises(sd.ConfigError, match="did you mean 'nearest'"):
        sd.Engine(target, "neerest")


def test_error_of_a_wrong_draft_lists_registered_names(nearest, target):
    with pytest.raises(sd.ConfigError, match=r"'ngram', 'ngram-trie', 'none', 'self', .*, 'nearest'"):
        sd.Engine(target, 5.0)


def test_factory_that_makes_no_drafter_is_an_error(monkeypatch, target):
    monkeypatch.setitem(DRAFTERS, "nothing", lambda context: None)
    with pytest.raises(sd.DrafterError, match=r"DRAFTERS\['nothing'\] made a NoneType; expected a Drafter"):
        sd.Engine(target, "nothing")


@pytest.mark.parametrize("page", ["guide.md", "cli.md"])
def test_documents_name_every_drafter(page):
    text = (ROOT / "docs" / page).read_text()
    assert all(f'`"{name}"`' in text or f"`{name}`" in text for name in DRAFTERS)

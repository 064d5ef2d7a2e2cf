"""``specdec-fast doctor --drafter``: a tap that is off by one is found, and noise is not."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.tap_offsets import Agreement, better
from specdec_fast.drafters import CHECKPOINT_DRAFTERS
from specdec_fast.models.hidden_states import checked_taps
from support.models import tiny_model

RIGHT = (1, 2)  # the taps of which the drafter was made


class Trained(sd.Drafter):
    """Proposes the target's own token if it reads the taps that it was made for, and token 0 otherwise."""

    name = "trained"
    settings = ("tap_layers",)

    def __init__(self, context, named):
        named_taps = () if named == "without" else tuple(int(tap) for tap in named.split(","))
        self.taps = checked_taps(context.config.tap_layers or named_taps, context.target.layout.num_layers)
        self.model = context.target.model

    def observe(self, sequences, positions, features):
        assert features.shape[1] == len(self.taps)

    def propose(self, sequences, limits):
        tokens = []
        for sequence in (s for s, limit in zip(sequences, limits, strict=True) if limit):
            ids = torch.tensor([sequence.token_ids])
            tokens.append(int(self.model(ids).logits[0, -1].argmax()) if self.taps == RIGHT else 0)
        return sd.Draft(torch.tensor(tokens), [min(1, limit) for limit in limits])


@pytest.fixture
def doctor(in_folder, monkeypatch, capsys):
    """Run the command on a tiny target of three layers; return its status and lines."""
    tiny_model("llama").save_pretrained("target")
    (in_folder / "prompts.jsonl").write_text('{"prompt_ids": [5, 9, 2]}\n{"prompt_ids": [7]}\n')
    monkeypatch.setitem(CHECKPOINT_DRAFTERS, "trained", (Trained, lambda folder: False))

    def run(drafter, *options):
        given = ["--drafter", drafter, "--target", "target", "--prompts", "prompts.jsonl", "--num-tokens", "24"]
        status = main(["doctor", *given, *options])
        return status, capsys.readouterr()

    return run


def table_of(output):
    return [line.split() for line in output.out.splitlines()]


def test_the_right_taps_give_no_warning(doctor):
    status, output = doctor("trained:1,2")
    assert status == 0
    rows = [row[:3] for row in table_of(output)[2:]]
    assert rows == [["-1", "0,1", "0.0%"], ["+0", "1,2", "100.0%"], ["+1", "2,3", "0.0%"]]
    assert "warning" not in output.out


@pytest.mark.parametrize(("named", "offset"), [("0,1", "+1"), ("2,3", "-1")])
def test_taps_that_are_off_by_one_are_found(doctor, named, offset):
    status, output = doctor(f"trained:{named}")
    assert status == 1
    assert [offset, "1,2", "100.0%"] in [row[:3] for row in table_of(output)]
    assert len(table_of(output)) == 6, "a header, two rows because the third has no such layers, and the warning"
    assert f"warning: the drafter agrees more often at offset {offset}; pass --tap-layers 1,2" in output.out


def test_tap_layers_that_are_given_are_offset_0(doctor):
    status, output = doctor("trained:0,1", "--tap-layers", "1,2")
    assert status == 0
    assert ["+0", "1,2", "100.0%"] in [row[:3] for row in table_of(output)]


@pytest.mark.parametrize("drafter", ["trained:without", "ngram"])
def test_a_drafter_without_taps_is_an_error(doctor, drafter):
    status, output = doctor(drafter)
    assert status == 2
    assert "reads no layers of the target, so there are no taps to compare" in output.err


@pytest.mark.parametrize("option", ["--drafter", "--target"])
def test_a_drafter_and_a_target_belong_together(option, capsys):
    assert main(["doctor", option, "x"]) == 2
    assert "--drafter and --target belong together" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--prompts", "x.jsonl"], ["--num-tokens", "400"], ["--dtype", "float32"], ["--tap-layers", "1,2"]]
)
def test_options_of_the_check_need_a_drafter(options, capsys):
    assert main(["doctor", *options]) == 2
    assert f"{options[0]} is for the check of a drafter" in capsys.readouterr().err


@pytest.mark.parametrize(("accepted", "is_better"), [(100, False), (115, False), (140, True)])
def test_a_difference_that_may_be_noise_gives_no_warning(accepted, is_better):
    """Of 200 draft tokens each: three standard errors are 15 points."""
    own, other = Agreement(0, (2,), 100, 200), Agreement(1, (3,), accepted, 200)
    assert better([own, other]) == (other if is_better else None)

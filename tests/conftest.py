"""Fixtures: the bundled pair in fp32, its prompts, and what ``transformers`` makes of them."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
from contextlib import nullcontext

import pytest
from hypothesis import settings

from specdec_fast.assets import demo_pair

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may use a model hub

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; tests interrupt what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit of time: that would depend on the machine, and on what else it does.
settings.load_profile("ci")

pytest.register_assert_rewrite("support")  # before anything of it is imported


def interpret_triton():
    """Let Triton kernels run on the CPU, in its interpreter; their functions are wrapped when first imported."""
    if importlib.util.find_spec("triton"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


# A conftest.py of a folder that is named on the command line imports kernels before ``pytest_configure``, and torch is
# not to be imported yet. Where there is no driver of a GPU, torch would find none either.
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
    interpret_triton()


def pytest_configure(config):
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # the process of pytest-xdist that starts the others imports neither torch nor tests
    gc.disable()  # until all is imported and all tests are collected: nothing of that is garbage
    import torch

    if not torch.cuda.is_available():
        interpret_triton()


NUM_LEFT = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what carries the marker
def pytest_collection_modifyitems(items):
    """Leave to ``make test-rest`` what a test of all combinations of its parameters need not run every time."""
    from support.grids import mark_what_is_covered

    mark_what_is_covered(items)


def pytest_deselected(items):
    left = [item for item in items if item.get_closest_marker("grid")]
    if left:
        left[0].config.stash[NUM_LEFT] = len(left)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, each of which collects everything
        session.config.workeroutput["num_left"] = session.config.stash.get(NUM_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[NUM_LEFT] = getattr(node, "workeroutput", {}).get("num_left", 0)


def pytest_terminal_summary(terminalreporter, config):
    if num_left := config.stash.get(NUM_LEFT, 0):
        terminalreporter.write_line(f"{num_left} tests of grids are left to make test-rest")


@pytest.fixture(scope="session", autouse=True)
def _torch_settings():
    """One thread: for such tiny models, threads that spin on a busy machine take a hundred times as long.

    Uninitialised memory is filled with NaN or the largest integer, so reading any is noticed. The garbage collector
    does not look at what is imported: that takes 0.2 s each time.
    """
    import torch
    from transformers.utils import logging

    gc.freeze()
    gc.enable()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support import triton_interpreter

        triton_interpreter.speed_up()
    yield
    gc.unfreeze()  # or libraries report what they hold as leaks


# Folders of tests in which every engine records and checks its models: they are about that, or about kinds of models.
PREPARING = {"cuda_graphs", "models", "ops", "program"}
# Files among them that are about what models compute once they are loaded.
SERVING = {
    "test_expert_codes.py",
    "test_experts.py",
    "test_gguf.py",
    "test_indexed_attention.py",
    "test_quantized_checkpoint.py",
}
# Files elsewhere that are about the checks.
CHECKING = {"test_forwards_by_pytorch.py", "test_hidden_states.py", "test_row_invariance.py"}


@pytest.fixture(scope="module", autouse=True)
def _prepared_once(request):
    """The engines of a test file record a model once, as long as it does not change, and check one model of a kind."""
    from support.prepared_once import checked_once, recorded_once

    prepares = request.path.parent.name in PREPARING and request.path.name not in SERVING
    checks = prepares or request.path.name in CHECKING
    with nullcontext() if prepares else recorded_once(), nullcontext() if checks else checked_once():
        yield


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    """Triton's compiler, in a process that imports it once."""
    pytest.importorskip("triton")
    from support.compiler import Compiler

    found = Compiler(str(tmp_path_factory.mktemp("triton_cache")))
    yield found
    found.close()


@pytest.fixture(scope="session")
def target():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_pair() / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def draft():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_pair() / "draft", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_pair() / "target")


@pytest.fixture(scope="session")
def prompts():
    """The 32 bundled prompts, 7 to 200 tokens, as text."""
    return [json.loads(line)["prompt"] for line in (demo_pair() / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def prompt_ids(prompts, tokenizer):
    """Sixteen prompts as ids: of one and of two tokens, two of equal length, and bundled ones of 9 to 201 tokens.

    Nine of them end by EOS, after 10 to 38 tokens; the rest run to MAX_NEW_TOKENS.
    """
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    chosen = [encoded[i] for i in (3, 7, 8, 2, 5, 19, 21, 23, 24, 26, 29, 6)]
    return [*chosen[:4], [0], [0, 70], encoded[7][:90], encoded[1][:90], *chosen[4:]]


@pytest.fixture(scope="session")
def expected(target, prompt_ids):
    """What ``transformers.generate`` emits for each of ``prompt_ids`` at batch 1, greedily."""
    from specdec_fast.equivalence.compare import transformers_greedy
    from support.demo import MAX_NEW_TOKENS

    return [transformers_greedy(target, ids, MAX_NEW_TOKENS) for ids in prompt_ids]

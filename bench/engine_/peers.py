"""Other libraries that decode many requests together, for ``bench.engine --methods``; they run if installed.

* ``transformers-continuous``: ``generate_batch()`` of transformers (it needs psutil), plain decoding.
* ``openvino``, ``openvino-speculative``: OpenVINO GenAI's continuous batching, plain and with the draft model.
* ``llama.cpp``: its C library through llama-cpp-python, plain decoding of several sequences in one ``llama_decode``.

OpenVINO and llama.cpp read models of their own formats, which ``python -m bench.export_pair`` writes; ``--peer-models``
names the folder. All libraries decode greedily, on as many threads as torch has. None must equal the reference: for
each the report has the share of outputs that equal the reference's, and the share that equal its own at batch 1.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.common.measurement import Measurement
from bench.common.workload import Workload
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import eos_token_ids

_PAGE_SIZE = 32
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # names of OpenVINO's arithmetic

Run = Callable[[int, int | str | None], Measurement]  # from a batch size and K


def transformers_continuous(workload: Workload, models: Path | None) -> Run:
    """Make a run of ``generate_batch()``, with at most ``batch_size`` requests at a time over a paged cache."""
    _need("psutil")
    target, prompts = workload.target, workload.prompts
    longest = max(map(len, prompts)) + workload.max_new_tokens
    eos = sorted(eos_token_ids(target))
    config = GenerationConfig(
        max_new_tokens=workload.max_new_tokens, do_sample=False, eos_token_id=eos or None, pad_token_id=0
    )

    fields = ContinuousBatchingConfig.__dataclass_fields__
    page_size = {"page_size" if "page_size" in fields else "block_size": _PAGE_SIZE}  # renamed in transformers 5.18

    def run(batch_size: int, num_draft_tokens: int | str | None) -> Measurement:
        pages = -(-longest // _PAGE_SIZE) + 1
        batching = ContinuousBatchingConfig(
            **page_size,
            num_blocks=pages * batch_size + 1,
            max_batch_tokens=max(longest, batch_size),
            max_requests_per_batch=batch_size,
            cpu_offload_space=0.0,
        )
        started = perf_counter()
        found = target.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        seconds = perf_counter() - started
        if failed := next((output.error for output in found.values() if output.error), None):
            raise ConfigError(f"transformers' generate_batch failed: {failed}")
        ordered = [found[key] for key in sorted(found, key=lambda name: int(name.rsplit("_", 1)[1]))]
        outputs = [list(output.generated_tokens) for output in ordered]
        return Measurement(outputs, seconds, {}, 0, sum(map(len, outputs)))

    return run


class OpenVino:
    """OpenVINO GenAI's ``ContinuousBatchingPipeline``, with ``batch_size`` requests at a time.

    ``workload`` may be replaced by one of no more and no longer prompts.
    """

    def __init__(
        self, workload: Workload, models: Path | None, drafts: bool = False, target: str = "target-openvino"
    ) -> None:
        _need("openvino_genai")
        names = [target, *(["draft-openvino"] if drafts else [])]
        self.workload = workload
        self._folders = [_exported(models, name) for name in names]

    @cached_property
    def _pipeline(self) -> Any:
        import openvino_genai as genai

        workload = self.workload
        layers = workload.target.config.get_text_config(decoder=True)
        head_dim = getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads
        per_token = 4 * layers.num_hidden_layers * layers.num_key_value_heads * head_dim  # bytes, in half precision
        requests = len(workload.prompts) * (max(map(len, workload.prompts)) + workload.max_new_tokens)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = max(1, -(-4 * requests * per_token // 2**30))  # GiB; room for any precision
        scheduler.max_num_seqs = len(workload.prompts)
        scheduler.enable_prefix_caching = False  # every repeat has the same prompts
        precision = _PRECISIONS[workload.target.dtype]
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        target, *draft = self._folders
        drafting = {"draft_model": genai.draft_model(draft[0], "CPU", **options)} if draft else {}
        return genai.ContinuousBatchingPipeline(target, scheduler, "CPU", {**options, **drafting})

    def __call__(self, batch_size: int, num_draft_tokens: int | str | None) -> Measurement:
        """Decode all prompts."""
        import openvino
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = self.workload.max_new_tokens, False
        eos = eos_token_ids(self.workload.target)
        config.ignore_eos = not eos
        config.set_eos_token_id(min(eos, default=0))  # it refuses requests without one, even if they ignore it
        config.stop_token_ids = set(eos) or {0}
        if isinstance(num_draft_tokens, int):
            config.num_assistant_tokens = num_draft_tokens
        pipeline, prompts = self._pipeline, [openvino.Tensor(np.array([p])) for p in self.workload.prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        latencies, running, num_steps = [0.0] * len(prompts), {}, 0
        waiting = list(range(len(prompts)))[::-1]
        started = perf_counter()
        while waiting or running:
            while waiting and len(running) < batch_size:
                index = waiting.pop()
                running[index] = pipeline.add_request(index, prompts[index], config)
            pipeline.step()
            num_steps += 1
            for index, handle in list(running.items()):
                if handle.can_read():
                    outputs[index] += next(iter(handle.read().values())).generated_ids
                if handle.get_status() == genai.GenerationStatus.FINISHED:
                    latencies[index] = perf_counter() - started
                    del running[index]
        return Measurement(outputs, perf_counter() - started, {}, 0, num_steps, latencies=latencies)


class LlamaCpp:
    """llama.cpp's C library: one ``llama_decode`` computes the newest tokens, or the prompts, of a whole batch.

    ``workload`` may be replaced.
    """

    def __init__(self, workload: Workload, models: Path | None, target: str = "target.gguf") -> None:
        _need("llama_cpp")
        self.workload = workload
        self._file = _exported(models, target)

    @cached_property
    def _model(self) -> Any:
        import llama_cpp

        model = llama_cpp.llama_model_load_from_file(str(self._file).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise ConfigError(f"llama.cpp cannot load {self._file}; export the pair again.")
        return model

    def __call__(self, batch_size: int, num_draft_tokens: int | str | None) -> Measurement:
        """Decode all prompts."""
        import llama_cpp

        workload = self.workload
        longest = max(map(len, workload.prompts)) + workload.max_new_tokens
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = batch_size, longest * batch_size
        params.n_batch = params.n_ubatch = max(512, longest * batch_size)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ConfigError(f"llama.cpp cannot make a context of {params.n_ctx} tokens.")
        try:
            return self._decode(context, batch_size, params.n_batch)
        finally:
            llama_cpp.llama_free(context)

    def _decode(self, context: Any, batch_size: int, most_tokens: int) -> Measurement:
        import llama_cpp

        workload, eos = self.workload, eos_token_ids(self.workload.target)
        vocab_size = workload.target.config.get_text_config(decoder=True).vocab_size
        outputs: list[list[int]] = [[] for _ in workload.prompts]
        latencies, running, num_steps = (
            [0.0] * len(outputs),
            {},
            0,
        )  # running: from place to (request, position, new tokens)
        waiting = list(range(len(outputs)))[::-1]
        batch = llama_cpp.llama_batch_init(most_tokens, 0, 1)
        started = perf_counter()
        while waiting or running:
            for place in set(range(batch_size)) - set(running):
                if waiting:
                    running[place] = (index := waiting.pop(), 0, workload.prompts[index])
            rows = self._fill(batch, running)
            if llama_cpp.llama_decode(context, batch) != 0:
                raise ConfigError("llama_decode failed; lower --batch-sizes or the lengths.")
            num_steps += 1
            for place, row in rows.items():
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (vocab_size,))
                index, position, new = running[place]
                outputs[index].append(token := int(logits.argmax()))
                running[place] = (index, position + len(new), [token])
                if token in eos or len(outputs[index]) == workload.max_new_tokens:
                    latencies[index] = perf_counter() - started
                    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), place, -1, -1)
                    del running[place]
        seconds = perf_counter() - started
        llama_cpp.llama_batch_free(batch)
        return Measurement(outputs, seconds, {}, 0, num_steps, latencies=latencies)

    @staticmethod
    def _fill(batch: Any, running: dict[int, tuple[int, int, list[int]]]) -> dict[int, int]:
        """Lay out the new tokens of every sequence; return the row of the last token of each sequence."""
        row, last = 0, {}
        for place, (_, position, new) in running.items():
            for offset, token in enumerate(new):
                batch.token[row], batch.pos[row] = token, position + offset
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, place
                batch.logits[row] = offset == len(new) - 1
                row += 1
            last[place] = row - 1
        batch.n_tokens = row
        return last


def openvino_speculative(workload: Workload, models: Path | None) -> Run:
    """Make a run of OpenVINO GenAI with the draft model."""
    return OpenVino(workload, models, drafts=True)


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        make: makes a run from the workload and the folder of exported models; raises ``ConfigError`` if the library
            is not installed or the models are missing.
        drafts: whether it takes a number of draft tokens.

    """

    make: Callable[[Workload, Path | None], Run]
    drafts: bool = False


PEERS = {
    "transformers-continuous": Peer(transformers_continuous),
    "openvino": Peer(OpenVino),
    "openvino-speculative": Peer(openvino_speculative, drafts=True),
    "llama.cpp": Peer(LlamaCpp),
}


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{module} is not installed; pip install '.[peers]', or leave this method out.")


def _exported(models: Path | None, name: str) -> Path:
    if models is None or not (models / name).exists():
        raise ConfigError(
            f"--peer-models {models}: there is no {name} in it; python -m bench.export_pair writes it, or says how."
        )
    return models / name

"""The formats by name, and which of them a chat template shows."""

from __future__ import annotations

import re

from specdec_fast.server.tool_calls.formats.base import ToolFormat
from specdec_fast.server.tool_calls.formats.harmony import HarmonyFormat
from specdec_fast.server.tool_calls.formats.json_calls import (
    HermesFormat,
    LlamaFormat,
    MistralArgumentsFormat,
    MistralFormat,
)
from specdec_fast.server.tool_calls.formats.sections import DeepSeekV3Format, DeepSeekV31Format, KimiFormat
from specdec_fast.server.tool_calls.formats.tagged import (
    DeepSeekV4Format,
    DeepSeekV32Format,
    Glm47Format,
    GlmFormat,
    MiniMaxFormat,
    QwenCoderFormat,
)

# The names are vLLM's.
FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": HermesFormat,
    "qwen3": HermesFormat,
    "qwen3_coder": QwenCoderFormat,
    "qwen3_xml": QwenCoderFormat,
    "glm45": GlmFormat,
    "glm47": Glm47Format,
    "deepseek_v3": DeepSeekV3Format,
    "deepseek_v31": DeepSeekV31Format,
    "deepseek_v32": DeepSeekV32Format,
    "deepseek_v4": DeepSeekV4Format,
    "kimi_k2": KimiFormat,
    "minimax_m2": MiniMaxFormat,
    "llama3_json": LlamaFormat,
    "mistral": MistralFormat,
    "mistral_args": MistralArgumentsFormat,
    "openai": HarmonyFormat,
}
# What a chat template says when its model writes calls in a format; the first that is found. Some templates of DeepSeek
# write calls and show no tools; the model then does not know what it may call.
_IN_TEMPLATES = (
    (r"<\|channel\|>", "openai"),
    (r"\[ARGS\]", "mistral_args"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"DSML｜[\s\S]*function_calls>", "deepseek_v32"),
    (r"DSML｜[\s\S]*tool_calls>", "deepseek_v4"),
    (r"\A(?=[\s\S]*\btools\b)(?=[\s\S]*<｜tool▁sep｜>)[\s\S]*```json", "deepseek_v3"),
    (r"\A(?=[\s\S]*\btools\b)[\s\S]*<｜tool▁sep｜>", "deepseek_v31"),
    (r"<\|tool_call_argument_begin\|>", "kimi_k2"),
    (r"<minimax:tool_call>", "minimax_m2"),
    (r"<tool_call>[\s\S]*<function=", "qwen3_coder"),
    (r"</arg_key><arg_value>", "glm47"),
    (r"<arg_key>[\s\S]*<arg_value>", "glm45"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*\"parameters\"", "llama3_json"),
)


def format_of_template(chat_template: str | None) -> ToolFormat | None:
    """Return the format that a chat template shows; None if it shows none that is known."""
    for pattern, name in _IN_TEMPLATES:
        if re.search(pattern, chat_template or ""):
            return FORMATS[name]()
    return None

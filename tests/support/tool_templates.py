"""Minimal chat templates: they write an assistant's message with calls as the published templates of models do."""

from __future__ import annotations

import json
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

_QWEN = """{{- message.content }}
{%- for call in message.tool_calls %}
    {%- set call = call.function %}
    {{- ('' if loop.first and not message.content else '\\n') + '<tool_call>\\n<function=' + call.name + '>\\n' }}
    {%- for name, value in call.arguments|items %}
        {{- '<parameter=' + name + '>\\n' }}
        {{- VALUE }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}"""
_GLM45 = """{{ message.content }}
{%- for call in message.tool_calls %}
{%- set call = call.function %}
{{ '\\n<tool_call>' + call.name }}
{% for name, value in call.arguments.items() %}
<arg_key>{{ name }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor %}"""
_GLM47 = """{{ message.content }}
{%- for call in message.tool_calls %}
{%- set call = call.function %}
{{- '<tool_call>' + call.name -}}
{% for name, value in call.arguments.items() %}
<arg_key>{{ name }}</arg_key><arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}"""
_DEEPSEEK_V3 = """{{- message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
    {{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
    {{- '\\n```json\\n' + call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}{# tools #}"""
_DEEPSEEK_V31 = """{{- message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
    {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson }}
    {{- '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}{# tools #}"""
_DSML = """{%- set dsml = '｜DSML｜' %}
{{- message.content + '\\n\\n' }}<{{ dsml }}SECTION>
{%- for call in message.tool_calls %}
{{ '\\n' }}<{{ dsml }}invoke name="{{ call.function.name }}">{{ '\\n' }}
{%- for name, value in call.function.arguments.items() %}
    {%- set is_text = 'true' if value is string else 'false' -%}
    <{{ dsml }}parameter name="{{ name }}" string="{{ is_text }}">
    {{- value if value is string else value | tojson }}</{{ dsml }}parameter>{{ '\\n' }}
{%- endfor -%}
</{{ dsml }}invoke>
{%- endfor %}
{{ '\\n' }}</{{ dsml }}SECTION>"""
_KIMI = """{{- message.content -}}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>"""
_MINIMAX = """{{- message.content + '\\n<minimax:tool_call>\\n' }}
{%- for call in message.tool_calls -%}
    {{- '<invoke name="' + call.function.name + '">\\n' }}
    {%- for name, value in call.function.arguments.items() %}
    {{- '<parameter name="' + name + '">' }}
    {{- value | tojson if value is not string else value }}
    {{- '</parameter>\\n' }}
    {%- endfor %}
    {{- '</invoke>\\n' }}
{%- endfor -%}
{{- '</minimax:tool_call>' }}"""
TEMPLATES = {
    # The first template of Qwen3-Coder writes Python's text of numbers and booleans, later ones JSON.
    "qwen3_coder": _QWEN.replace(
        "VALUE",
        "value | tojson if value is mapping or (value is sequence and value is not string) else value | string",
    ),
    "qwen3_xml": _QWEN.replace("VALUE", "value | string if value is string else value | tojson"),
    "glm45": _GLM45,
    "glm47": _GLM47,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DSML.replace("SECTION", "function_calls"),
    "deepseek_v4": _DSML.replace("SECTION", "tool_calls"),
    "kimi_k2": _KIMI,
    "minimax_m2": _MINIMAX,
}


def written(name: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """Return what the template of a format writes for a message with calls."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    tool_calls = [
        {"id": f"functions.{function}:{index}", "type": "function", "function": {"name": function, "arguments": each}}
        for index, (function, each) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return environment.from_string(TEMPLATES[name]).render(message=message)

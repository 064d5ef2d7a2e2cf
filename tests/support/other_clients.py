"""Clients that other people write, against a running server: ``python other_clients.py URL KEY``.

It runs in an environment of their own (``make test-clients``), so it imports nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Describe an egg."}]
LIMITS = {"temperature": 0, "max_tokens": 300}


class Egg(BaseModel):
    """An egg."""

    size: Literal["S", "M", "L"]
    fresh: bool


def with_openai(url: str, key: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key=key)
    parsed = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Egg, **LIMITS)
    assert isinstance(parsed.choices[0].message.parsed, Egg)
    tool = openai.pydantic_function_tool(Egg)
    options = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(model="demo", messages=MESSAGES, **options, **LIMITS)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Egg)
    with client.chat.completions.stream(model="demo", messages=MESSAGES, **options, **LIMITS) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert Egg.model_validate_json(call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


def with_instructor(url: str, key: str) -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=key), mode=mode)
        egg = client.chat.completions.create(
            model="demo", messages=MESSAGES, response_model=Egg, max_retries=0, **LIMITS
        )
        assert isinstance(egg, Egg)


def with_litellm(url: str, key: str) -> None:
    import litellm

    options = {"model": "hosted_vllm/demo", "api_base": url, "api_key": key, "messages": MESSAGES, **LIMITS}
    answer = litellm.completion(response_format=Egg, **options)
    assert Egg.model_validate_json(answer.choices[0].message.content)
    function = {"name": "egg", "parameters": Egg.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    choice = {"type": "function", "function": {"name": "egg"}}
    answer = litellm.completion(tools=tools, tool_choice=choice, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert Egg.model_validate_json(call.function.arguments)


def with_langchain(url: str, key: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key=key, model="demo", **LIMITS)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Egg, method=method).invoke("Describe an egg."), Egg)
    found = model.bind_tools([Egg], tool_choice="required").invoke("Describe an egg.")
    assert found.tool_calls[0]["name"] == "Egg"
    assert Egg.model_validate(found.tool_calls[0]["args"])


def main() -> None:
    """Try every client; print the failures as JSON, by client."""
    failures = {}
    for try_client in (with_openai, with_instructor, with_litellm, with_langchain):
        try:
            try_client(*sys.argv[1:3])
        except Exception as error:
            failures[try_client.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(failures))


if __name__ == "__main__":
    main()

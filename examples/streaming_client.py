"""Stream several answers at once from ``specdec-fast serve``, with the ``openai`` client.

``python examples/streaming_client.py --url http://127.0.0.1:8000/v1`` after starting a server (``examples/README.md``).
Only the URL differs from a client of OpenAI's own service.
"""

import argparse
import asyncio

from openai import AsyncOpenAI

PROMPTS = ["One day, a little bird", "Count from 3 to 9: 3,", "Items: owl, hen, fox.\nSorted:"]


async def read(client: AsyncOpenAI, model: str, prompt: str) -> str:
    """Print the text of one answer as it comes, and return it whole."""
    text = ""
    chunks = await client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, stream=True)
    async for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].text
            print(f"[{prompt[:12]}...] {chunk.choices[0].text!r}")
    return text


async def read_all(url: str, api_key: str) -> list[str]:
    """Return the answers to all prompts; the server decodes them in one batch."""
    async with AsyncOpenAI(base_url=url, api_key=api_key) as client:
        model = (await client.models.list()).data[0].id
        return await asyncio.gather(*(read(client, model, prompt) for prompt in PROMPTS))


def main(argv: list[str] | None = None) -> list[str]:
    """Return the answers to all prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(argv)
    return asyncio.run(read_all(args.url, args.api_key))


if __name__ == "__main__":
    for prompt, answer in zip(PROMPTS, main(), strict=True):
        print(f"---\n{prompt}{answer}")

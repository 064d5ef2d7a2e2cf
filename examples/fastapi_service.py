"""A FastAPI service with routes of its own over one engine: ``python examples/fastapi_service.py``.

``POST /continue`` streams a plain text. ``POST /best`` samples several continuations and returns the likeliest.
``/openai/v1`` answers OpenAI's API from the same engine, so the requests of all routes are decoded in one batch. All
routes show errors alike.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.server.app import create_app
from specdec_fast.server.problems import problem_of


class Prompt(BaseModel):
    """The body of a request."""

    prompt: str
    max_new_tokens: int = Field(40, ge=1, le=200)
    num_samples: int = Field(4, ge=1, le=16)


def make_service(engine: sd.AsyncEngine) -> FastAPI:
    """Return the service; it closes the engine when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close(finish_within=10)

    service = FastAPI(title="stories", lifespan=lifespan)
    service.mount("/openai", create_app(engine, model_names=["demo"]))

    @service.exception_handler(sd.SpecDecError)
    async def show_error(_: Request, error: Exception) -> JSONResponse:
        problem = problem_of(error)  # 400, 429, 503, ... and a message that a client may see
        if problem.status == 500:
            logging.getLogger("uvicorn.error").error("a request failed", exc_info=error)
        return JSONResponse(problem.body(), problem.status)

    @service.post("/continue")
    async def continue_text(body: Prompt) -> StreamingResponse:
        stream = engine.stream(body.prompt, sd.SamplingParams(max_new_tokens=body.max_new_tokens))
        first = await anext(stream)  # raises what is wrong with the request, while the response can have its status
        if first.error is not None:
            raise first.error

        async def texts() -> AsyncIterator[str]:
            yield first.text
            async for chunk in stream:  # a client that leaves ends this loop, which cancels the request
                if chunk.error is not None:
                    raise chunk.error  # breaks off the response, so that no client takes a part for the whole
                yield chunk.text

        return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")

    @service.post("/best")
    async def best(body: Prompt) -> dict[str, str | float]:
        samples = [
            sd.SamplingParams(max_new_tokens=body.max_new_tokens, temperature=0.8, seed=seed, logprobs=True)
            for seed in range(body.num_samples)
        ]
        outputs = await asyncio.gather(*(engine.generate(body.prompt, params) for params in samples))
        scores = [sum(output.raise_for_error().logprobs) / len(output.logprobs) for output in outputs]
        winner = max(range(len(outputs)), key=scores.__getitem__)
        return {"text": outputs[winner].text, "mean_logprob": scores[winner]}

    return service


def make_engine() -> sd.AsyncEngine:
    """Return an engine of the bundled pair."""
    return sd.AsyncEngine(str(demo_pair() / "target"), str(demo_pair() / "draft"), max_batch_size=8)


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(make_service(make_engine()), port=parser.parse_args().port)

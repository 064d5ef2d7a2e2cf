"""Ray Serve: an AsyncEngine in every replica, with OpenAI's API over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from ray import serve

from specdec_fast.config import EngineConfig
from specdec_fast.errors import EngineClosedError, EngineOverloadedError
from specdec_fast.results import GenerationOutput, StreamChunk
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.server.app import create_app
from specdec_fast.service import AsyncEngine

if TYPE_CHECKING:
    from fastapi import FastAPI

# Requests that Ray Serve may send to a replica at once; its own default, 5, would keep batches small. Those that do not
# fit into the engine's window wait in the engine (``max_waiting``).
_MAX_ONGOING_REQUESTS = 256


@serve.deployment(max_ongoing_requests=_MAX_ONGOING_REQUESTS)
@serve.ingress()
class EngineDeployment:
    """A Ray Serve deployment: ``serve.run(EngineDeployment.options(num_replicas=2).bind(target, draft))``.

    Over HTTP it answers OpenAI's API, as ``create_app`` does. Handles have ``generate`` and, with
    ``handle.options(stream=True)``, ``stream``. A replica accepts requests when its engine is warm. When Ray Serve
    stops it, running requests go on for ``graceful_shutdown_timeout_s`` (an option of the deployment).

    Args:
        target: a name or folder, as for ``AsyncEngine``; replicas load it themselves.
        draft: a name or folder, the name of a drafter, or None, as for ``AsyncEngine``.
        config: as for ``AsyncEngine``.
        app_options: keywords of ``create_app``, such as ``model_names`` and ``api_key``.
        **keywords: keywords of ``AsyncEngine``: its limits, and fields of the config.

    Raises:
        SpecDecError: what ``AsyncEngine`` and ``create_app`` raise; Ray Serve then reports that the deployment failed.
    """

    def __init__(
        self,
        target: str | PathLike[str],
        draft: str | PathLike[str] | None,
        config: EngineConfig | None = None,
        *,
        app_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.engine = AsyncEngine(target, draft, config, **keywords)
        self._app_options = dict(app_options or {})

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.engine, **self._app_options)

    async def generate(self, prompt: Any, params: Any = None, **options: Any) -> GenerationOutput:
        """Decode one prompt, for a handle; arguments and errors are those of ``AsyncEngine.generate``."""
        return await self.engine.generate(prompt, params, **options)

    async def stream(self, prompt: Any, params: Any = None, **options: Any) -> AsyncIterator[StreamChunk]:
        """Decode one prompt and yield its chunks, for a handle; a caller that stops reading cancels the request."""
        chunks = self.engine.stream(prompt, params, **options)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    async def check_health(self) -> None:
        """Raise if the engine is closed, or if it is idle and cannot decode a token; Ray Serve then replaces it."""
        if self.engine.is_closed:
            raise EngineClosedError("the engine of this replica has been closed.")
        if self.engine.failure is not None:
            raise self.engine.failure
        stats = self.engine.stats()
        if stats.num_running or stats.num_waiting:
            return  # a token would have to wait for the others, perhaps for longer than the check may take
        try:
            output = await self.engine.generate([0], SamplingParams(max_new_tokens=1, ignore_eos=True))
        except EngineOverloadedError:
            return
        output.raise_for_error()

    async def __del__(self) -> None:
        """Close the engine; Ray Serve calls this when the requests have ended, or their time has."""
        if hasattr(self, "engine"):
            await self.engine.close()

"""The HTTP interface of a detector: ``/score``, ``/heatmap`` and ``/health``; all errors are JSON of one line."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lit_fedad import __version__
from lit_fedad.serving.detector import ServedDetector, Verdict
from lit_fedad.serving.uploads import Limits, RefusedError, image_format, read_upload

_AGAIN_S = "1"  # seconds after which a refused client may try again


class Desk:
    """Lets a bounded number of requests in, and has a bounded number of them scored at a time.

    A place is taken before an upload is read, so that memory is bounded too.

    Args:
        detector: Scores the images.
        limits: Of each upload.
        workers: Images that are scored at a time.
        queue: Requests that may wait beside them.
    """

    def __init__(self, detector: ServedDetector, limits: Limits, workers: int, queue: int) -> None:
        self.detector = detector
        self.limits = limits
        self.places = workers + queue
        self.present = self.scored = self.refused = 0
        self._workers = CapacityLimiter(workers)

    async def score(self, request: Request, draw: bool) -> tuple[Verdict, bytes | None]:
        """Reads and scores an upload.

        Args:
            request: Its body is the file of an image.
            draw: Whether to draw its heatmap.

        Returns:
            The verdict, and the heatmap as a PNG file.

        Raises:
            RefusedError: If there is no place, the upload is too large or slow, or is no image.
        """
        async with self._place():
            form = image_format(request.headers.get("content-type"))
            if draw and not self.detector.localises:
                raise RefusedError(422, "this detector draws no heatmaps")
            content = await self._body(request)
            # A thread that has begun ends, even if whoever asked has gone: its place is not free before.
            return await run_sync(self._work, content, form, draw, limiter=self._workers)

    def _work(self, content: bytes, form: str, draw: bool) -> tuple[Verdict, bytes | None]:
        verdict = self.detector(read_upload(content, form, self.limits.pixels))
        self.scored += 1
        return verdict, self.detector.heatmap(verdict) if draw else None

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self.present >= self.places:
            raise RefusedError(503, f"busy with {self.present} images; try again")
        self.present += 1
        try:
            yield
        finally:
            self.present -= 1

    async def _body(self, request: Request) -> bytes:
        most = self.limits.bytes
        too_large = RefusedError(413, f"the upload is larger than {most} bytes")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.patience):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            raise RefusedError(
                408, f"the upload did not arrive within {self.limits.patience:g} seconds"
            ) from None
        except ClientDisconnect:
            raise RefusedError(400, "the upload ended before its end") from None
        return bytes(content)


def application(desk: Desk) -> FastAPI:
    """Builds the HTTP interface.

    Args:
        desk: Lets requests in and answers them.

    Returns:
        An ASGI application. Its schema is at ``/openapi.json``; pages that would load scripts from elsewhere are off.
    """
    app = FastAPI(title="lit_fedad", version=__version__, docs_url=None, redoc_url=None)
    upload: dict[str, Any] = {
        "requestBody": {
            "required": True,
            "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
        }
    }

    @app.post("/score", openapi_extra=upload)
    async def score(request: Request, heatmap: bool = False) -> dict[str, Any]:
        """Scores the image in the body; with ``heatmap=true`` the answer holds a PNG file in base64."""
        verdict, drawn = await desk.score(request, draw=heatmap)
        return verdict.words | ({"heatmap": b64encode(drawn).decode()} if drawn else {})

    @app.post("/heatmap", openapi_extra=upload, response_class=Response)
    async def heatmap(request: Request) -> Response:
        """Draws the heatmap of the image in the body."""
        return Response((await desk.score(request, draw=True))[1], media_type="image/png")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Tells that the detector answers, which one it is, and what it has done."""
        sheet = desk.detector.sheet
        return {
            "status": "ok",
            "detector": sheet.name,
            "alpha": sheet.alpha,
            "threshold": sheet.threshold,
            "scored": desk.scored,
            "refused": desk.refused,
            "present": desk.present,
        }

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        desk.refused += 1
        more = {"Retry-After": _AGAIN_S} if error.status == 503 else None
        return JSONResponse({"error": " ".join(error.reason.split())}, error.status, more)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        known = "POST /score, POST /heatmap and GET /health"
        return JSONResponse({"error": f"{error.detail}: this answers {known}"}, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(error).__name__}; the server's log has more"}, 500)

    return app

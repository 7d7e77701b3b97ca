"""``lit-fedad serve``: finds an exported detector, and answers HTTP requests with it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from lit_fedad import __version__
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.connections import PatientProtocol
from lit_fedad.deployment.exported import find_exported
from lit_fedad.deployment.served_detector import ServedDetector, Verdict
from lit_fedad.deployment.uploads import Limits, RefusedError, file_in, read_upload
from lit_fedad.report.console import Display

_PAGE = Path(__file__).parent / "serving.html"
_MAX_PATH = 100  # characters of a request's path in its line: a stranger's may have thousands
_RETRY_AFTER_S = "1"  # seconds after which a refused client may try again


class Desk:
    """Lets a bounded number of requests in, and has a bounded number of them scored at a time.

    A place is taken before an upload is read, so that memory is bounded too.

    Args:
        detector: Scores the images.
        limits: Limits of each upload.
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
            request: Its body is the file of an image, or a form with one.
            draw: Whether to draw its heatmap.

        Returns:
            The verdict, and the heatmap as a PNG file.

        Raises:
            RefusedError: If there is no place, the upload is too large or slow, or is no image.
        """
        async with self._place():
            if draw and not self.detector.localises:
                raise RefusedError(422, "this detector draws no heatmaps")
            content = file_in(await self._body(request), request.headers.get("content-type", ""))
            try:
                # A thread that has begun runs to its end even if the client has gone: its place is free only then.
                return await run_sync(self._work, content, draw, limiter=self._workers)
            except asyncio.CancelledError:  # the server was told to end, and `_LAST_S` have passed
                raise RefusedError(503, "the server ends; send the image again") from None

    def _work(self, content: bytes, draw: bool) -> tuple[Verdict, bytes | None]:
        image = read_upload(content, self.limits.max_pixels, self.detector.page)
        try:
            verdict = self.detector(image)
        except UserError as error:  # of a shape that the detector's geometry does not take
            raise RefusedError(422, str(error)) from error
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
        max_bytes = self.limits.max_bytes
        too_large = RefusedError(413, f"the upload is larger than {max_bytes} bytes")
        if int(request.headers.get("content-length", 0)) > max_bytes:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.patience):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > max_bytes:
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
        An ASGI application with a page to try it at ``/`` and its schema at ``/openapi.json``, which ``/docs`` shows;
        FastAPI's own pages would load scripts from elsewhere.
    """
    app = FastAPI(title="lit_fedad", version=__version__, docs_url=None, redoc_url=None)
    upload: dict[str, Any] = {
        "requestBody": {
            "required": True,
            "content": {
                "image/*": {"schema": {"type": "string", "format": "binary"}},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {"file": {"type": "string", "format": "binary"}},
                    }
                },
            },
        }
    }

    @app.post("/score", openapi_extra=upload)
    async def score(request: Request, heatmap: bool = False) -> dict[str, Any]:
        """Scores the image in the body; with heatmap=true the answer holds a PNG file in base64."""
        verdict, drawn = await desk.score(request, draw=heatmap)
        return verdict.words | ({"heatmap": b64encode(drawn).decode()} if drawn else {})

    @app.post("/heatmap", openapi_extra=upload, response_class=Response)
    async def heatmap(request: Request) -> Response:
        """Draws the heatmap of the image in the body."""
        return Response((await desk.score(request, draw=True))[1], media_type="image/png")

    # HEAD is what many proxies and probes ask of a page to learn whether it is there.
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    @app.head("/docs", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    @app.head("/health", include_in_schema=False)
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
        headers = {"Retry-After": _RETRY_AFTER_S} if error.status == 503 else None
        return JSONResponse({"error": " ".join(error.reason.split())}, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        routes = "GET / (a page to try), POST /score, POST /heatmap and GET /health"
        return JSONResponse({"error": f"{error.detail}: this answers {routes}"}, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(error).__name__}; the server's log has more"}, 500)

    return app


class Logged:
    """An application that prints a line for each request: method, path, status and milliseconds.

    Args:
        app: The application.
        display: Prints the lines.
    """

    def __init__(self, app: ASGIApp, display: Display) -> None:
        self.app, self.display = app, display

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and prints its line when the answer begins."""
        began = time.perf_counter()

        async def send_and_log(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                duration = f"{1000 * (time.perf_counter() - began):.0f} ms"
                request = f"{scope['method']} {scope['path'][:_MAX_PATH]}"
                self.display.note(f"{time.strftime('%H:%M:%S')}  {request}  {message['status']}  {duration}")
            await send(message)

        await self.app(scope, receive, send_and_log)


_IDLE_S = 5  # seconds that an idle connection is kept open
_LAST_S = 6  # seconds in which requests that have arrived are answered when the server is told to end


def serve(
    run: str,
    display: Display,
    client: int | str | None = None,
    version: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    workers: int = 1,
    queue: int = 16,
    threads: int | None = None,
    *,
    limits: Limits,
) -> None:
    """Answers HTTP requests with score, p-value, decision and heatmap of an image, until it is ended.

    Args:
        run: MLflow run id, folder of a run, folder that ``lit-fedad export`` wrote, or ``models:/NAME@ALIAS``.
        display: Shows the address.
        client: Whose exported detector answers; may be left out where only one was exported.
        version: Number of the detector's version: 0 as it was trained, None for the default.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        workers: Images that are scored at a time.
        queue: Requests that may wait beside them; others are told to try again.
        threads: Threads that compute one image; None to share the cores among the workers.
        limits: What one request may cost.

    Raises:
        UserError: If there is no such exported detector, a file of it was changed, or the address cannot be used.
    """
    positive_limits = {"max_bytes": limits.max_bytes, "max_pixels": limits.max_pixels}
    at_least("serve", 1, workers=workers, threads=threads, **positive_limits)
    at_least("serve", 0, queue=queue)
    within("serve", 0, 65535, port=port)
    above("serve", 0, patience=limits.patience)
    folder = find_exported(run, client, version)
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    detector = ServedDetector(folder, threads)
    listener = _listen(host, port)
    address = f"http://{_host(host)}:{listener.getsockname()[1]}"
    if not _is_loopback(host):
        display.warn(f"{address} answers whoever reaches it, without password or TLS: put a proxy before it")
    display.where_next(
        [
            ("detector", f"{detector.sheet.name} ({folder})"),
            ("page", f"{address}/ (an image to try, and all requests)"),
            ("score", f"curl -F file=@IMAGE.png {address}/score"),
            ("end", "Ctrl-C"),
        ]
    )
    server = uvicorn.Server(
        uvicorn.Config(
            Logged(application(Desk(detector, limits, workers, queue)), display),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            http=PatientProtocol,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_LAST_S,
        )
    )
    with listener, suppress(KeyboardInterrupt):  # only a signal ends the server, which is no error
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"host={host} port={port}: cannot be listened on ({error}); give another port, or 0 for a free one"
        ) from error


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

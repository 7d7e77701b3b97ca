"""``lit-fedad serve``: finds an exported detector, and answers HTTP requests with it."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

import uvicorn

from lit_fedad.deployment.exported import find_exported
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import above, at_least
from lit_fedad.report.console import Display
from lit_fedad.serving.application import Desk, application
from lit_fedad.serving.detector import ServedDetector
from lit_fedad.serving.uploads import Limits

_CONNECTIONS = 256  # beside those that are let in: idle ones, and those that are told to try again
_IDLE_S = 5


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``lit-fedad serve``.

    Attributes:
        run: MLflow run id, folder of a run, folder that ``lit-fedad export`` wrote, or ``models:/NAME@ALIAS``.
        client: Whose exported detector answers; may be left out where only one was exported.
        version: Number of the detector's version: 0 as it was trained, None for the newest.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        workers: Images that are scored at a time.
        queue: Requests that may wait beside them; others are told to try again.
        threads: Threads that compute one image; None to share the cores among the workers.
        max_bytes: Largest upload.
        max_pixels: Largest image, width times height.
        patience: Longest time in seconds that an upload may take to arrive.
    """

    run: str
    client: int | str | None = None
    version: int | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    queue: int = 16
    threads: int | None = None
    max_bytes: int = 20_000_000
    max_pixels: int = 25_000_000
    patience: float = 30.0

    def __post_init__(self) -> None:
        at_least("serve", 1, workers=self.workers, max_bytes=self.max_bytes, max_pixels=self.max_pixels)
        at_least("serve", 0, queue=self.queue, port=self.port)
        above("serve", 0, patience=self.patience)
        if self.threads is not None:
            at_least("serve", 1, threads=self.threads)


def serve(options: ServeOptions, display: Display) -> None:
    """Answers HTTP requests until it is ended.

    Args:
        options: Options of the command.
        display: Shows the address.

    Raises:
        UserError: If there is no such exported detector, a file of it was changed, or the address cannot be used.
    """
    folder = find_exported(options.run, options.client, options.version)
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.workers)
    detector = ServedDetector(folder, threads)
    limits = Limits(options.max_bytes, options.max_pixels, options.patience)
    listener = _listen(options.host, options.port)
    address = f"http://{_host(options.host)}:{listener.getsockname()[1]}"
    if not _is_loopback(options.host):
        display.warn(f"{address} answers whoever reaches it, without password or TLS: put a proxy before it")
    display.where_next(
        [
            ("detector", f"{detector.sheet.name} ({folder})"),
            ("health", f"{address}/health"),
            ("score", f"curl --data-binary @IMAGE.png -H 'Content-Type: image/png' {address}/score"),
        ]
    )
    server = uvicorn.Server(
        uvicorn.Config(
            application(Desk(detector, limits, options.workers, options.queue)),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=_CONNECTIONS + options.workers + options.queue,
            timeout_keep_alive=_IDLE_S,
        )
    )
    with listener:
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

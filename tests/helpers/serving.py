"""A detector behind HTTP on a free port of loopback."""

import socket
import threading
from contextlib import contextmanager

import uvicorn

from lit_fedad.deployment.serving import application


@contextmanager
def served(desk):
    """Serves; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(desk), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

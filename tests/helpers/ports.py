"""Ports of loopback."""

import socket


def free_ports() -> tuple[int, int]:
    """Finds two ports that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]

"""The toy federation of these tests."""

from helpers.toy_federation import toy, toy_server

__all__ = ["toy", "toy_server"]

"""Fixtures for FedVCK: data of two clients, and a short federation."""

import pytest
from helpers.fedvck import CLIENT, SERVER, loader, make

from lit_fedad.methods.fedvck import FedVCKClient, FedVCKServer


@pytest.fixture
def data():
    """Client 0 owns classes 0 and 1, client 1 classes 1, 2 and 3; of client 0's class 2 there is one image."""
    return {
        0: loader([0, 1, 0, 1, 1, 2, 1, 0, 1], 0),
        1: loader([2, 1, 3, 2, 2, 1, 3, 2, 3, 2, 2], 1),
    }


@pytest.fixture
def fedvck(federate, data):
    """Plays FedVCK on two clients, in a few steps."""

    def play(client=None, server=None, **settings):
        client, server = {**CLIENT, **(client or {})}, {**SERVER, **(server or {})}
        settings = {"task": make(), "data": data, "rounds": 2, **settings}
        return federate(FedVCKClient, FedVCKServer, client=client, server=server, **settings)

    return play

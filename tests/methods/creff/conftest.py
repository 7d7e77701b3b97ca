"""Fixtures for CReFF: data of three clients, and a short federation."""

import pytest
from helpers.creff import QUICK, images, make

from lit_fedad.methods.creff import (
    CReFFClient,
    CReFFServer,
)


@pytest.fixture
def data():
    """Client 0 holds classes 0, 1 and 3, client 1 only 1, client 2 classes 1 and 2."""
    return {0: images([0, 1, 3, 0, 1, 0], 0), 1: images([1, 1, 1, 1], 1), 2: images([2, 1, 2, 2, 2], 2)}


@pytest.fixture
def creff(federate, data):
    """Plays CReFF on the three clients, with a quick server."""

    def play(client=None, **settings):
        client = {"draws": 2, **(client or {})}
        settings = {
            "client": client,
            "task": make(),
            "data": data,
            "server": QUICK,
            "shuffle": True,
            **settings,
        }
        return federate(CReFFClient, CReFFServer, **settings)

    return play

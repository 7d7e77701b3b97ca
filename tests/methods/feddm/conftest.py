"""Fixtures for FedDM: data of two clients, and a short federation."""

import pytest
from helpers.feddm import MEAN, STD, loader, make

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.methods.feddm import FedDMClient, FedDMServer


@pytest.fixture
def data():
    """Of client 0's class 2 there is one image, too few to own it."""
    return {0: loader([0, 1, 0, 1, 1, 2, 1, 0, 1], 0), 1: loader([2, 1, 2, 2, 2, 1, 2, 2, 2], 1)}


@pytest.fixture
def feddm(federate, data):
    """Plays FedDM on two clients, in a few steps."""

    def play(client=None, server=None, **settings):
        client = {
            "condensation": Condensation(2, batch=4),
            "init": "real",
            "mean": MEAN,
            "std": STD,
            "min_class_images": 2,
            "min_synthetic": 3,
        } | (client or {})
        server = {"training": CondensedTraining(2, 4)} | (server or {})
        settings = {"task": make(), "data": data, "rounds": 2, **settings}
        return federate(FedDMClient, FedDMServer, client=client, server=server, **settings)

    return play

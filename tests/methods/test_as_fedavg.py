"""Settings under which a method is FedAvg, number for number."""

import pytest
from helpers.feddm import DESA, loader, make

from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.desa import DESAClient, DESAServer
from lit_fedad.methods.dfrd import DFRDClient, DFRDServer
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.fedgan import FedGANClient
from lit_fedad.methods.fedgen import FedGenClient, FedGenServer
from lit_fedad.methods.fedmix import FedMixClient, FedMixServer
from lit_fedad.methods.fedphp import FedPHPClient
from lit_fedad.methods.fedprox import FedProxClient
from lit_fedad.methods.moon import MoonClient

GAN = {"image_size": 8, "latent": 4, "width": 4}


@pytest.mark.parametrize(
    ("kind", "client"),
    [
        (FedProxClient, {"mu": 0.0}),
        (MoonClient, {"mu": 0.0, "projection": 4}),
        (FedPHPClient, {"rounds": 3, "weight": 0.0}),
        (APFLClient, {"alpha": 0.0, "adaptive": False}),
        (APFLClient, {"alpha": 0.5}),
        (APFLClient, {"alpha": 1.0}),
    ],
)
def test_weights_of_methods_that_share_parameters(
    federate, make_classifier, make_points, exactly, kind, client
):
    """Those that are shared, whatever becomes of personal ones."""
    data = {number: make_points(4 + 2 * number, number) for number in range(2)}
    settings = {"data": data, "shuffle": True}
    client = {"local_epochs": 2, **client}
    ours = federate(kind, task=make_classifier(), client=client, **settings).server.weights
    plain = federate(FedAvgClient, task=make_classifier(), client={"local_epochs": 2}, **settings)
    exactly({name: ours[name] for name in plain.server.weights}, plain.server.weights)


@pytest.mark.parametrize(
    ("kind", "server_kind", "client", "server"),
    [
        (DESAClient, DESAServer, {**DESA, "anchor_weight": 0.0, "distillation": 0.0, "contrast": 0.0}, {}),
        (DFRDClient, DFRDServer, {}, {**GAN, "steps": 0}),
        (FedGANClient, FedAvgServer, {**GAN, "share": 0.0}, {}),
        (FedGenClient, FedGenServer, {"noise": 4, "hidden": 6, "weight": 0.0}, {}),
        (FedMixClient, FedMixServer, {"weight": 0.0}, {}),
    ],
)
def test_weights_of_methods_that_share_images(federate, exactly, kind, server_kind, client, server):
    data = {0: loader([0, 0, 0, 1, 1]), 1: loader([1, 2, 2, 2], seed=1)}
    settings = {"data": data, "shuffle": True, "rounds": 2}
    ours = federate(kind, server_kind, task=make(), client=client, server=server, **settings).server.weights
    plain = federate(FedAvgClient, task=make(), **settings)
    exactly({name: ours[name] for name in plain.server.weights}, plain.server.weights)

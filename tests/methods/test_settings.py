"""Settings of methods that are out of range are refused with their key."""

import pytest
from helpers.fedvck import make
from helpers.refusals import refusal

from lit_fedad.condensation.condense import Condensation
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.apple import AppleClient
from lit_fedad.methods.dbe import DBEClient
from lit_fedad.methods.desa import DESAClient
from lit_fedad.methods.dfrd import DFRDClient, DFRDServer
from lit_fedad.methods.ditto import DittoClient
from lit_fedad.methods.feddyn import FedDynClient
from lit_fedad.methods.fedgan import FedGANClient
from lit_fedad.methods.fedgen import FedGenClient, FedGenServer
from lit_fedad.methods.fedmix import FedMixClient
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.fedvck import FedVCKClient
from lit_fedad.methods.gldp import GLDPClient
from lit_fedad.methods.moon import MoonClient
from lit_fedad.methods.pfedme import PFedMeClient
from lit_fedad.methods.scaffold import ScaffoldClient, ScaffoldServer

CONDENSED = {"condensation": Condensation(1)}

CLIENTS = [
    (APFLClient, {}, {"alpha_learning_rate": -1.0, "alpha_decay": -1.0}),
    (AppleClient, {"rounds": 1}, {"early": -1.0, "relation_learning_rate": -1.0, "relation_momentum": 1.5}),
    (DBEClient, {}, {"kappa": -1.0}),
    (DESAClient, CONDENSED, {"anchors": 0, "own": -1.0, "temperature": 0.0, "soft": 1.5}),
    (DittoClient, {}, {"lam": -1.0}),
    (FedDynClient, {}, {"alpha": 0.0}),
    (FedGANClient, {"image_size": 16}, {"learning_rate": 0.0}),
    (FedGenClient, {}, {"weight": -1.0, "generated": 0}),
    (FedMixClient, {}, {"weight": 1.5, "group": 0}),
    (FedRepClient, {}, {"head_epochs": -1}),
    (FedVCKClient, {**CONDENSED, "init": "noise"}, {"prototype_images": 0}),
    (GLDPClient, {}, {"temperature": 0.0}),
    (MoonClient, {}, {"mu": -1.0}),
    (PFedMeClient, {}, {"lam": 0.0, "learning_rate": 0.0, "inner_steps": 0}),
]


@pytest.mark.parametrize(("kind", "usual", "settings"), CLIENTS)
def test_settings_of_clients(kind, usual, settings):
    for name, value in settings.items():
        with refusal(rf"method\.client\.{name}={value} must be"):
            kind(make(), **{**usual, name: value})


RATES = {"generator_rate": 0.0, "temperature": 0.0, "transfer": -1.0, "generator_steps": 0, "memory": 1.5}


@pytest.mark.parametrize(
    ("server", "client", "usual", "settings"),
    [
        (DFRDServer, DFRDClient, {"image_size": 16}, {"steps": -1, "batch_size": 1, **RATES}),
        (FedGenServer, FedGenClient, {}, {"steps": -1, "batch_size": 1, "learning_rate": 0.0}),
        (ScaffoldServer, ScaffoldClient, {}, {"learning_rate": 0.0}),
    ],
)
def test_settings_of_servers(server, client, usual, settings):
    for name, value in settings.items():
        with refusal(rf"method\.server\.{name}={value} must be"):
            server(client(make()), **{**usual, name: value})

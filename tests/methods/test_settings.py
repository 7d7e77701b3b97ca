"""Settings of methods that are out of range are refused with their key, and encoders that they cannot work with."""

import pytest
from helpers.fedvck import make
from helpers.frozen import frozen_encoder
from helpers.refusals import refusal

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.apple import AppleClient
from lit_fedad.methods.creff import CReFFClient, CReFFServer
from lit_fedad.methods.dbe import DBEClient
from lit_fedad.methods.desa import DESAClient
from lit_fedad.methods.dfrd import DFRDClient, DFRDServer
from lit_fedad.methods.ditto import DittoClient
from lit_fedad.methods.feddm import FedDMClient
from lit_fedad.methods.feddyn import FedDynClient
from lit_fedad.methods.fedgan import FedGANClient
from lit_fedad.methods.fedgen import FedGenClient, FedGenServer
from lit_fedad.methods.fedic import FEDICClient, FEDICServer
from lit_fedad.methods.fedmix import FedMixClient
from lit_fedad.methods.fedphp import FedPHPClient
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.fedvck import FedVCKClient, FedVCKServer
from lit_fedad.methods.gldp import GLDPClient
from lit_fedad.methods.moon import MoonClient
from lit_fedad.methods.pfedme import PFedMeClient
from lit_fedad.methods.scaffold import ScaffoldClient, ScaffoldServer
from lit_fedad.tasks.classifier import Classifier

ANCHORS = {"condensation": Condensation(1)}
CONDENSED = {**ANCHORS, "init": "noise"}
TRAINING = {"training": CondensedTraining(1)}

CLIENTS = [
    (APFLClient, {}, {"alpha": 1.5, "alpha_learning_rate": -1.0, "alpha_decay": -1.0}),
    (AppleClient, {"rounds": 1}, {"early": -1.0, "relation_learning_rate": -1.0, "relation_momentum": 1.0}),
    (CReFFClient, {}, {"draws": 0, "batch": 0}),
    (DBEClient, {}, {"kappa": -1.0, "momentum": 1.5}),
    (DESAClient, ANCHORS, {"anchors": 0, "anchor_weight": -1.0, "temperature": 0.0, "soft_share": 1.5}),
    (DittoClient, {}, {"lam": -1.0}),
    (FedDMClient, CONDENSED, {"share": 1.5, "min_synthetic": -1, "min_class_images": 0, "radius": -1.0}),
    (FedDynClient, {}, {"alpha": 0.0}),
    (FedGANClient, {"image_size": 16}, {"learning_rate": 0.0}),
    (FedGenClient, {}, {"weight": -1.0, "generated": 0}),
    (FedMixClient, {}, {"weight": 1.5, "group": 0}),
    (FedPHPClient, {"rounds": 1}, {"mu": 1.5, "weight": 1.5, "fraction": -0.5}),
    (FedRepClient, {}, {"head_epochs": -1}),
    (FedVCKClient, CONDENSED, {"prototype_images": 0, "alpha": 1.1, "bias": 51.0}),
    (GLDPClient, {}, {"temperature": 0.0, "lam": 1.5, "beta": -0.1}),
    (MoonClient, {}, {"mu": -1.0}),
    (PFedMeClient, {}, {"lam": 0.0, "learning_rate": 0.0, "inner_steps": 0}),
]


@pytest.mark.parametrize(("kind", "usual", "settings"), CLIENTS)
def test_settings_of_clients(kind, usual, settings):
    for name, value in settings.items():
        with refusal(rf"method\.client\.{name}={value} must be"):
            kind(make(), **{**usual, name: value})


def test_condensation_that_sends_no_image():
    with refusal("share=0 min_synthetic=0 sends no image"):
        FedDMClient(make(), **CONDENSED, share=0.0, min_synthetic=0)


RATES = {"generator_rate": 0.0, "temperature": 0.0, "transfer": -1.0, "generator_steps": 0, "memory": 1.5}
MATCHING = {"features_per_class": 0, "matching_steps": 0, "retraining_epochs": 0, "batch_size": 0}
CONTRAST = {"rounds_kept": 0, "contrast": -0.1, "negatives": 0, "head_width": 0, "head_rate": 0.0}
BATCHES = {"labelled_batch": 0, "auxiliary_batch": 0}


@pytest.mark.parametrize(
    ("server", "client", "given", "usual", "settings"),
    [
        (CReFFServer, CReFFClient, {}, {}, MATCHING),
        (DFRDServer, DFRDClient, {}, {"image_size": 16}, {"steps": -1, "batch_size": 1, **RATES}),
        (
            FEDICServer,
            FEDICClient,
            {},
            {},
            {"steps": -1, "learning_rate": 0.0, "temperature": 0.0, **BATCHES},
        ),
        (FedGenServer, FedGenClient, {}, {}, {"steps": -1, "batch_size": 1, "learning_rate": 0.0}),
        (FedVCKServer, FedVCKClient, CONDENSED, TRAINING, {"temperature": 0.0, **CONTRAST}),
        (ScaffoldServer, ScaffoldClient, {}, {}, {"learning_rate": 0.0}),
    ],
)
def test_settings_of_servers(server, client, given, usual, settings):
    for name, value in settings.items():
        with refusal(rf"method\.server\.{name}={value} must be"):
            server(client(make(), **given), **{**usual, name: value})


@pytest.mark.parametrize(
    ("kind", "usual"),
    [(DESAClient, ANCHORS), (DFRDClient, {}), (FedGANClient, {"image_size": 16}), (FedMixClient, {})],
)
def test_methods_that_make_or_change_images_refuse_frozen_features(kind, usual):
    with refusal("features=train"):
        kind(Classifier(frozen_encoder(), 3), **usual)

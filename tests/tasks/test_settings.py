"""Settings of tasks that are out of range are refused with their key, before anything is computed."""

import functools

import pytest
import torch
from helpers.frozen import frozen_encoder
from helpers.refusals import refusal
from helpers.tiny_pyramid import TinyPyramid

from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.models.convnets import ConvNet, Decoder
from lit_fedad.tasks.autoencoder import Autoencoder, FeatureAutoencoder
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import SimCLR
from lit_fedad.tasks.csi import CSI
from lit_fedad.tasks.deep_svdd import DeepSVDD
from lit_fedad.tasks.dinomaly import Dinomaly
from lit_fedad.tasks.efficient_ad import EfficientAD
from lit_fedad.tasks.elsa import Elsa
from lit_fedad.tasks.frozen_detectors import FeatureNeighbours, FeatureSVM
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.one_class_svm import OneClassSVM
from lit_fedad.tasks.padim import PaDiM
from lit_fedad.tasks.panda import Panda
from lit_fedad.tasks.reverse_distillation import ReverseDistillation
from lit_fedad.tasks.simplenet import SimpleNet
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale, NearestDistance, Softmin
from lit_fedad.tasks.subspace import Subspace

DECODER = functools.partial(Decoder, channels=16)
RATES = {"learning_rate": -1.0, "weight_decay": -1.0}
POSITIVE = {"learning_rate": 0.0, "weight_decay": -1.0}
SGD = {**RATES, "momentum": -1.0}
DIVERGES = {"momentum": 1.0}
PATCHES = {"backbone": TinyPyramid(), "grid": 4, "image_size": 32}
PIXELS = {"image_size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3, "decoder": DECODER}
VIEWS = {"encoder": frozen_encoder(), "views": ContrastiveViews(flip=0.0)}
WARMUP = {"warmup_loss": SimCLR(), "warmup": 1}
BANK = {"head": None, "loss": HingeLoss(), "score": NearestDistance(), "reduce": SlotReduce()}


@pytest.mark.parametrize(
    ("build", "usual", "settings"),
    [
        (FeatureAutoencoder, PATCHES, {"hidden": 0, "bottleneck": 0, "patches_per_image": 0, "learning_rate": -1.0}),
        (Autoencoder, {**PIXELS, "encoder": ConvNet(16, channels=4)}, {"learning_rate": -1.0}),
        (Classifier, {"encoder": frozen_encoder(), "classes": 2}, SGD),
        (Classifier, {"encoder": frozen_encoder(), "classes": 2}, DIVERGES),
        (
            Contrastive,
            {**VIEWS, **WARMUP, "loss": None, "rounds": 2},
            {**SGD, "clusters": 0, "normal_share": 0, "shrinkage": 1.5, "warmup": -1, "final_learning_rate": -1.0,
             "rounds": -1, "projection": 0},
        ),
        (
            Contrastive,
            {**VIEWS, **WARMUP, "loss": None, "rounds": 2},
            {**DIVERGES, "shrinkage": -0.1, "normal_share": 1.5},
        ),
        (CSI, {**VIEWS, "rounds": 2, "image_size": 16}, {**SGD, "rounds": -1, "warmup_rounds": -1, "mirror": 2.0}),
        (CSI, {**VIEWS, "rounds": 2, "image_size": 16}, DIVERGES),
        (
            Elsa,
            {**VIEWS, **WARMUP, "finetuning_views": ContrastiveViews()},
            {**SGD, "prototypes": 0, "temperature": 0, "warmup": -1, "finetuning_rate": -1.0},
        ),
        (Elsa, {**VIEWS, **WARMUP, "finetuning_views": ContrastiveViews()}, DIVERGES),
        (
            DeepSVDD,
            {**PIXELS, "encoder": ConvNet(16, channels=4), "rounds": 2},
            {**RATES, "width": 0, "hidden": 0, "nu": 0.0, "decay_after": 1.5, "rounds": -1, "radius_rounds": -1,
             "margin": -1.0},
        ),
        (
            OneClassSVM,
            {**PIXELS, "encoder": ConvNet(16, channels=4), "rounds": 2},
            {"rounds": -1, "svm_share": 1.5, "svm_learning_rate": -1.0, "nu": 0, "sigma": 0, "alpha": -1, "fourier": 0},
        ),
        (OneClassSVM, {**PIXELS, "encoder": ConvNet(16, channels=4), "rounds": 2}, {"nu": 1.5}),
        (
            Dinomaly,
            {"backbone": TinyPyramid(), "image_size": 32},
            {**POSITIVE, "groups": 0, "dropout": 1.5, "easy_share": 1.5, "easy_gradient": -1.0, "top": 0.0},
        ),
        (
            EfficientAD,
            PATCHES,
            {**POSITIVE, "width": 1, "latent": 1, "hard": 1.5, "low": -1.0, "high": 1.5},
        ),
        (ReverseDistillation, {"backbone": TinyPyramid()}, {"blocks": 0, "learning_rate": 0.0}),
        (
            SimpleNet,
            PATCHES,
            {**POSITIVE, "noise": 0.0, "margin": -1.0, "hidden": 0, "adaptor_rate": -1.0},
        ),
        (FeatureNeighbours, {"encoder": frozen_encoder()}, {"neighbours": 0}),
        (FeatureSVM, {"encoder": frozen_encoder()}, {"nu": 1.5, "gamma": 0.0}),
        (FeatureSVM, {"encoder": frozen_encoder()}, {"nu": 0}),
        (Panda, {"encoder": frozen_encoder(hidden=4)}, {**SGD, "neighbours": 0, "ewc": -1.0}),
        (Panda, {"encoder": frozen_encoder(hidden=4)}, DIVERGES),
        (PaDiM, PATCHES, {"channels": 0, "regularisation": 0.0}),
        (Subspace, PATCHES, {"share": 0.0, "clusters": -1, "rim": -1, "shrinkage": -1.0}),
        (
            MemoryBank,
            {**PATCHES, **BANK},
            {**RATES, "slots": 0, "patches_per_image": 0, "whiten": 0.0, "subspace": 1.5, "bank_weight": -1.0},
        ),
    ],
)  # fmt: skip
def test_settings_of_tasks(build, usual, settings):
    for name, value in settings.items():
        with refusal(rf"task\.{name}={value} must be"):
            build(**{**usual, name: value})


@pytest.mark.parametrize(
    ("build", "section", "settings"),
    [
        (SimCLR, "contrastive_loss", {"temperature": 0.0, "base_temperature": 0.0}),
        (HingeLoss, "task.loss", {"neighbours": 0, "threshold": -1.0, "repulsion": -1.0, "repelled": -1}),
        (Softmin, "task.score", {"neighbours": 0}),
        (LocalScale, "task.image_score", {"exponent": -1.0, "neighbours": 0, "grid": 0}),
    ],
)  # fmt: skip
def test_settings_of_their_parts(build, section, settings):
    for name, value in settings.items():
        with refusal(rf"{section}\.{name}={value} must be"):
            build(**{name: value})


def test_an_optimiser_that_diverges_or_that_torch_refuses():
    with refusal(r"task\.optimizer\.momentum=1\.0 must be"):
        MemoryBank(**PATCHES, **BANK, optimizer=functools.partial(torch.optim.SGD, momentum=1.0))
    with refusal(r"task\.optimizer: Invalid beta"):
        MemoryBank(**PATCHES, **BANK, optimizer=functools.partial(torch.optim.AdamW, betas=(0.9, 1.5)))


def test_quantiles_that_are_one_have_no_scale():
    with refusal(r"task\.low=0\.9 must be below task\.high=0\.9"):
        EfficientAD(**PATCHES, low=0.9, high=0.9)

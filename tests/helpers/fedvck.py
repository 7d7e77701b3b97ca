"""FedVCK's tasks, images and messages, small enough for tests."""

from functools import partial

import numpy as np
import torch

from helpers import feddm
from helpers.encoder import Encoder
from helpers.feddm import FABRIC, MEAN, STD
from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Update
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES, FedVCKClient, FedVCKServer
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 4, Encoder.num_features

CLIENT = {
    "condensation": Condensation(2, batch=4),
    "mean": MEAN,
    "std": STD,
    "share": 0.01,
    "min_synthetic": 3,
    "min_class_images": 2,
    "init": "noise",
}

SERVER = {"training": CondensedTraining(2, 4), "negatives": 2, "head_width": 4}

nearly = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)

loader = partial(feddm.loader, brighter=lambda image, k: image[:, :, 2 * k : 2 * k + 2])
"""Noise; an image of class k is brighter in its k-th quarter."""


def make(seed: int = 0) -> Classifier:
    """Its running statistics are not those of any batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task = Classifier(Encoder(), K)
        task.encoder.norm.running_mean.normal_()
        task.encoder.norm.running_var.uniform_(0.5, 2)
        return task


def upload(labels, seed: int = 0, size: int = 10) -> Update:
    """What a client might send: labels ascending, images and prototypes noise."""
    classes, counts = torch.tensor(labels, dtype=torch.int64).unique(return_counts=True)
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (len(labels), 3, 8, 8), generator=draw, dtype=torch.uint8)
    prototypes = torch.randn(len(classes), K, generator=draw)
    sizes = torch.full((len(classes),), size)
    message = {IMAGES: images, CLASSES: classes, COUNTS: counts, PROTOTYPES: prototypes, SIZES: sizes}
    return Update(message, size * len(classes))


def server_of(**settings) -> FedVCKServer:
    server = FedVCKServer(FedVCKClient(make(), **CLIENT), **{**SERVER, **settings})
    server.fabric = FABRIC
    return server


def piles_of(data, classes):
    """A client's images by class, in the data set's order."""
    rows = list(data.dataset)
    return [torch.stack([row["image"] for row in rows if row["label"] == c]) for c in classes]


def logits_of(state, images) -> np.ndarray:
    """In evaluation mode, in double precision."""
    task = make()
    task.load_state_dict(state)
    task.double().eval()
    with torch.no_grad():
        return task.classifier(task.encoder(images.double())).numpy()


# -------------------------------------------------------------------------------------------------- a client by hand


def features(weights, maps, centre, spread):
    """The encoder from its convolution on, under statistics."""
    centre, spread, gain, shift = (
        part.view(-1, 1, 1)
        for part in (centre, spread, weights["encoder.norm.weight"], weights["encoder.norm.bias"])
    )
    return (gain * (maps - centre) / (spread + 1e-5).sqrt() + shift).relu().mean((2, 3))

"""FedDM's tasks, images and messages, small enough for tests."""

from functools import partial

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from helpers.encoder import Encoder
from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context
from lit_fedad.methods.feddm import FedDMClient, FedDMServer
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 3, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
FABRIC = Fabric(accelerator="cpu", devices=1)

mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

DESA = {
    "mean": MEAN,
    "std": STD,
    "anchors": 2,
    "min_class_images": 2,
    "condensation": Condensation(2, batch=4),
}
"""Settings of a small DeSA client."""

nearly = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def make(encoder=Encoder, seed: int = 0) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(encoder(), K)


def loader(labels, seed: int = 0, side: int = 8, brighter=lambda image, k: image[k]) -> DataLoader:
    """Noise; an image of class k is brighter in one part, by default in channel k."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 156, (len(labels), 3, side, side), generator=draw) / 255
    for image, label in zip(pixels, labels, strict=True):
        brighter(image, label).add_(100 / 255)
    rows = [
        {"image": image, "label": label, "index": place}
        for place, (image, label) in enumerate(zip((pixels - mean) / std, labels, strict=True))
    ]
    return DataLoader(rows, batch_size=4)


def data_of() -> dict[int, DataLoader]:
    """Two clients, who have only the second class in common."""
    return {0: loader([0, 0, 0, 1, 1]), 1: loader([1, 2, 2, 2], seed=1)}


def upload(labels, seed: int = 0, side: int = 8) -> dict[str, torch.Tensor]:
    """What a client might send: labels ascending, images noise."""
    classes, counts = torch.tensor(labels, dtype=torch.int64).unique(return_counts=True)
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (len(labels), 3, side, side), generator=draw, dtype=torch.uint8)
    return {IMAGES: images, CLASSES: classes, COUNTS: counts}


def client_of(task=None, **settings) -> FedDMClient:
    settings = {
        "condensation": Condensation(0),
        "init": "real",
        "mean": MEAN,
        "std": STD,
        "min_class_images": 2,
        **settings,
    }
    return FedDMClient(task or make(), **settings)


def server_of(round: int = 1, **settings) -> FedDMServer:
    server = FedDMServer(client_of(), **{"training": CondensedTraining(2, 4), **settings})
    server.fabric = FABRIC
    server.context = Context(0, round)
    return server


def pieces(images, labels) -> set[tuple[bytes, int]]:
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}

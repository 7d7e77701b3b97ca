"""CReFF's tasks, images and gradients, small enough for tests."""

from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.encoder import Encoder
from lit_fedad.methods.creff import (
    BIAS,
    WEIGHT,
)
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 4, Encoder.num_features
QUICK = {"features_per_class": 6, "matching_steps": 4, "retraining_epochs": 3}

nearly = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


def make(augment: bool = True) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(Encoder(), K, augment=augment, learning_rate=0.1)


def images(labels, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    rows = [{"image": torch.randn(3, 8, 8, generator=draw) + label, "label": label} for label in labels]
    return DataLoader(rows, batch_size=4)


def by_autograd(classifier, features, label, **options) -> torch.Tensor:
    """The gradient of the mean cross-entropy of one class [K, d + 1]."""
    weight, bias = (
        part.detach().clone().requires_grad_() for part in (classifier[:, :-1], classifier[:, -1])
    )
    loss = F.cross_entropy(F.linear(features, weight, bias), torch.full((len(features),), label))
    return torch.column_stack(torch.autograd.grad(loss, [weight, bias], **options))


def side_by_side(message) -> torch.Tensor:
    return torch.column_stack([message[WEIGHT], message[BIAS]])

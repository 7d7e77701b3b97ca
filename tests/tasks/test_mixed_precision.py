"""Trained detectors in mixed precision: networks compute in bfloat16, losses in single precision."""

import pytest
import torch
from helpers.frozen import frozen_encoder
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import SimCLR
from lit_fedad.tasks.csi import CSI
from lit_fedad.tasks.efficient_ad import EfficientAD
from lit_fedad.tasks.elsa import Elsa
from lit_fedad.tasks.frozen_detectors import FeatureNeighbours, FeatureSVM
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.one_class_svm import OneClassSVM
from lit_fedad.tasks.padim import PaDiM
from lit_fedad.tasks.reverse_distillation import ReverseDistillation
from lit_fedad.tasks.simplenet import SimpleNet
from lit_fedad.tasks.slot_distances import HingeLoss, NearestDistance
from lit_fedad.tasks.subspace import Subspace


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (EfficientAD, {"grid": 4, "width": 6, "latent": 4}),
        (ReverseDistillation, {"blocks": 1}),
        (SimpleNet, {"grid": 4, "hidden": 6, "standardise": False}),
    ],
)
def test_the_loss_of_a_step_is_near_that_in_full_precision(task, settings):
    torch.manual_seed(0)
    made = task(TinyPyramid(), image_size=32, **settings)
    if task is EfficientAD:
        made.load_statistics(torch.zeros(8), torch.ones(8))
    losses = []
    for mixed in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = made.training_step({"image": torch.rand(3, 3, 32, 32)})["loss"]
        loss.backward()
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


def _frozen(task, **settings):
    return lambda: task(frozen_encoder(), **settings)


def _on_patches(task, **settings):
    return lambda: task(TinyPyramid(), grid=4, image_size=32, **settings)


def _bank(**settings):
    parts = {"head": None, "loss": HingeLoss(0.01, 2), "score": NearestDistance(), "reduce": SlotReduce()}
    return _on_patches(MemoryBank, slots=9, **{**parts, **settings})


def _elsa():
    parts = {"warmup_loss": SimCLR(), "warmup": 1, "finetuning_views": ContrastiveViews(), "prototypes": 8}
    task = Elsa(frozen_encoder(), views=ContrastiveViews(), projection=8, **parts)
    task.projection = nn.Identity()  # a network, which may compute in bfloat16
    return task


_VIEWS = {"views": ContrastiveViews(flip=0), "projection": 3}
CLOSED = {
    "bank and subspace": _bank(whiten=0.1, subspace=0.9, bank_weight=1.0),
    "subspace": _on_patches(Subspace, share=0.9),
    "padim": _on_patches(PaDiM, channels=5),
    "neighbours": _frozen(FeatureNeighbours),
    "svm": _frozen(FeatureSVM),
    "one_class_svm": _frozen(OneClassSVM, rounds=1, decoder=None, image_size=32, mean=[0.5], std=[0.5]),
    "csi": _frozen(CSI, rounds=4, image_size=32, **_VIEWS),
    "elsa": _elsa,
    "densities": _frozen(Contrastive, loss=SimCLR(), warmup_loss=SimCLR(), warmup=1, rounds=4, **_VIEWS),
}


@pytest.mark.parametrize("build", CLOSED.values(), ids=CLOSED)
def test_scores_of_the_same_embedding_are_those_of_full_precision(build):
    """Of sums and distances behind a network; rounded to bfloat16, scores that differ in the third digit tie."""
    torch.manual_seed(0)
    task, images = build().eval(), torch.rand(12, 3, 32, 32)
    data = [{"image": image, "index": place} for place, image in enumerate(images)]
    task.refresh(DataLoader(data, 6), Context(seed=0, round=0, client=0), first=True)
    with torch.no_grad():
        embedding = task.embedding({"image": images})
        whole = task.predict(embedding, {"image": images}).image_score
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = task.predict(embedding, {"image": images}).image_score
    assert whole.dtype == mixed.dtype == torch.float32
    assert torch.equal(mixed, whole)


def test_frozen_features_are_those_that_are_kept():
    """Kept ones are computed in single precision, whatever a run trains in."""
    encoder, images = frozen_encoder(), torch.rand(3, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = encoder.features(images)
    assert torch.equal(mixed, encoder.features(images))

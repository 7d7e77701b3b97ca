"""Federated PaDiM: equal to NumPy's fit of all data, whatever the partition, with and without secure sums."""

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from helpers.tiny_pyramid import TinyPyramid
from torch.utils.data import DataLoader, Subset

from lit_fedad.contracts import Context
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.methods.federated_padim import FederatedPaDiMClient, FederatedPaDiMServer, ImageCells
from lit_fedad.privacy.image_privacy import ImagePrivacy
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.tasks import padim
from lit_fedad.tasks.padim import PaDiM

CHANNELS, EPSILON = 5, 0.01


def make():
    torch.manual_seed(0)
    return PaDiM(TinyPyramid(), grid=4, image_size=32, channels=CHANNELS, regularisation=EPSILON, sigma=0.0)


def features(*loaders):
    """Of all images: [n, positions, channels], float64."""
    task = make()
    return torch.cat([task(batch) for loader in loaders for batch in loader]).double().numpy()


def gaussians(rows):
    """Defard et al., Eq. 1: means [P, d] and covariances [P, d, d]; a single image has no spread."""
    means, offsets = rows.mean(0), rows - rows.mean(0)
    spreads = np.einsum("npi,npj->pij", offsets, offsets) / max(len(rows) - 1, 1)
    return means, spreads + EPSILON * np.eye(CHANNELS)


def covariances(task):
    factors = task.whiteners.double().numpy()
    return np.linalg.inv(factors.transpose(0, 2, 1) @ factors)


def play(federate, data, **settings):
    parts = {"task": make(), "data": data, "rounds": 0, **settings}
    return federate(FederatedPaDiMClient, FederatedPaDiMServer, **parts)


def test_channels_are_drawn_by_their_seed_alone():
    draws = [PaDiM(TinyPyramid(), 4, 32, CHANNELS, channel_seed=seed).selected.tolist() for seed in range(8)]
    torch.manual_seed(1)
    again = [PaDiM(TinyPyramid(), 4, 32, CHANNELS, channel_seed=seed).selected.tolist() for seed in range(8)]
    assert draws == again
    assert len(set(map(tuple, draws))) > 1
    assert all(len(drawn) == CHANNELS and drawn == sorted(set(drawn)) for drawn in draws)
    assert set().union(*draws) == set(range(8))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 2, 9), (3, 2, 5, 2)])
def test_is_the_central_fit_whatever_the_partition(federate, make_loader, sizes, secure, monkeypatch):
    monkeypatch.setattr(padim, "_MAX_VALUES", 1)  # each batch is a group of its own
    data = {client: make_loader(size, client) for client, size in enumerate(sizes)}
    settings = {"secure_sum": SecureSum()} if secure else {}
    task = play(federate, data, **settings).client.task
    means, expected = gaussians(features(*data.values()))
    np.testing.assert_allclose(task.centres, means, rtol=0, atol=1e-6)
    np.testing.assert_allclose(covariances(task), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("images", [6, 2, 1])
def test_a_client_alone_fits_its_own_images_once(make_loader, images):
    loader, task = make_loader(images), make()
    task.refresh(loader, Context(seed=0, round=0, client=0), first=True)
    means, expected = gaussians(features(loader))
    for _ in range(2):
        np.testing.assert_allclose(task.centres, means, rtol=0, atol=1e-6)
        np.testing.assert_allclose(covariances(task), expected, rtol=0, atol=1e-6)
        task.refresh(make_loader(5, 1), Context(seed=0, round=1, client=0))


def test_scores_are_mahalanobis_distances(federate, make_loader):
    data = {client: make_loader(4, client) for client in range(2)}
    task, batch = play(federate, data).client.task, next(iter(make_loader(3, 7)))
    means, spreads = gaussians(features(*data.values()))
    expected = np.empty((3, 16))
    for image, rows in enumerate(task(batch).double().numpy()):
        for position, row in enumerate(rows):
            offset = row - means[position]
            expected[image, position] = np.sqrt(offset @ np.linalg.inv(spreads[position]) @ offset)
    found = task.predict_step(batch)
    drawn = task.draw(torch.from_numpy(expected).float().flatten())
    torch.testing.assert_close(found.anomaly_map, drawn, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.image_score, drawn.flatten(1).amax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fold", "others"), [([0, 3], 2), ([1], 2), (range(6), 2), (range(6), 1)])
def test_images_are_scored_by_the_central_fit_of_all_others(federate, make_loader, fold, others):
    data, fold = {0: make_loader(6), 1: make_loader(others, 1)}, list(fold)
    played = play(federate, data)
    some = DataLoader(Subset(data[0].dataset, fold), batch_size=2)

    def scores(live, number):
        return list(played.exchanges.leave_out.scores(live, [some, some], score=None))

    found, again = played.ask(0, LocalQuery("scores", scores), [0], sums=True)[0]
    rows = features(data[0])
    means, spreads = gaussians(np.concatenate([np.delete(rows, fold, axis=0), features(data[1])]))
    offsets = rows[fold] - means
    expected = np.sqrt(np.einsum("npi,pij,npj->np", offsets, np.linalg.inv(spreads), offsets))
    judged = make().judge(torch.from_numpy(expected).float().flatten())
    torch.testing.assert_close(found, judged, rtol=1e-5, atol=0)
    assert torch.equal(found, again)


def test_noised_gaussians_are_those_of_cells_in_a_frame(federate, make_loader):
    """With almost no noise: means by cell weighted as images of length 1 are, one covariance, up to a factor."""
    data = {client: make_loader(size, client) for client, size in enumerate((6, 5, 9))}
    parts = {"client": {"noised_directions": 3, "noised_cells": 2}, "noise_key": b"secret".ljust(32)}
    played = play(federate, data, privacy=ImagePrivacy(epsilon=1e14), **parts)
    held = {name: entry.double().numpy() for name, entry in played.server.moments.items()}
    assert held["frame"].shape == (CHANNELS, 3)
    projected = (features(*data.values()) - held["centre"]) @ held["frame"]
    at = np.array([0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3])  # cells of a grid of 4 x 4
    means = np.stack([projected[:, at == cell].mean(1) for cell in range(4)], axis=1)
    lengths = np.sqrt(0.25 + (means**2).sum((1, 2)) / 4)
    cells = (means / lengths[:, None, None]).sum(0) / (1 / lengths).sum()
    np.testing.assert_allclose(held["cells"], cells, rtol=1e-3, atol=1e-4)
    around = projected - cells[at]
    products = np.einsum("npi,npj->nij", around, around) / 16
    spread = (products / np.linalg.norm(products, axis=(1, 2))[:, None, None]).sum(0)
    regular = spread + 0.01 * np.trace(spread) / 3 * np.eye(3)
    task, image = played.client.task, next(iter(make_loader(1, 7)))
    rows = (task(image)[0].double().numpy() - held["centre"]) @ held["frame"] - cells[at]
    expected = np.sqrt(np.einsum("pi,ij,pj->p", rows, np.linalg.inv(regular), rows))
    offsets = task(image)[0] - task.centres
    found = (task.whiteners @ offsets[:, :, None]).norm(dim=1)[:, 0].double().numpy()
    np.testing.assert_allclose(found / found.mean(), expected / expected.mean(), rtol=1e-2)


def test_noisy_means_of_cells_are_shrunk():
    """By 1 - k s^2 / |m|^2 (James and Stein), k numbers with noise of deviation s each, and no farther than to 0."""
    client = FederatedPaDiMClient(make(), noised_directions=3, noised_cells=2)
    client.frame = {}
    means = torch.tensor([[3.0, 0, 4], [1, 2, 2], [0.3, 0, 0.4], [-6, 6, 7]]).double()
    sums = {"weight": torch.tensor([8.0]).double(), "cells": means}
    found = ImageCells(client).from_sums(None, sums, noise=0.5)["cells"].numpy()
    shares = np.array([1 - 0.75 / 25, 1 - 0.75 / 9, 0, 1 - 0.75 / 121])  # 0.75 = 3 x 0.5^2
    np.testing.assert_allclose(found, shares[:, None] * means.numpy() * 2 * 0.5 / 8)
    with pytest.raises(HiddenByNoiseError):
        ImageCells(client).from_sums(None, sums, noise=3.0)


@pytest.mark.parametrize("name", ["noised_directions", "noised_cells"])
def test_settings_of_the_client(name):
    with refusal(rf"method\.client\.{name}=0 must be"):
        FederatedPaDiMClient(make(), **{name: 0})

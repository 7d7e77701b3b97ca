"""Nearest neighbours and a one-class SVM of frozen features, against scikit-learn; and who may use them."""

import numpy as np
import pytest
import torch
from helpers.frozen import Colours, frozen_encoder
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import OneClassSVM
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.local import LocalClient
from lit_fedad.tasks.frozen_detectors import FeatureNeighbours, FeatureSVM
from lit_fedad.tasks.panda import Panda

CONTEXT = Context(seed=0, round=0, client=0)
BOTH = [FeatureNeighbours, FeatureSVM]


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


TRAIN, NEW = images(40, 0), images(9, 1)


def loader(rows: torch.Tensor = TRAIN) -> DataLoader:
    return DataLoader([{"image": one, "index": n} for n, one in enumerate(rows)], batch_size=16)


def features(rows: torch.Tensor) -> np.ndarray:
    return frozen_encoder().features(rows).double().numpy()


def fitted(task):
    task.refresh(loader(), CONTEXT, first=True)
    return task


def scores(task) -> np.ndarray:
    with torch.no_grad():
        return task.predict_step({"image": NEW}).image_score.numpy()


@pytest.mark.parametrize("neighbours", [1, 3])
def test_neighbours_are_scikit_learns(neighbours):
    bank, new = (
        np.concatenate([maps.mean((2, 3)).numpy() for maps in Colours()(rows)], axis=1)
        for rows in (TRAIN, NEW)
    )
    found = NearestNeighbors(n_neighbors=neighbours).fit(bank).kneighbors(new)[0]
    task = fitted(FeatureNeighbours(frozen_encoder(), neighbours))
    np.testing.assert_allclose(scores(task), (found**2).sum(1), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("nu", "gamma"), [(0.1, None), (0.5, 3.0)])
def test_scores_are_minus_scikit_learns_decision_function(nu, gamma):
    known = OneClassSVM(nu=nu, gamma=gamma or "scale").fit(features(TRAIN))
    task = fitted(FeatureSVM(frozen_encoder(), nu, gamma))
    np.testing.assert_allclose(scores(task), -known.decision_function(features(NEW)), rtol=1e-3, atol=1e-4)


def test_neighbours_are_panda_before_training_with_own_images():
    panda = Panda(frozen_encoder(hidden=4))
    panda.refresh(loader(), CONTEXT, first=True)
    np.testing.assert_allclose(scores(fitted(FeatureNeighbours(frozen_encoder()))), scores(panda), rtol=1e-4)


@pytest.mark.parametrize("task", BOTH)
def test_what_was_fitted_is_state_of_any_size(task):
    one, other = fitted(task(frozen_encoder())), task(frozen_encoder())
    other.refresh(loader(TRAIN[:5]), CONTEXT, first=True)
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(scores(one), scores(other))
    assert set(one.local_buffers) <= set(one.state_dict())


@pytest.mark.parametrize("task", BOTH)
def test_before_fitting_and_with_a_network_one_line_says_no(task):
    with pytest.raises(UserError, match="to score by"):
        scores(task(frozen_encoder()))
    with pytest.raises(UserError, match="features.hidden=0"):
        task(frozen_encoder(hidden=4))
    with pytest.raises(UserError, match="METHOD=local"):
        task(frozen_encoder()).training_step({"image": NEW})


@pytest.mark.parametrize("task", BOTH)
def test_methods_that_share_weights_refuse_them(task):
    with pytest.raises(UserError, match="no weights to share"):
        FedAvgClient.check_task(task)
    LocalClient.check_task(task)


def test_without_scikit_learn_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(
        "lit_fedad.core.extras.find_spec", lambda name: None if name == "sklearn" else object()
    )
    with pytest.raises(UserError, match=r"needs sklearn: pip install 'lit-fedad\[train\]'"):
        fitted(FeatureSVM(frozen_encoder()))

"""Local training: nothing crosses, and each client is a plain training of its own."""

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Task
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.local import LocalClient
from lit_fedad.tasks.frozen_detectors import FeatureNeighbours, FeatureSVM


def plain_training(task, loader, epochs: int):
    """One optimiser for all epochs."""
    task.train()
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            task.training_step(batch)["loss"].backward()
            optimizer.step()
    return dict(task.state_dict())


def test_a_task_that_learns_nothing_by_itself_is_refused():
    """Its initial weights were scored."""
    with pytest.raises(UserError, match="task Fixed neither trains nor prepares"):
        LocalClient.check_task(type("Fixed", (Task,), {"trains": False}))


def test_three_rounds_by_hand(federate, make_linear, points_by_hand, hand):
    played = federate(LocalClient, task=make_linear(), data=points_by_hand)
    golden = {  # exact: worked out in fractions
        0: [[0.4815644375, -1.053653640625, 0.129559328125], [0.704714625, 1.91630215625, -0.29506003125]],
        1: [
            [0.04614013671875, -0.51502197265625, 0.35767578125],
            [0.30320068359375, 1.8999560546875, -0.4902490234375],
        ],
    }
    for client, loader in points_by_hand.items():
        expected = hand.start
        for _ in range(3):
            for x, y in hand.batches(loader):
                expected = expected - 0.1 * hand.gradient(expected, x, y)
        theta = hand.theta(played.history[-1].metrics[client])
        # In double precision; sums of another order leave the last bits open.
        np.testing.assert_allclose(theta, expected, rtol=1e-13)
        np.testing.assert_allclose(theta, golden[client], rtol=1e-13)


@pytest.mark.parametrize("epochs", [1, 2])
def test_rounds_of_epochs_are_one_training(federate, make_classifier, make_points, exactly, epochs):
    """T rounds of E epochs: T * E epochs with one optimiser, momentum and all, bit for bit."""
    data = {0: make_points(6), 1: make_points(4, seed=1)}
    played = federate(LocalClient, task=make_classifier(), data=data, client={"local_epochs": epochs})
    for client, loader in data.items():
        exactly(
            played.history[-1].metrics[client], plain_training(make_classifier(), loader, epochs=3 * epochs)
        )


def test_with_a_new_optimiser_each_round_one_client_is_fedavg(
    federate, make_classifier, make_points, exactly
):
    settings = {"keep_optimizer": False}
    alone = federate(LocalClient, task=make_classifier(), data={0: make_points(6)}, client=settings)
    average = federate(FedAvgClient, task=make_classifier(), data={0: make_points(6)})
    exactly(alone.history[-1].metrics, average.history[-1].metrics)


@pytest.mark.parametrize(("trains", "fitted"), [(True, []), (False, [1, 2])])
def test_only_a_task_without_trained_weights_is_fitted_anew_and_once_a_stage(make_linear, trains, fitted):
    """A centre or subspace that weights are trained for stays; `Prepare` has fitted stage 0."""
    seen = []

    class Fits(make_linear):
        prepares = True

        def refresh(self, loader, context, first=False):
            seen.extend([context.stage] if first else [])

    client = LocalClient(Fits().requires_grad_(trains))
    for round, stage in enumerate([0, 0, 1, 1, 2], start=1):
        client.context = Context(0, round, 0, stage=stage)
        client.refresh(loader=[])
    assert seen == fitted


def test_others_data_have_no_influence(federate, make_task, make_loader, exactly):
    here, there = (
        federate(LocalClient, task=make_task(), data={0: make_loader(5), 1: other}, rounds=2)
        for other in (make_loader(3, seed=1), make_loader(4, seed=2))
    )
    exactly(here.history[-1].metrics[0], there.history[-1].metrics[0])


def test_nothing_crosses(federate, make_task, make_loader, tap):
    task = make_task(standardise=True)
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    played = federate(LocalClient, task=task, data=data, channel=tap)
    assert tap.names == set()
    assert all(report.bytes_up == report.bytes_down == {0: 0, 1: 0} for report in played.history)
    assert played.server.weights == {}
    assert set(played.pool.get(0)["own_entries"]) == set(learned_state(task))


def test_features_are_standardised_by_the_clients_own_data(federate, make_task, make_loader):
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    played = federate(LocalClient, task=make_task(standardise=True, shrinkage=0.0), data=data, rounds=1)
    for client, loader in data.items():
        with torch.no_grad():
            patches = torch.cat([make_task().embed(batch).flatten(0, 1) for batch in loader])
        own = played.history[-1].metrics[client]
        torch.testing.assert_close(own["mean"], patches.mean(0))
        torch.testing.assert_close(own["scale"], patches.std(0, correction=0) + 1e-5)


@pytest.mark.parametrize("kind", [FeatureNeighbours, FeatureSVM])
def test_what_a_detector_fits_stays_with_its_client(federate, kind):
    """Nothing is sent, and each client scores by its own images."""
    draw = torch.Generator().manual_seed(0)
    images = [{"image": torch.randn(3, 16, 16, generator=draw)} for _ in range(30)]
    data = {0: DataLoader(images[:14], batch_size=8), 1: DataLoader(images[14:28], batch_size=8)}
    new = {"image": torch.stack([one["image"] for one in images[28:]])}

    def scores_of(client, number):
        return client.predict_step(new).image_score

    played = federate(LocalClient, task=kind(frozen_encoder()), data=data, rounds=0, question=scores_of)
    assert not played.server.weights
    for client, loader in data.items():
        alone = kind(frozen_encoder())
        alone.refresh(loader, Context(seed=0, round=0, client=client), first=True)
        assert torch.equal(played.history[-1].metrics[client], alone.predict_step(new).image_score)

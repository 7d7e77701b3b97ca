"""Federated PatchCore: what the bank may hold, how it is chosen, and what crosses."""

import pytest
import torch
from safetensors.torch import save

from lit_fedad.core.errors import UserError
from lit_fedad.methods.federated_patchcore import FederatedPatchCoreClient, FederatedPatchCoreServer

PATCHES = 16  # of an image, with 8 channels


def rows(memory):
    """A bank as a set of vectors."""
    return {tuple(row) for row in memory.tolist()}


def radius(points, centres):
    """The largest distance of a point to its nearest centre."""
    return float(torch.cdist(points.double(), centres.double()).amin(1).max())


@pytest.fixture
def patches(make_task):
    """All patch features of some loaders [n, 8]."""
    task = make_task(head=None)

    def embed(*loaders):
        return torch.cat([task(batch).flatten(0, 1) for loader in loaders for batch in loader])

    return embed


@pytest.fixture
def patchcore(federate, make_task):
    """Plays federated PatchCore; no rounds of training unless asked for."""

    def play(data, slots, rounds=0, **client):
        return federate(
            FederatedPatchCoreClient,
            FederatedPatchCoreServer,
            task=make_task(head=None, slots=slots),
            data=data,
            rounds=rounds,
            client=client,
        )

    return play


def test_the_bank_is_part_of_the_union_and_as_large_as_its_slots(patchcore, make_loader, patches):
    data = {0: make_loader(3, 0), 1: make_loader(5, 1)}
    bank = patchcore(data, slots=20).server.bank["memory"]
    assert len(rows(bank)) == 20
    assert rows(bank) < rows(patches(*data.values()))


def test_a_small_union_is_the_bank(patchcore, make_loader, patches):
    data = {0: make_loader(1, 0), 1: make_loader(2, 1)}
    bank = patchcore(data, slots=3 * PATCHES).server.bank["memory"]
    assert len(bank) == 3 * PATCHES
    assert rows(bank) == rows(patches(*data.values()))


def test_a_client_sends_no_more_than_its_vectors(patchcore, make_loader):
    data = {0: make_loader(1, 0), 1: make_loader(2, 1)}
    played = patchcore(data, slots=3 * PATCHES, vectors=5)
    assert played.history[0].elements_up == {0: 5 * 8, 1: 5 * 8}
    assert len(played.server.bank["memory"]) == 10


def test_one_client_keeps_its_own_greedy_coreset(patchcore, make_loader, patches):
    """Each vector is, of all patches, the farthest from those before it (no projection at 8 channels)."""
    data = {0: make_loader(4)}
    bank, every = patchcore(data, slots=24).server.bank["memory"], patches(data[0])
    assert rows(bank) <= rows(every)
    for chosen in range(1, 24):
        nearest = torch.cdist(bank[chosen : chosen + 1].double(), bank[:chosen].double()).min()
        # Which of two patches at nearly the same distance is farther is a matter of rounding.
        assert float(nearest) == pytest.approx(radius(every, bank[:chosen]), rel=1e-4)


def test_permuted_clients_give_the_same_set(patchcore, make_loader):
    one, other = make_loader(1, 0), make_loader(2, 1)
    given, moved = (patchcore(data, slots=3 * PATCHES) for data in ({0: one, 1: other}, {0: other, 1: one}))
    assert rows(given.server.bank["memory"]) == rows(moved.server.bank["memory"])


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_coreset_goes_up_once_and_the_bank_comes_down_after_it_and_in_each_round(
    patchcore, make_loader, rounds
):
    played = patchcore({c: make_loader(2, c) for c in range(2)}, slots=24, rounds=rounds, vectors=20)
    for client in (0, 1):
        up, down = (
            sum(getattr(report, way)[client] for report in played.history)
            for way in ("bytes_up", "bytes_down")
        )
        assert up == len(save({"memory": torch.zeros(20, 8)}))
        assert down == (1 + rounds) * len(save({"memory": torch.zeros(24, 8)}))


def test_training_rounds_change_nothing(patchcore, make_loader, exactly):
    data = {c: make_loader(2, c) for c in range(2)}
    short, long = (patchcore(data, slots=24, rounds=rounds) for rounds in (0, 2))
    exactly(long.server.bank, short.server.bank)
    exactly(long.history[-1].metrics, short.history[-1].metrics)


def test_every_client_scores_with_the_bank(patchcore, make_loader, exactly):
    played = patchcore({c: make_loader(2, c) for c in range(2)}, slots=24)
    for client in (0, 1):
        exactly(played.history[-1].metrics[client]["memory"], played.server.bank["memory"])


@pytest.mark.parametrize("settings", [{"standardise": True}, {"whiten": 0.1}, {"subspace": 0.9}])
def test_a_task_that_needs_what_is_not_pooled_is_refused(make_task, settings):
    with pytest.raises(UserError, match=f"task.{next(iter(settings))}: coresets are of patches as"):
        FederatedPatchCoreClient(make_task(head=None, **settings))


def test_clients_are_calibrated_and_scored_as_one_as_they_share_the_bank(make_task):
    assert FederatedPatchCoreClient(make_task(head=None)).predictors.shared

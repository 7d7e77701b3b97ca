"""Channel statistics that lie far from the others'."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Free, TensorSpec, Update
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, MomentSets
from lit_fedad.robust.aggregation import StatisticsCheck

SPEC = {
    "count": TensorSpec((), torch.int64, low=1),
    "mean": TensorSpec((8,)),
    "variance": TensorSpec((8,), low=0),
}


def updates_of(clients: int = 5) -> dict[int, Update]:
    """Clients whose channels differ a little."""
    draw = torch.Generator().manual_seed(0)
    return {
        client: Update(
            {
                "count": torch.tensor(100),
                "mean": torch.randn(8, generator=draw),
                "variance": 4 + torch.rand(8, generator=draw),
            },
            10,
        )
        for client in range(clients)
    }


def lying(updates, client: int, **changed: torch.Tensor) -> dict[int, Update]:
    """The same with entries of one client replaced."""
    return {**updates, client: Update({**updates[client].message, **changed}, 10)}


def test_honest_statistics_stay():
    updates = updates_of()
    assert StatisticsCheck()(updates, SPEC, {}) == (updates, [])


def test_means_far_off_are_left_out_with_their_distance_in_deviations():
    updates = lying(updates_of(), 3, mean=torch.full((8,), 50.0))
    kept, remarks = StatisticsCheck()(updates, SPEC, {})
    assert list(kept) == [0, 1, 2, 4]
    means = np.stack([u.message["mean"].double().numpy() for u in updates.values()])
    deviations = np.sqrt(np.stack([u.message["variance"].double().numpy() for u in updates.values()]))
    off = (means[3] - np.median(means, 0)) / np.median(deviations, 0)
    assert remarks == [
        (
            3,
            f"is an outlier: its channels' means are {np.sqrt(np.square(off).mean()):.3g} standard deviations off;"
            " left out",
        )
    ]


@pytest.mark.parametrize("factor", [1e-4, 100.0])
def test_deviations_far_off_are_left_out_with_their_ratio(factor):
    """Those under 0.3 of the mean deviation count as that."""
    updates = updates_of()
    updates = lying(updates, 1, variance=updates[1].message["variance"] * factor)
    kept, remarks = StatisticsCheck(max_deviation_ratio=3.0)(updates, SPEC, {})
    assert list(kept) == [0, 2, 3, 4]
    deviations = np.sqrt(np.stack([u.message["variance"].double().numpy() for u in updates.values()]))
    usual = np.median(deviations, 0)
    ratios = np.maximum(deviations[1], 0.3 * usual.mean()) / usual
    far = np.exp(np.sqrt(np.square(np.log(ratios)).mean()))
    assert remarks == [
        (1, f"is an outlier: its channels' standard deviations differ by a factor of {far:.3g}; left out")
    ]


def test_of_three_clients_one_is_left_out():
    kept, _ = StatisticsCheck()(lying(updates_of(3), 0, mean=torch.full((8,), 50.0)), SPEC, {})
    assert list(kept) == [1, 2]


def test_what_is_sent_beside_statistics_does_not_matter():
    updates = lying(updates_of(), 3, mean=torch.full((8,), 50.0))
    kept, _ = StatisticsCheck()(updates, {**SPEC, "threshold": TensorSpec(())}, {})
    assert list(kept) == [0, 1, 2, 4]


def test_where_too_many_differ_all_stay():
    updates = lying(lying(updates_of(), 1, mean=torch.full((8,), 50.0)), 2, mean=torch.full((8,), -50.0))
    kept, remarks = StatisticsCheck()(updates, SPEC, {})
    assert kept == updates
    assert len(remarks) == 2
    assert all("too many" in line for _, line in remarks)


def test_constant_channels_are_no_reason():
    constant = {"mean": torch.ones(8), "variance": torch.cat([torch.zeros(4), torch.ones(4)])}
    updates = {client: Update({**update.message, **constant}, 10) for client, update in updates_of().items()}
    updates = lying(updates, 2, variance=torch.cat([torch.full((4,), 1e-6), torch.ones(4)]))
    assert StatisticsCheck()(updates, SPEC, {})[1] == []


def test_statistics_without_any_deviation_are_no_error():
    updates = {c: Update({**u.message, "mean": torch.ones(8), "variance": torch.zeros(8)}, 10)
               for c, u in updates_of().items()}  # fmt: skip
    assert StatisticsCheck()(updates, SPEC, {}) == (updates, [])


@pytest.mark.parametrize("clients", [0, 1, 2])
def test_without_a_majority_statistics_stay(clients):
    updates = updates_of(clients)
    if clients:
        updates = lying(updates, 0, mean=torch.full((8,), 1e6))
    assert StatisticsCheck()(updates, SPEC, {}) == (updates, [])


def test_other_messages_stay():
    updates = {c: Update({"w": torch.full((3,), 10.0**c)}, 10) for c in range(5)}
    assert StatisticsCheck()(updates, {"w": TensorSpec((3,))}, {}) == (updates, [])


@pytest.mark.parametrize(
    "settings", [{"max_mean_shift": 0.0}, {"max_deviation_ratio": 1.0}, {"malicious_share": 1.1}]
)
def test_senseless_settings_are_refused(settings):
    StatisticsCheck(max_mean_shift=0.5, max_deviation_ratio=1.5, malicious_share=1.0)
    with pytest.raises(UserError, match="federation.robust.statistics"):
        StatisticsCheck(**settings)


def packed(update):
    """The same statistics as the diagonal of covariances, in two sets."""
    message = update.message
    triangle = torch.diag(message["variance"])[tuple(torch.triu_indices(8, 8))]
    entries = {"count": message["count"], "mean": message["mean"], "covariance": triangle}
    return Update({name: torch.stack([entry, entry]) for name, entry in entries.items()}, update.num_samples)


TWO_SETS = Free("sets", 2)
MOMENTS = {
    "count": TensorSpec((TWO_SETS,), torch.int64),
    "mean": TensorSpec((TWO_SETS, 8)),
    "covariance": TensorSpec((TWO_SETS, 36)),
}


def test_second_moments_are_judged_by_their_channels():
    updates = {client: packed(update) for client, update in updates_of(5).items()}
    assert StatisticsCheck()(updates, MOMENTS, {})[0].keys() == updates.keys()
    lying = {**updates[2].message, "mean": updates[2].message["mean"] + 100}
    kept, remarks = StatisticsCheck()({**updates, 2: Update(lying, 10)}, MOMENTS, {})
    assert list(kept) == [0, 1, 3, 4]
    assert remarks[0][0] == 2
    # Clients that send no moments in a round have nothing to be judged by.
    silent = {name: entry[:0] for name, entry in updates[0].message.items()}
    kept, _ = StatisticsCheck()({**updates, 0: Update(silent, 10), 2: Update(lying, 10)}, MOMENTS, {})
    assert list(kept) == [0, 1, 3, 4]


@pytest.mark.parametrize(("scale", "centre"), [(1.0, 1000.0), (1e-3, 1.0)])
def test_moments_are_judged_at_any_scale_and_clients_without_any_are_not(scale, centre):
    updates = {}
    for client, update in updates_of(6).items():
        message = packed(update).message
        far = 100 if client == 2 else 0
        moved = {
            "mean": (message["mean"] + far) * scale + centre,
            "covariance": message["covariance"] * scale**2,
        }
        updates[client] = Update({**message, **moved}, 10)
    none = {name: entry[:0] for name, entry in updates[0].message.items()}
    kept, remarks = StatisticsCheck()({**updates, 0: Update(none, 10)}, MOMENTS, {})
    assert list(kept) == [0, 1, 3, 4, 5]
    assert [client for client, _ in remarks] == [2]


@pytest.mark.parametrize("sizes", [(70, 30), (99, 1)])
def test_moments_of_several_products_are_judged_as_those_of_all_images(sizes):
    free = Free("sets", 3)
    spec = {
        "count": TensorSpec((3,), torch.int64),
        "mean": TensorSpec((free, 8)),
        "covariance": TensorSpec((free, 36)),
    }
    draw = torch.Generator().manual_seed(0)
    plain, by_product = {}, {}
    for client in range(5):
        one, other = (torch.randn(size, 8, generator=draw) for size in sizes)
        other += 3
        if client == 2:
            one *= 30
        rows = torch.cat([one, other]).double()
        whole = {"mean": rows.mean(0), "variance": rows.var(0, correction=0)}
        plain[client] = Update({"count": torch.tensor(100), **whole}, 10)
        sets = MomentSets.of([Moments.of([part], 8) for part in (one, rows[:0], other)], 8)
        by_product[client] = Update(sets.message(), 10)
    found = StatisticsCheck()(by_product, spec, {})[1]
    assert [client for client, _ in found] == [2]
    assert found == StatisticsCheck()(plain, SPEC, {})[1]

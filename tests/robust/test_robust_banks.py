"""Support of banks: distances by hand, and who is left out."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Free, TensorSpec, Update
from lit_fedad.core.errors import UserError
from lit_fedad.robust.banks import BankSupport, _distance, _spaced, bank_name, standing_out

SLOTS, WIDTH = 40, 4
FIXED = {
    "memory": TensorSpec((SLOTS, WIDTH), unordered=True),
    "counts": TensorSpec((SLOTS,), low=0),
    "radii": TensorSpec((SLOTS,), low=0),
}
FREE = {"memory": TensorSpec((Free("vectors", SLOTS), WIDTH), unordered=True)}


def bank(seed: int, centre: float = 0.0) -> torch.Tensor:
    """Vectors of one kind of normal."""
    return centre + torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(seed))


def update_of(memory: torch.Tensor, counts: torch.Tensor | None = None) -> Update:
    """A message with counts and radii."""
    counts = torch.ones(len(memory)) if counts is None else counts
    return Update({"memory": memory, "counts": counts, "radii": torch.arange(float(len(memory)))}, 10)


def honest(clients: int = 5) -> dict[int, Update]:
    """Clients with banks of the same kind."""
    return {client: update_of(bank(client)) for client in range(clients)}


def test_distances_are_in_units_of_the_other_bank_s_spacing():
    updates = {client: update_of(bank(client)) for client in range(4)}
    last = bank(9)
    messages = {client: update.message for client, update in updates.items()}
    found = BankSupport(min_supporters=2)._distances(messages, "memory", last)

    def by_hand(rows, other):
        gaps = np.linalg.norm(other[:, None] - other, axis=2)
        np.fill_diagonal(gaps, np.inf)
        return (np.linalg.norm(rows[:, None] - other, axis=2) / gaps.min(1)).min(1)

    banks = {client: message["memory"].double().numpy() for client, message in messages.items()}
    for client, rows in banks.items():
        others = np.sort([by_hand(rows, other) for o, other in banks.items() if o != client], axis=0)
        expected = np.minimum(others[1], by_hand(rows, last.double().numpy()))
        np.testing.assert_allclose(found[client], expected, rtol=1e-4, atol=1e-5)


def test_the_spacing_of_larger_banks_reaches_over_the_same_share():
    rows = torch.randn(768, 3, generator=torch.Generator().manual_seed(0))
    found, spacing = _spaced(rows)
    gaps = np.sort(np.linalg.norm(found[:, None].double() - found.double(), axis=2), axis=1)
    np.testing.assert_allclose(spacing, gaps[:, 3], rtol=1e-4, atol=1e-5)  # the third of the others


def test_more_vectors_of_the_same_kind_make_nobody_farther_and_hide_no_lie():
    """Honest vectors have nearer ones among more; a lie is as far from the edge of all of them."""
    draw = torch.Generator().manual_seed(0)
    few, many = (torch.randn(size, 6, generator=draw) for size in (256, 1024))
    honest, lie = (torch.randn(200, 6, generator=draw) + shift for shift in (0, 3))
    small, large = (
        [float(_distance(rows, *_spaced(bank)).median()) for rows in (honest, lie)] for bank in (few, many)
    )
    assert large[0] <= small[0]
    assert large[1] == pytest.approx(small[1], rel=0.2)


def test_honest_clients_keep_their_messages():
    updates = honest()
    kept, remarks = BankSupport()(updates, FIXED, {})
    assert remarks == []
    assert kept == updates


def test_a_client_unlike_all_others_is_left_out_and_named():
    updates = {**honest(), 3: update_of(bank(3, centre=10.0))}
    kept, remarks = BankSupport()(updates, FIXED, {})
    assert list(kept) == [0, 1, 2, 4]
    assert len(remarks) == 1
    assert remarks[0][0] == 3


def test_of_three_clients_one_unlike_the_others_is_left_out():
    updates = {**honest(2), 2: update_of(bank(2, centre=10.0))}
    assert list(BankSupport()(updates, FIXED, {})[0]) == [0, 1]


@pytest.mark.parametrize("counted", [True, False])
def test_vectors_that_are_no_means_may_be_farther(counted):
    """A client between both limits."""
    updates = {client: update_of(bank(client, centre=10.0 * (client == 3))) for client in range(5)}
    spec = FIXED if counted else FREE
    if not counted:
        updates = {client: Update({"memory": u.message["memory"]}, 10) for client, u in updates.items()}
    limits = {
        "client_limit": 1.2,
        "client_limit_without_counts": 1e4,
        "vector_limit": 1e4,
        "first_vector_limit": 1e4,
    }
    kept, _ = BankSupport(**limits)(updates, spec, {})
    assert list(kept) == ([0, 1, 2, 4] if counted else [0, 1, 2, 3, 4])


def test_two_vectors_have_a_spacing_and_one_holds_itself_alone():
    pair = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    near = torch.tensor([[0.0, 3.0]])
    assert _distance(near, *_spaced(pair)).tolist() == [0.5]
    assert _distance(pair, *_spaced(pair[:1])).tolist() == [0.0, torch.inf]


def test_where_each_client_has_its_own_kind_all_stay():
    updates = {client: update_of(bank(client, centre=10.0 * client)) for client in range(5)}
    kept, remarks = BankSupport()(updates, FIXED, {})
    assert kept == updates
    assert len(remarks) == 5
    assert all("kept" in line for _, line in remarks)


def test_a_liar_stands_out_among_clients_that_it_took_the_support_from():
    """Client 4 shares its kind with client 3, which sends something else, far from all."""
    updates = {**honest(), 3: update_of(bank(3, centre=50.0)), 4: update_of(bank(4, centre=2.0))}
    kept, remarks = BankSupport(client_limit=0.8, client_limit_without_counts=0.8)(updates, FIXED, {})
    assert list(kept) == [0, 1, 2, 4]
    assert [client for client, _ in remarks] == [3, 4]
    assert "left out" in remarks[0][1]
    assert "kept" in remarks[1][1]


@pytest.mark.parametrize(
    ("distances", "out"),
    [([1.0, 1.05, 1.1, 2.0], {3}), ([1.0, 1.05, 2.0, 2.1], {2, 3}), ([1.0, 1.9, 2.0, 2.1], set())],
)
def test_as_many_stand_out_as_are_clearly_farther_but_no_more_than_may(distances, out):
    assert standing_out(dict(enumerate(distances)), 1.2, 2) == out


def test_two_clients_of_a_kind_support_each_other():
    updates = {**honest(), 3: update_of(bank(3, centre=10.0)), 4: update_of(bank(4, centre=10.0))}
    kept, remarks = BankSupport()(updates, FIXED, {})
    assert kept == updates
    assert remarks == []
    _, remarks = BankSupport(min_supporters=2)(updates, FIXED, {})
    assert {client for client, _ in remarks} == {3, 4}
    # Vectors that count nothing support nobody.
    mixed, counts = torch.cat([bank(4, centre=10.0)[:20], bank(4)[20:]]), torch.ones(SLOTS)
    assert 3 in BankSupport()({**updates, 4: update_of(mixed, counts)}, FIXED, {})[0]
    counts[:20] = 0
    assert 3 not in BankSupport()({**updates, 4: update_of(mixed, counts)}, FIXED, {})[0]


def test_the_last_bank_supports_a_client_alone():
    alone = bank(3, centre=10.0)
    updates = {**honest(), 3: update_of(alone)}
    kept, remarks = BankSupport(vector_limit=9.0)(
        updates, FIXED, {"memory": torch.cat([bank(0), alone + 0.01])}
    )
    assert kept == updates
    assert remarks == []


def test_single_vectors_far_from_the_last_bank_become_copies_without_count():
    mixed = bank(2)
    mixed[:4] += 50.0
    updates = {**honest(), 2: update_of(mixed)}
    kept, remarks = BankSupport(vector_limit=9.0)(updates, FIXED, {"memory": bank(9)})
    changed = kept[2].message
    assert remarks == [(2, "has outliers: 10.0% of its vectors, by count, are left out")]
    assert changed["counts"].tolist() == [0.0] * 4 + [1.0] * 36
    rows = {tuple(row) for row in mixed[4:].tolist()}
    assert all(tuple(row) in rows for row in changed["memory"][:4].tolist())
    # A copy has the radius of what it is a copy of.
    source = [mixed.tolist().index(row) for row in changed["memory"][:4].tolist()]
    assert changed["radii"][:4].tolist() == [float(row) for row in source]
    assert torch.equal(changed["memory"][4:], mixed[4:])
    assert torch.equal(updates[2].message["memory"], mixed)


def test_messages_of_fixed_size_need_no_radii():
    """As those of a federated subspace, which sends vectors and counts alone."""
    messages = [{"memory": bank(client), "counts": torch.ones(SLOTS)} for client in range(5)]
    messages[2]["memory"][0] += 50.0
    spec = {name: FIXED[name] for name in ("memory", "counts")}
    updates = {client: Update(message, 10) for client, message in enumerate(messages)}
    kept, _ = BankSupport(vector_limit=9.0)(updates, spec, {"memory": bank(9)})
    assert kept[2].message["counts"].tolist() == [0.0] + [1.0] * 39


def test_vectors_far_out_are_taken_from_messages_of_free_size():
    mixed = bank(2)
    mixed[:4] += 500.0
    updates = {client: Update({"memory": bank(client)}, 10) for client in range(5)}
    updates[2] = Update({"memory": mixed}, 10)
    kept, remarks = BankSupport()(updates, FREE, {})
    assert torch.equal(kept[2].message["memory"], mixed[4:])
    assert len(remarks) == 1


def test_vectors_that_count_nothing_do_not_make_a_client_far():
    odd = bank(3)
    odd[:30] += 50.0
    counts = torch.ones(SLOTS)
    counts[:30] = 0
    kept, remarks = BankSupport()({**honest(), 3: update_of(odd, counts)}, FIXED, {})
    assert remarks == []
    assert kept[3].message["counts"].sum() == 10


def test_a_liar_cannot_stretch_the_others_measure():
    """Its own scattered vectors support nobody's lie but others', and do not make an honest client far."""
    scattered = bank(4) * 100
    kept, remarks = BankSupport()({**honest(), 4: update_of(scattered)}, FIXED, {})
    assert list(kept) == [0, 1, 2, 3]
    assert {client for client, _ in remarks} == {4}


def test_copies_in_a_bank_do_not_shrink_its_spacing():
    """With fewer patches than slots a bank holds copies."""
    few = bank(1)[:10].repeat(4, 1)
    kept, remarks = BankSupport()({**honest(), 1: update_of(few)}, FIXED, {})
    assert list(kept) == [0, 1, 2, 3, 4]
    assert remarks == []


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_vectors_are_no_error(rows):
    updates = {client: Update({"memory": bank(client)}, 10) for client in range(4)}
    updates[2] = Update({"memory": bank(2)[:rows]}, 10)
    kept, _ = BankSupport()(updates, FREE, {"memory": torch.zeros(0, WIDTH)})
    assert set(kept) >= {0, 1, 3}


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("last", [{}, {"memory": torch.zeros(0, WIDTH)}, {"memory": torch.zeros(1, WIDTH)}])
def test_nobody_is_far_from_banks_without_a_spacing(rows, last):
    """Of the clients one holds a whole bank, the others nothing or a vector each."""
    updates = {client: Update({"memory": bank(client)[:rows]}, 10) for client in range(5)}
    updates[2] = Update({"memory": bank(2)}, 10)
    alone, remarks = BankSupport()(updates, FREE, last)
    assert remarks == []
    assert {client: len(update.message["memory"]) for client, update in alone.items()} == {
        client: SLOTS if client == 2 else rows for client in updates
    }


def test_clients_of_a_vector_each_are_all_kept():
    updates = {client: Update({"memory": bank(client)[:1]}, 10) for client in range(5)}
    assert BankSupport()(updates, FREE, {}) == (updates, [])


@pytest.mark.parametrize("clients", [0, 1, 2])
def test_without_a_majority_banks_stay_as_they_are(clients):
    updates = {client: update_of(bank(client, centre=100.0 * client)) for client in range(clients)}
    assert BankSupport()(updates, FIXED, {}) == (updates, [])


def test_the_order_of_clients_does_not_matter():
    updates = {**honest(), 3: update_of(bank(3, centre=10.0))}
    forward, _ = BankSupport()(updates, FIXED, {})
    backward, _ = BankSupport()(dict(reversed(updates.items())), FIXED, {})
    assert set(forward) == set(backward)


def test_what_is_a_bank():
    assert bank_name(FIXED) == "memory"
    assert bank_name({"w": TensorSpec((4, 3))}) is None
    assert bank_name(FREE) == "memory"
    assert bank_name({"memory": FIXED["memory"]}) is None, "a memory of positions"
    images = TensorSpec((Free("images"), 3, 8, 8), unordered=True)
    assert bank_name({"images": images}) is None
    densities = {
        "mean": TensorSpec((5, 3), unordered=True),
        "covariance": TensorSpec((5, 3, 3), unordered=True),
    }
    assert bank_name(densities) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"client_limit": 0.0, "client_limit_without_counts": 0.0},
        {"client_limit": 0.0},
        {"vector_limit": 1.0},
        {"min_supporters": 0},
        {"malicious_share": 1.1},
    ],
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(UserError, match="federation.robust.banks"):
        BankSupport(**settings)

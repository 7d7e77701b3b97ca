"""Robust combinations of weights against independent arithmetic in NumPy."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Free, TensorSpec, Update, spec_of
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.robust.weights import (
    CoordinateMedian,
    Krum,
    NormClipping,
    TrimmedMean,
    cosines,
    inner_products,
    krum_scores,
    lengths,
    weight_names,
)

RULES = [NormClipping(), CoordinateMedian(), TrimmedMean(), Krum(), Krum(merged_clients=3)]
PREVIOUS = {"w": torch.linspace(-1, 1, 12).reshape(4, 3), "b": torch.tensor([0.5]), "steps": torch.tensor(3)}
SPEC = spec_of(PREVIOUS)


def updates_of(clients: int, seed: int = 0, images: int = 10) -> dict[int, Update]:
    """Clients that moved the weights by random numbers."""
    draw = torch.Generator().manual_seed(seed)
    return {
        client: Update(
            {
                "w": PREVIOUS["w"] + torch.randn(4, 3, generator=draw),
                "b": PREVIOUS["b"] + torch.randn(1, generator=draw),
                "steps": torch.tensor(client),
            },
            images,
        )
        for client in range(clients)
    }


def moved(updates, client: int, factor: float) -> dict[int, Update]:
    """The same with one client's change multiplied."""
    message = updates[client].message
    lie = {n: PREVIOUS[n] + factor * (message[n] - PREVIOUS[n]) for n in ("w", "b")}
    return {**updates, client: Update({**message, **lie}, updates[client].num_samples)}


def matrix(updates) -> np.ndarray:
    """All weights [N, D] in double precision."""
    rows = [torch.cat([u.message["w"].flatten(), u.message["b"]]) for u in updates.values()]
    return torch.stack(rows).double().numpy()


def same(one, other) -> bool:
    """Whether two sets of updates are equal bit for bit."""
    return list(one) == list(other) and all(
        torch.equal(one[c].message[n], other[c].message[n]) for c in one for n in one[c].message
    )


def merged(rule, updates) -> np.ndarray:
    """What a server that averages holds afterwards, [D]."""
    mean = weighted_mean(rule(updates, SPEC, PREVIOUS)[0])
    return torch.cat([mean["w"].flatten(), mean["b"]]).numpy()


@pytest.mark.parametrize("clients", [3, 4, 5, 8])
def test_the_median_is_numpy_s(clients):
    updates = updates_of(clients)
    expected = np.median(matrix(updates), axis=0).astype(np.float32)
    np.testing.assert_array_equal(merged(CoordinateMedian(), updates), expected)


@pytest.mark.parametrize(("clients", "liars", "trimmed"), [(5, 0.2, 1), (10, 0.3, 3), (3, 0.2, 1)])
def test_the_trimmed_mean_leaves_out_the_ends(clients, liars, trimmed):
    updates = updates_of(clients)
    expected = np.sort(matrix(updates), axis=0)[trimmed : clients - trimmed].mean(0)
    np.testing.assert_allclose(merged(TrimmedMean(malicious_share=liars), updates), expected, rtol=1e-6)


@pytest.mark.parametrize(("clients", "liars"), [(5, 1), (7, 0), (7, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_krum_s_scores_are_sums_of_the_nearest_squares(clients, liars, scale):
    updates = updates_of(clients)
    for client in range(clients):
        updates = moved(updates, client, scale)
    rows = matrix(updates)
    squares = np.square(rows[:, None] - rows).sum(2)
    nearest = max(1, clients - liars - 2)
    expected = [np.sort(np.delete(squares[i], i))[:nearest].sum() for i in range(clients)]
    found = krum_scores(inner_products(updates, ["w", "b"], PREVIOUS), liars)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_krum_keeps_the_client_of_least_score():
    updates = updates_of(5)
    scores = krum_scores(inner_products(updates, ["w", "b"], PREVIOUS), 1)
    best = int(scores.argmin())
    kept, _ = Krum()(updates, SPEC, PREVIOUS)
    assert list(kept) == [best]
    assert kept[best] is updates[best]


def test_multi_krum_leaves_the_liar_out_and_keeps_client_order():
    updates = moved(updates_of(5), 2, 50.0)
    kept, remarks = Krum(merged_clients=3)(updates, SPEC, PREVIOUS)
    assert len(kept) == 3
    assert 2 not in kept
    assert list(kept) == sorted(kept)
    assert len(remarks) == 1
    assert remarks[0][0] == 2


def test_a_change_too_long_is_cut_to_the_bound_and_its_client_named():
    updates = moved(updates_of(5), 3, 100.0)
    norms = np.linalg.norm(matrix(updates) - np.r_[PREVIOUS["w"].flatten(), PREVIOUS["b"]], axis=1)
    kept, remarks = NormClipping(max_length_ratio=2.0)(updates, SPEC, PREVIOUS)
    assert [client for client, _ in remarks if client == 3]
    assert len(remarks) == 1
    assert np.linalg.norm(matrix(kept)[3] - np.r_[PREVIOUS["w"].flatten(), PREVIOUS["b"]]) == pytest.approx(
        2 * np.sort(norms)[2], rel=1e-6
    )
    honest = {client: kept[client] for client in kept if client != 3}
    assert same(honest, {client: updates[client] for client in updates if client != 3})


def test_controls_and_weights_are_measured_apart():
    """SCAFFOLD's: the server sends c, many times as long as changes of weights, and clients how they move it."""
    draw = torch.Generator().manual_seed(1)
    control = "control/w"
    previous = {**PREVIOUS, control: 1000 * torch.randn(4, 3, generator=draw)}
    given = moved(updates_of(5), 4, 20.0)
    changes = {client: previous[control] + torch.randn(4, 3, generator=draw) for client in given}
    given = {c: Update({**u.message, control: changes[c]}, u.num_samples) for c, u in given.items()}
    spec = {**SPEC, control: TensorSpec((4, 3))}
    judged, remarks = NormClipping()(given, spec, previous)
    assert [client for client, _ in remarks] == [4]
    assert "times as far as usual" in remarks[0][1]
    assert all(torch.equal(update.message[control], changes[c]) for c, update in judged.items())
    plain, _ = NormClipping()(moved(updates_of(5), 4, 20.0), SPEC, PREVIOUS)
    assert torch.equal(judged[4].message["w"], plain[4].message["w"])
    changes[0] = 1e4 * changes[0]
    given[0] = Update({**given[0].message, control: changes[0]}, given[0].num_samples)
    bounded, remarks = NormClipping()(given, spec, previous)
    assert [(client, "control" in line) for client, line in remarks] == [(0, True), (4, False)]
    assert (bounded[0].message[control] - previous[control]).norm() < 20  # the others': about 3.5
    assert torch.equal(bounded[0].message["w"], given[0].message["w"])
    median, _ = CoordinateMedian()(given, spec, previous)
    expected = np.median([change.numpy() for change in changes.values()], axis=0)
    np.testing.assert_array_equal(median[0].message[control], expected)


def test_running_statistics_hide_no_change_of_weights():
    """Those of batch normalisation change many times as far as weights, and of all clients in one direction."""
    name, draw = "norm.running_var", torch.Generator().manual_seed(1)
    previous, spec = {name: torch.ones(4), **PREVIOUS}, {name: TensorSpec((4,)), **SPEC}
    liar = moved(updates_of(5), 4, 20.0)
    variances = {client: 1000 + torch.rand(4, generator=draw) for client in liar}
    given = {c: Update({name: variances[c], **u.message}, u.num_samples) for c, u in liar.items()}
    plain, said = NormClipping()(liar, SPEC, PREVIOUS)
    judged, remarks = NormClipping()(given, spec, previous)
    assert [client for client, _ in remarks] == [4]
    assert remarks == said
    for client, update in judged.items():
        assert torch.equal(update.message["w"], plain[client].message["w"])
        assert torch.equal(update.message[name], variances[client])
    assert list(Krum(merged_clients=3)(given, spec, previous)[0]) == list(
        Krum(merged_clients=3)(liar, SPEC, PREVIOUS)[0]
    )


def test_clients_with_more_images_may_move_the_weights_farther():
    products = torch.diag(torch.tensor([1.0, 1.0, 36.0, 1.0, 1.0], dtype=torch.float64))
    assert lengths(products, dict.fromkeys(range(5), 10))[2] == 6
    assert lengths(products, {0: 10, 1: 10, 2: 30, 3: 10, 4: 10})[2] == 2
    # Fewer images than usual are no reason to move them less: the median is measured on large clients too.
    assert lengths(products, {0: 10, 1: 10, 2: 1, 3: 10, 4: 10})[2] == 6


def test_a_client_that_moves_alone_lies_infinitely_far_out():
    updates = {c: Update(PREVIOUS, 10) for c in range(4)}
    updates[1] = Update({**PREVIOUS, "b": torch.tensor([0.6])}, 10)
    kept, remarks = NormClipping()(updates, SPEC, PREVIOUS)
    assert remarks[0][0] == 1
    assert torch.equal(kept[1].message["b"], PREVIOUS["b"])
    assert lengths(torch.zeros(3, 3), dict.fromkeys(range(3), 10)) == {0: 1, 1: 1, 2: 1}  # nobody moves


def test_cosines_are_with_the_sum_of_the_others_directions():
    updates = updates_of(5)
    changes = matrix(updates) - np.r_[PREVIOUS["w"].flatten(), PREVIOUS["b"]].astype(np.float64)
    units = changes / np.linalg.norm(changes, axis=1, keepdims=True)
    expected = []
    for client in range(5):
        others = np.delete(units, client, axis=0).sum(0)
        expected.append(units[client] @ others / np.linalg.norm(others))
    np.testing.assert_allclose(cosines(inner_products(updates, ["w", "b"], PREVIOUS)), expected, atol=1e-12)


def test_a_client_that_pulls_the_other_way_is_named():
    draw = torch.Generator().manual_seed(1)
    updates = {
        c: Update({**PREVIOUS, "w": PREVIOUS["w"] + 1 + 0.1 * torch.randn(4, 3, generator=draw)}, 10)
        for c in range(5)
    }
    _, none = NormClipping()(updates, SPEC, PREVIOUS)
    assert none == []
    _, remarks = NormClipping()(moved(updates, 4, -1.0), SPEC, PREVIOUS)
    assert len(remarks) == 1
    assert remarks[0][0] == 4
    assert "against" in remarks[0][1]


@pytest.mark.parametrize(("signs", "named"), [([1, 1, 1, -1, -1], [3, 4]), ([1, 1, -1, -1], [])])
def test_those_who_pull_the_other_way_are_named_unless_they_are_half(signs, named):
    step = torch.linspace(1, 2, 12).reshape(4, 3)
    updates = {c: Update({**PREVIOUS, "w": PREVIOUS["w"] + s * step}, 10) for c, s in enumerate(signs)}
    _, remarks = NormClipping()(updates, SPEC, PREVIOUS)
    assert [client for client, _ in remarks] == named


def test_clients_that_all_pull_apart_are_not_named_for_it():
    directions = torch.cat([torch.eye(3), -torch.eye(3)])
    updates = {
        c: Update({**PREVIOUS, "w": PREVIOUS["w"] + direction.repeat(4, 1)}, 10)
        for c, direction in enumerate(directions)
    }
    assert (cosines(inner_products(updates, ["w", "b"], PREVIOUS)) < -0.25).all()
    _, remarks = NormClipping()(updates, SPEC, PREVIOUS)
    assert remarks == []


@pytest.mark.parametrize("rule", RULES)
def test_identical_clients_stay_identical(rule):
    updates = dict.fromkeys(range(5), updates_of(1)[0])
    kept, remarks = rule(updates, SPEC, PREVIOUS)
    assert remarks == []
    assert all(
        torch.equal(update.message[n], updates[0].message[n]) for update in kept.values() for n in PREVIOUS
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clients", [0, 1, 2])
def test_without_a_majority_messages_stay_as_they_are(rule, clients):
    updates = moved(updates_of(clients), 0, 100.0) if clients else {}
    kept, remarks = rule(updates, SPEC, PREVIOUS)
    assert same(kept, updates)
    assert remarks == []


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_clients_does_not_matter(rule):
    updates = moved(updates_of(5), 1, 30.0)
    backward = dict(reversed(updates.items()))
    np.testing.assert_allclose(merged(rule, updates), merged(rule, backward), atol=1e-6)


@pytest.mark.parametrize(
    "rule", [CoordinateMedian(), TrimmedMean(), NormClipping(), Krum(), Krum(merged_clients=3)]
)
def test_one_liar_of_five_does_not_decide(rule):
    honest = updates_of(5)
    rows = matrix(honest)
    for factor in (-1000.0, 1000.0):
        found = merged(rule, moved(honest, 2, factor))
        reach = 2 * np.abs(rows - rows.mean(0)).max()
        assert np.abs(found - rows.mean(0)).max() < reach


def test_integer_entries_stay_each_client_s_own():
    kept, _ = CoordinateMedian()(updates_of(5), SPEC, PREVIOUS)
    assert [int(update.message["steps"]) for update in kept.values()] == [0, 1, 2, 3, 4]


def test_only_what_the_server_had_sent_counts_as_weights():
    spec = {
        "w": TensorSpec((4, 3)),
        "prototypes": TensorSpec((Free("classes"), 3)),
        "own": TensorSpec((2,)),
        "steps": TensorSpec((), torch.int64),
        "other": TensorSpec((5,)),
    }
    previous = {**PREVIOUS, "prototypes": torch.zeros(2, 3), "other": torch.zeros(4)}
    assert weight_names(spec, previous) == ["w"]
    assert weight_names({**spec, "memory": TensorSpec((4, 3), unordered=True)}, previous) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: NormClipping(max_length_ratio=0.5),
        lambda: Krum(merged_clients=0),
        lambda: Krum(malicious_share=-0.1),
        lambda: Krum(malicious_share=1.1),
        lambda: Krum(max_length_ratio=0.5),
        lambda: TrimmedMean(max_length_ratio=0.5),
        lambda: TrimmedMean(malicious_share=1.1),
    ],
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(UserError, match="federation.robust.weights"):
        wrong()


def test_a_weight_may_be_a_single_number():
    """As the radius of a sphere: a row of one number each."""
    updates = {client: Update({"r": torch.tensor(float(client))}, 5) for client in range(3)}
    products = inner_products(updates, ["r"], {"r": torch.tensor(1.0)})
    assert products.tolist() == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]

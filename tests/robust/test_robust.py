"""Robust aggregation as a whole: its configuration, and a federation with a liar."""

import pickle

import pytest
import torch

from lit_fedad.contracts import TensorSpec, Update
from lit_fedad.core.building import build
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError
from lit_fedad.robust.aggregation import RobustAggregation, tolerated
from lit_fedad.robust.weights import CoordinateMedian, Krum, NormClipping, TrimmedMean

WEIGHTS = {
    "off": None,
    "banks": None,
    "default": NormClipping,
    "median": CoordinateMedian,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": Krum,
}


def composed(*overrides: str) -> RobustAggregation:
    """The object of a configuration."""
    return build(compose(["method=federated_bank", "backbone=own", *overrides])["federation"]["robust"])


def test_every_option_is_tested():
    assert choices("federation/robust") == sorted(WEIGHTS)


@pytest.mark.parametrize("option", WEIGHTS)
@pytest.mark.parametrize("federation", ["partial", "byte"])
def test_every_federation_takes_every_option(federation, option):
    robust = composed(f"federation={federation}", f"federation/robust={option}")
    kind = WEIGHTS[option]
    assert robust.weights is None if kind is None else type(robust.weights) is kind
    assert (robust.banks is None) == (robust.statistics is None) == (option == "off")
    again = pickle.loads(pickle.dumps(robust))
    assert repr(again.banks) == repr(robust.banks)


def test_default_is_the_option_of_that_name():
    assert repr(composed().banks) == repr(composed("federation/robust=default").banks)
    assert type(composed().weights) is NormClipping


def test_a_rule_may_be_set_and_left_out():
    assert composed("federation.robust.weights.max_length_ratio=4").weights.max_length_ratio == 4
    assert composed("federation.robust.banks=null").banks is None
    assert composed("federation/robust=multi_krum").weights.merged_clients == 3


def test_a_misspelt_option_is_one_line_that_lists_the_options():
    with pytest.raises(UserError, match="federation/robust has no option 'mediam'; did you mean 'median'"):
        composed("federation/robust=mediam")


def test_off_changes_nothing():
    updates = {c: Update({"w": torch.full((3,), 1000.0**c)}, 10) for c in range(5)}
    kept, warnings = composed("federation/robust=off")(
        updates, {"w": TensorSpec((3,))}, {"w": torch.zeros(3)}
    )
    assert kept == updates
    assert warnings == []


def test_rules_apply_one_after_another():
    def without(client):
        def rule(updates, spec, previous):
            return {c: u for c, u in updates.items() if c != client}, [(client, "is an outlier")]

        return rule

    updates = {c: Update({}, 10) for c in range(3)}
    assert RobustAggregation(without(0), None, without(2))(updates, {}, {}) == (
        {1: updates[1]},
        [(0, "is an outlier"), (2, "is an outlier")],
    )


@pytest.mark.parametrize(
    ("share", "clients", "liars"), [(0.0, 5, 1), (0.4, 5, 2), (0.9, 5, 2), (0.5, 2, 0), (1, 0, 0)]
)
def test_liars_are_always_a_minority(share, clients, liars):
    assert tolerated(share, clients) == liars


def test_a_share_that_is_a_whole_number_of_clients_is_that_number():
    assert tolerated(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996


def test_a_liar_in_a_federation_moves_the_weights_no_farther_than_allowed_and_is_named(toy, tmp_path):
    """Its message passes all checks on receipt: it is not yet out of all measure."""
    values = {client: [1.0 + client] * 2 for client in range(5)}
    honest = toy(values=values, rounds=1, folder=tmp_path / "honest").run()[0]
    federation = toy(
        values=values,
        rounds=1,
        robust=RobustAggregation(weights=NormClipping(max_length_ratio=2.0)),
        names=ClientNames({3: "south"}),
    )
    send = federation.client.send
    federation.client.send = lambda loader: {
        name: entry * (-10 if federation.client.context.client == 3 else 1)
        for name, entry in send(loader).items()
    }
    report = federation.run()[0]
    assert [line for line in report.warnings if line.startswith("round 1: site south is an outlier")]
    # 0.75 of the way to 1, 2, 3, 5, and minus twice the median change instead of minus ten times four.
    expected = 0.75 * (1 + 2 + 3 + 5 - 2 * 3) / 5
    assert report.scalars["weight"] == pytest.approx(expected)
    assert honest.scalars["weight"] == pytest.approx(0.75 * 3)


@pytest.mark.parametrize(
    "without", ["federation/robust=null", "~federation/robust", "federation.robust=null"]
)
def test_robust_aggregation_may_be_taken_out_as_a_whole(without):
    assert compose(["backbone=own", without])["federation"].get("robust") is None

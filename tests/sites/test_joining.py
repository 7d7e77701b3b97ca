"""Sites come to a run that has begun, and leave it."""

import pytest
from helpers.sites import DEBUG, HERE, NAMES, Here, paint, three_sites

from lit_fedad.contracts.exchange import Exchange, Exchanges
from lit_fedad.experiment.build import build_model
from lit_fedad.sites.coordinator import Plan, coordinate, joinable
from lit_fedad.sites.messages import Request
from lit_fedad.sites.overrides import compose_overrides

SKIP = "federation.sampler.on_failure=skip"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joining")
    paint(folder)
    return folder


class Comes(Here):
    """A carrier to two sites, and to a third from a round on."""

    def __init__(self, sites, round):
        super().__init__(sites[:2])
        self.late, self.round, self.reached = sites[2], round, -9

    def carry(self, requests, most):
        for blob in requests.values():
            request = Request.from_bytes(blob)
            self.reached = max(self.reached, request.round if request.kind == "play" else -9)
        yield from super().carry(requests, most)

    def present(self):
        if self.reached >= self.round:
            self.sites[2] = self.late
        return {client: NAMES[client] for client in self.sites}


def play(folder, name, round=1, *more):
    carrier = Comes(three_sites(folder), round)
    overrides = ["method=fedavg", *DEBUG, "rounds=3", SKIP, *more]
    result = coordinate(
        Plan(overrides, NAMES[:2], str(folder / name), HERE), carrier, quiet=True, present=carrier.present
    )
    return carrier, result


@pytest.mark.slow
def test_a_site_joins_between_rounds_and_the_run_goes_on(folder):
    carrier, result = play(folder, "joined", 1, "task.standardise=true")
    taken = {name: own["rounds"] for name, own in result["status"].items()}
    assert taken == {"north": 5, "east": 5, "south": 3}  # of the two before round 1 it caught up with one
    kinds = [
        (request.kind, request.round)
        for asked in carrier.requests
        if 2 in asked
        for request in [Request.from_bytes(asked[2])]
        if request.kind in ("hello", "play")
    ]
    assert kinds == [("hello", 0), ("play", 0), ("play", 2), ("play", 3)]
    asked = [{c: Request.from_bytes(blob).kind for c, blob in sent.items()} for sent in carrier.requests]
    hellos = [[*kinds] for kinds in asked if "hello" in kinds.values()]
    assert hellos == [[0, 1], [2]]
    assert set(result["sites"]) == set(NAMES)


@pytest.mark.slow
def test_a_method_whose_set_up_needs_all_goes_on_without(folder, capfd):
    carrier = Comes(three_sites(folder), 1)
    plan = Plan(
        ["method=federated_subspace", *DEBUG, "rounds=2", SKIP], NAMES[:2], str(folder / "fixed"), HERE
    )
    result = coordinate(plan, carrier, present=carrier.present)
    assert result["status"]["south"]["rounds"] == 0
    told = " ".join("".join(capfd.readouterr()).split())
    assert told.count("site south was not in this run from its beginning, and cannot join") == 1


@pytest.mark.parametrize(
    ("overrides", "accepts"),
    [
        (["method=fedavg"], True),
        (["method=fedavg", "task.standardise=true"], True),
        (["method=fedbn"], True),
        (["method=federated_subspace"], False),
        (["method=federated_bank"], False),
        (["method=feddymem"], False),
        (["method=apple"], False),
        (["method=dbe"], False),
        (["method=fedavg", "federation=secure"], False),
        (["method=fedavg", "federation/privacy=dp_sgd", "federation.privacy.epsilon=8"], False),
    ],
)
def test_who_takes_sites_that_come_late(overrides, accepts):
    config = compose_overrides([*overrides, *DEBUG])
    assert joinable(config, build_model(config, ())) is accepts


def test_one_set_up_exchange_that_needs_all_is_enough():
    class Alone(Exchange):
        joining = "skip"

    assert Exchanges((Alone(),)).joinable
    assert not Exchanges((Alone(), Exchange())).joinable

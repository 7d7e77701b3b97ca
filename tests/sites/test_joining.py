"""Sites come to a run that has begun, and leave it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.sites import DEBUG, HERE, NAMES, Here, quiet_site, settings, three_sites

from lit_fedad.contracts.exchange import Exchange, Exchanges
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.sites.coordinator import ENROLLED, JoinError, Plan, SiteClients, coordinate, joinable
from lit_fedad.sites.messages import Request
from lit_fedad.sites.overrides import compose_overrides
from lit_fedad.sites.remote import NoReply
from lit_fedad.tracking.journal import journal_file

SKIP = "federation.sampler.on_failure=skip"


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


def steps(carrier, client):
    """The requests that a site got, without questions."""
    asked = [Request.from_bytes(sent[client]) for sent in carrier.requests if client in sent]
    return [(request.kind, request.round) for request in asked if request.kind in ("hello", "play")]


@pytest.mark.slow
def test_a_site_joins_between_rounds_and_the_run_goes_on(folder, tmp_path):
    """The run's record does not say either that the run was stopped."""
    carrier, uri = Comes(three_sites(folder), 1), f"sqlite:///{tmp_path / 'mlflow.db'}"
    overrides = ["method=fedavg", *DEBUG, "rounds=3", SKIP, "task.standardise=true"]
    own = (*HERE, "tracking=mlflow", f"tracking.uri={uri}")
    plan = Plan(overrides, NAMES[:2], str(tmp_path / "joined"), own)
    result = coordinate(plan, carrier, quiet=True, present=carrier.present)
    taken = {name: own["rounds"] for name, own in result["status"].items()}
    assert taken == {"north": 3, "east": 3, "south": 2}
    assert steps(carrier, 2) == [("hello", 0), ("play", 0), ("play", 2), ("play", 3)]
    asked = [{c: Request.from_bytes(blob).kind for c, blob in sent.items()} for sent in carrier.requests]
    hellos = [[*kinds] for kinds in asked if "hello" in kinds.values()]
    assert hellos == [[0, 1], [2]]
    assert set(result["sites"]) == set(NAMES)
    record = journal_file(tmp_path / "joined").read_text()
    assert '"FINISHED"' in record
    assert '"stopped"' not in record


def test_a_site_that_does_not_join_is_asked_less_and_less_often(tmp_path):
    clients, asked = SiteClients(Plan([], NAMES, str(tmp_path), ()), Here([]), lambda: {2: "south"}), []
    for round in range(1, 60):
        try:
            clients.on_checkpoint(SimpleNamespace(rounds=100), SimpleNamespace(round=round))
        except JoinError:
            asked.append(round)
    assert asked == [1, 2, 4, 8, 16, 26, 36, 46, 56]


@pytest.mark.parametrize(
    ("round", "refused", "joins"),
    [(-1, set(), False), (0, set(), True), (8, set(), True), (9, set(), False), (8, {2}, False)],
)
def test_sites_join_after_the_set_up_and_before_the_last_round_unless_they_were_refused(
    tmp_path, round, refused, joins
):
    clients = SiteClients(Plan([], NAMES, str(tmp_path), ()), Here([]), lambda: {2: "south"})
    clients.refused = refused
    with pytest.raises(JoinError, match="south") if joins else nullcontext():
        clients.on_checkpoint(SimpleNamespace(rounds=9), SimpleNamespace(round=round))


@pytest.mark.parametrize(("present", "names"), [({4: "far"}, None), ({3: "west", 4: "far"}, ["west", "far"])])
def test_a_site_keeps_its_number_and_so_waits_for_the_one_before_it(tmp_path, present, names):
    """Under another number it would be asked with the key of the site that is not there."""
    clients = SiteClients(Plan([], NAMES, str(tmp_path), ()), Here([]), lambda: present)
    joined = None
    try:
        clients.on_checkpoint(SimpleNamespace(rounds=9), SimpleNamespace(round=1))
    except JoinError as error:
        joined = error.names
    assert joined == (names and [*NAMES, *names])


class Fails(Here):
    """A carrier that loses what the second site answers before round 1."""

    def carry(self, requests, most):
        lost = any(
            request.kind == "play" and request.round <= 0
            for request in map(Request.from_bytes, requests.values())
        )
        first = not any(
            one.round > 0 for sent in self.requests for one in map(Request.from_bytes, sent.values())
        )
        for client, found in super().carry(requests, most):
            yield client, NoReply("gone") if client == 1 and lost and first else found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "asked"),
    [
        (["method=fedavg", "task.standardise=true"], [-1, 0, 1, 2]),
        (["method=federated_bank"], [-1, 1, 2]),
        (["method=scaffold"], [-1, 0, 1, 2]),
    ],
    ids=lambda value: str(value[0]),
)
def test_a_site_that_fails_before_round_1_comes_back(folder, tmp_path, method, asked):
    carrier = Fails(three_sites(folder))
    words = [*method, *DEBUG, "rounds=2", SKIP]
    result = coordinate(Plan(words, NAMES, str(tmp_path / "run"), HERE), carrier, quiet=True)
    assert result["failures"] == {"-1": {"1": "gone"}}
    assert steps(carrier, 1) == [("hello", 0), *(("play", round) for round in asked)]


@pytest.mark.slow
def test_sums_of_a_site_that_comes_late_are_added(folder, tmp_path):
    """The model is that of a run which had the site from its beginning."""
    servers = []
    for name, names in (("late", NAMES[:2]), ("all", NAMES)):
        own = [quiet_site(settings(folder, "north"), name=name, folder=tmp_path / name) for name in NAMES]
        carrier = Comes(own, 1) if name == "late" else Here(own)
        plan = Plan(
            ["method=federated_subspace", *DEBUG, "rounds=2", SKIP], names, str(tmp_path / name / "run"), HERE
        )
        coordinate(plan, carrier, quiet=True, present=getattr(carrier, "present", dict))
        checkpoints = Checkpoints(tmp_path / name / "run" / "checkpoints")
        servers.append(checkpoints.load(checkpoints.latest())[1]["server"])
    late, whole = (server["moments"] for server in servers)
    assert late["count"].tolist() == whole["count"].tolist()
    for part in ("mean", "covariance"):
        torch.testing.assert_close(late[part], whole[part], rtol=1e-9, atol=1e-9)
    assert servers[0]["measured"] == servers[1]["measured"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("apple", "was not in this run from its beginning, and cannot join"),
        ("federated_subspace", "has products that no site had when this run began"),
    ],
)
def test_a_site_that_cannot_join_is_named_once_and_the_run_goes_on(folder, capfd, method, why):
    carrier = Comes(three_sites(folder), 1)
    plan = Plan([f"method={method}", *DEBUG, "rounds=3", SKIP], NAMES[:2], str(folder / method), HERE)
    result = coordinate(plan, carrier, present=carrier.present)
    (trouble,) = result["status"]["south"]["troubles"]
    assert trouble.startswith(f"takes no part: site south {why}")
    told = " ".join("".join(capfd.readouterr()).split())
    assert told.count(f"site south {why}") == 1


@pytest.mark.parametrize(
    ("overrides", "accepts"),
    [
        (["method=fedavg"], True),
        (["method=fedavg", "task.standardise=true"], True),
        (["method=fedbn"], True),
        (["method=federated_subspace"], True),
        (["method=federated_subspace", "task.clusters=4"], False),
        (["method=federated_bank"], True),
        (["method=federated_padim"], True),
        (["method=feddymem"], True),
        (["method=scaffold"], True),
        (["method=feddyn"], True),
        (["method=apple"], False),
        (["method=dbe"], False),
        (["method=fedavg", "federation=secure"], False),
        (["method=fedavg", "federation/privacy=dp_sgd", "federation.privacy.epsilon=8"], False),
    ],
)
def test_which_methods_take_sites_that_come_late(overrides, accepts):
    config = compose_overrides([*overrides, *DEBUG])
    assert joinable(config, build_model(config, ())) is accepts


def test_one_set_up_exchange_that_needs_all_is_enough():
    class Alone(Exchange):
        joining = "skip"

    assert Exchanges((Alone(),)).joinable
    assert not Exchanges((Alone(), Exchange())).joinable


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_while_it_is_at_work_continues_after_its_last_round(folder, tmp_path):
    """Its sites no longer have the states of the round that the moved folder ends with."""
    run = tmp_path / "run"

    class Moves(Here):
        def carry(self, requests, most):
            round = max(Request.from_bytes(blob).round for blob in requests.values())
            if round == 2 and not (tmp_path / "moved").exists():
                run.rename(tmp_path / "moved")
            if round == 3 and (run / "checkpoints").exists() and not (tmp_path / "cut").exists():
                (tmp_path / "cut").touch()
                raise KeyboardInterrupt
            yield from super().carry(requests, most)

    plan = Plan(["method=fedavg", *DEBUG, "rounds=3"], NAMES, str(run), (*HERE, "tracking=off"))
    carrier = Moves(three_sites(folder))
    with pytest.raises(KeyboardInterrupt):
        coordinate(plan, carrier, quiet=True)
    enrolled = [(place / ENROLLED).read_text() for place in (run, tmp_path / "moved")]
    assert enrolled[0] == enrolled[1]
    assert coordinate(plan, carrier, quiet=True)["last"]["round"] == 3

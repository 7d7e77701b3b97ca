"""Sites that draw noise of their own: what is asked twice, what is paid for, and what sums hold."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from helpers.class_sites import CLASSES, class_data, pack, sites
from helpers.sites import DEBUG, HERE, NAMES, Here, message_of, quiet_site, reply_of, settings, with_keys
from safetensors.torch import load

from lit_fedad.contracts import Context, Exchanges, Method, Sums
from lit_fedad.contracts.disclosure import summed
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.privacy.image_privacy import KEY_FILE, ImagePrivacy, Plan
from lit_fedad.privacy.ledger import LEDGER, BudgetError, Ledger
from lit_fedad.privacy.noised_sums import gaussian
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.sites import coordinator
from lit_fedad.sites.coordinator import coordinate
from lit_fedad.sites.messages import Request
from lit_fedad.sites.overrides import compose_overrides
from lit_fedad.sites.refusals import Code
from lit_fedad.sites.site_noise import Asked, SiteNoise, check_promise

RUN = "0123456789abcdef"
CLASSIFIER = [
    "method=fedavg", "task=classifier", "features=frozen", *DEBUG, "rounds=2",
    "federation/privacy=dp_sgd", "federation.privacy.epsilon=8", "federation/robust=off",
]  # fmt: skip
SUBSPACE = ["method=federated_subspace", *DEBUG, "rounds=0"]
OWN = ["cache.enabled=false", "fabric.accelerator=cpu"]


def plan_of(releases=2, **settings):
    return Plan(ImagePrivacy(epsilon=4.0, **settings), 3.0, releases)


class OneSum:
    """An exchange whose sums are noised."""

    name = "sums"
    discloses = (summed("vectors"),)

    @staticmethod
    def upload_spec(client):
        return {"sum": None}

    sums = Sums(by_image=lambda client: type("Form", (), {"shapes": lambda self: {"sum": (2,)}})())


def test_an_answer_is_paid_once_and_another_one_anew(tmp_path):
    noise = SiteNoise(plan_of(), tmp_path, "images", Ledger(tmp_path / LEDGER))
    budget = noise.plan.settings.epsilon
    asked = [Asked("configuration", 1, 0, message, "state") for message in "abcdefghijklmnopqrst"]
    affordable = sum(noise.plan.epsilon(count) <= budget for count in range(1, 20))
    assert 1 <= affordable < 19
    for one in asked[:affordable]:
        noise.pay(OneSum, None, one)
        noise.pay(OneSum, None, one)
    again = SiteNoise(noise.plan, tmp_path, "images", Ledger(tmp_path / LEDGER))  # the site was started anew
    again.pay(OneSum, None, asked[0])
    with pytest.raises(UserError, match=r"this request needs epsilon .* the budget is 4"):
        again.pay(OneSum, None, asked[affordable])
    assert len(noise._ledger.released(tmp_path.name, noise.mechanism)) == affordable


def test_a_second_run_gets_what_the_first_has_left(tmp_path):
    """Noise that the coordinator draws costs nothing in the ledger: the site cannot rely on it."""
    ledger = Ledger(tmp_path / LEDGER, 2.0)
    first, second, third = (
        SiteNoise(plan_of(where=where), tmp_path / run, "images", ledger)
        for run, where in (("first", "distributed"), ("second", "distributed"), ("third", "central"))
    )
    asked = Asked("configuration", 1, 0, "message", "state")
    for noise in (first, third):
        noise.pay(OneSum, None, asked)
    spent = first.plan.epsilon(1)
    assert ledger.spent == {("first", first.mechanism): (spent, first.plan.settings.delta)}
    assert 1 < spent < 2
    with pytest.raises(UserError, match=f"this site has epsilon {2 - spent:.4g} left of 2"):
        second.pay(OneSum, None, asked)


def test_a_run_that_asks_for_more_than_is_left_is_refused_before_it_begins(folder, tmp_path):
    limited = replace(with_keys(folder, "north"), folder=tmp_path, epsilon=8.0)
    Ledger(limited.folder / LEDGER).spend("earlier", "noise", 6.0, 1e-5)

    def said(epsilon):
        privacy = ["federation/privacy=distributed", f"federation.privacy.epsilon={epsilon}"]
        request = Request("hello", RUN, [*SUBSPACE, "federation=secure", *privacy], 0)
        return reply_of(quiet_site(limited), request).cause

    assert "has epsilon 2 left, and this asks for 4" in said(4)
    assert not said(1)


def test_all_that_determines_an_answer_changes_the_noise(tmp_path):
    """The size of the noise is part of that: the same noise in two sizes would tell what it hides."""

    def drawn(noise, asked):
        exchange = noise.exchanges(Method(None, None, Exchanges((), (OneSum(),))), asked).rounds[0]
        return gaussian(exchange._key, Context(0, 1), {"sum": (3,)}, 1.0)["sum"]

    noise = SiteNoise(plan_of(where="distributed"), tmp_path, "images", Ledger(tmp_path / LEDGER))
    first = Asked("configuration", 1, 0, "message", "state")
    others = [replace(first, **change) for change in (
        {"configuration": "other"}, {"round": 2}, {"exchange": 1}, {"message": "other"}, {"state": "other"},
    )]  # fmt: skip
    found = [drawn(noise, asked) for asked in (first, *others)]
    assert torch.equal(drawn(noise, replace(first)), found[0])
    noise.share(SecureSum(), 5)
    found.append(drawn(noise, first))
    assert all(not torch.equal(one, other) for one, other in combinations(found, 2))


def test_shares_make_up_the_noise_of_a_sum_of_enough(tmp_path):
    noise = SiteNoise(plan_of(where="distributed"), tmp_path, "images", Ledger(tmp_path / LEDGER))
    noise.share(SecureSum(), 5)
    assert noise.plan.carriers == 3
    assert 3 * noise.plan.noise.share**2 == pytest.approx(noise.plan.noise.deviation**2)
    noise.check_sum([0, 1, 4])
    with pytest.raises(UserError, match="sum of 2 sites, which holds less noise than that of 3"):
        noise.check_sum([0, 1])


def test_a_run_that_takes_the_whole_budget_goes_on_where_its_site_is_started_again(tmp_path):
    plan = plan_of(where="distributed")
    ledger = Ledger(tmp_path / LEDGER, plan.epsilon(plan.releases))
    noise = SiteNoise(plan, tmp_path, "images", ledger)
    noise.share(SecureSum(), 5)
    noise.pay(OneSum, None, Asked("configuration", 1, 0, "message", "state"))
    SiteNoise(plan, tmp_path, "images", ledger).check()


@pytest.mark.parametrize(("runs", "hides"), [(0, True), (1, True), (2, False)])
def test_noise_of_many_runs_together_hides_nothing(tmp_path, runs, hides):
    """Each of epsilon 4: an operator who gives no budget has sums of three runs taken for sums without noise."""
    ledger = Ledger(tmp_path / LEDGER)
    for run in range(runs):
        ledger.spend(str(run), "noise", 4.0, 1e-5)
    plan = replace(plan_of(where="distributed"), sigma=1.5)
    assert 3 < plan.epsilon(plan.releases) < 6
    noise = SiteNoise(plan, tmp_path / "own", "images", ledger)
    assert (noise.hides, "counts as none" not in noise.words) == (hides, hides)
    for other in ({"delta": 2e-5}, {"where": "central"}):
        noise.plan = replace(plan, settings=replace(plan.settings, **other))
        assert not noise.hides


def test_noise_that_hides_is_not_used_up_by_more_answers_than_planned(tmp_path):
    """A coordinator gives a large budget and the noise itself, and asks for each sum three times."""
    ledger, plan = Ledger(tmp_path / LEDGER), plan_of(where="distributed")
    settings = replace(plan.settings, epsilon=1000.0)
    noise = SiteNoise(replace(plan, settings=settings, sigma=0.9), tmp_path, "images", ledger)
    asked = [Asked("configuration", 1, 0, message, "state") for message in "abcdef"]
    affordable = next(count for count in range(6) if noise.plan.epsilon(count + 1) > 10)
    for one in asked[:affordable]:
        noise.pay(OneSum, None, one)
    with pytest.raises(BudgetError, match="left of 10"):
        noise.pay(OneSum, None, asked[affordable])
    assert noise.hides
    assert ledger.total[0] <= 10


def test_the_secret_stays_in_the_sites_folder(tmp_path):
    asked = Asked("configuration", 1, 0, "message", "state")
    SiteNoise(plan_of(), tmp_path, "images", Ledger(tmp_path / LEDGER)).pay(OneSum, None, asked)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["federation/privacy=distributed", "federation.privacy.epsilon=8"],
        ["federation/privacy=central", "federation.privacy.epsilon=1"],
        ["federation/privacy=distributed"],
        ["federation/privacy=dp_sgd", "federation.privacy.epsilon=4", "federation.privacy.delta=0.1"],
        ["federation/privacy=distributed", "federation.privacy.epsilon=4", "federation.privacy.delta=2e-5"],
    ],
)
def test_an_operator_who_asks_for_a_promise_gets_it_or_nothing(overrides):
    config = compose_overrides([*SUBSPACE, *overrides])
    check_promise(config, None)
    with pytest.raises(UserError, match="epsilon of at most 4"):
        check_promise(config, 4)


def test_a_promise_that_is_kept_is_taken():
    for choice in ("distributed", "dp_sgd"):
        overrides = [f"federation/privacy={choice}", "federation.privacy.epsilon=4"]
        check_promise(compose_overrides([*SUBSPACE, *overrides]), 4)


def test_noise_that_the_coordinator_knows_is_refused():
    with pytest.raises(UserError, match="federation.privacy.seed: whoever knows it"):
        compose_overrides([*SUBSPACE, "federation/privacy=distributed", "federation.privacy.seed=1"])


class Asking:
    """Asks one site to train, with whatever message."""

    def __init__(self, folder, epsilon=None):
        pack(folder, own_numbers=False)
        self.site = sites(folder, class_data)[0]
        self.site.settings = replace(self.site.settings, epsilon=epsilon)
        config = coordinator.Plan(CLASSIFIER, ["north"], "x", classes=CLASSES).config()
        self.model = build_model(config, CLASSES)
        self.config = config

    def train(self, change=0.0):
        server = self.model.server
        server.weights = {
            name: entry + change if entry.is_floating_point() else entry
            for name, entry in server.weights.items()
        }
        payload = message_of(self.config, self.model)
        request = Request("play", RUN, CLASSIFIER, 0, [*CLASSES], round=1, step=1, payload=payload)
        return reply_of(self.site, request)


@pytest.mark.slow
def test_asked_twice_a_site_draws_the_same_noise_and_asked_otherwise_another(tmp_path):
    pytest.importorskip("opacus")
    asking = Asking(tmp_path, epsilon=8)
    first, again = asking.train(), asking.train()
    assert not first.cause
    assert first.payload == again.payload
    assert not first.scalars  # losses are of its images
    other = asking.train(change=1e-3)
    weights = [load(reply.payload)["classifier.weight"] for reply in (first, other)]
    # The same noise moves both in the same way from where they start: the spread of their difference is then .00006,
    # and .011 with another. The noise is a secret's, so the bound stands far from both.
    assert (weights[1] - weights[0]).std() > 0.001
    assert not other.cause
    assert asking.train(change=2e-3).code == Code.FAILED  # the noise was made for 2 answers


@pytest.mark.slow
def test_a_federation_whose_sites_train_privately(tmp_path):
    pytest.importorskip("opacus")
    pack(tmp_path, own_numbers=False)
    plan = coordinator.Plan(CLASSIFIER, NAMES, str(tmp_path / "run"), HERE, CLASSES)
    result = coordinate(plan, Here(sites(tmp_path, class_data)), quiet=True)
    spent = result["differential_privacy"]
    assert 7 < spent["epsilon"] <= 8
    assert spent["secret"]
    assert not list((tmp_path / "run").rglob(KEY_FILE))  # sites alone have secrets
    assert result["client_losses"] in ({}, None) or not any(result["client_losses"])


def centre(folder, name, noise):
    """The centre of features that sites find with so much noise."""
    found = [quiet_site(with_keys(folder, own, *OWN)) for own in NAMES]
    private = ["federation/privacy=distributed", "federation.privacy.epsilon=1e12"]
    overrides = [*SUBSPACE, "federation=secure", *private, f"federation.privacy.noise={noise}"]
    plan = coordinator.Plan(overrides, NAMES, str(folder / name), OWN)
    result = coordinate(plan, Here(found), quiet=True)
    checkpoints = Checkpoints(folder / name / "checkpoints")
    return checkpoints.load(checkpoints.latest())[1]["server"]["moments"]["centre"], result


@pytest.mark.slow
def test_shares_of_sites_add_up_to_the_noise_that_was_planned(folder):
    (plain, _), (little, told), (much, _) = (
        centre(folder, f"noise_{noise}", noise) for noise in (0.00001, 0.001, 0.03)
    )
    small, large = (little - plain).norm(), (much - plain).norm()
    assert 0 < small < 0.1 * plain.norm()
    assert 3 < large / small < 300  # 30, as the noise; both are random
    spent = told["differential_privacy"]
    assert (spent["noise"], spent["where"], spent["sums"]) == (0.001, "distributed", 3)


class Drawn(Exception):  # noqa: N818
    """Ends a run that would draw noise."""


@pytest.mark.slow
def test_a_coordinator_that_goes_on_with_other_sites_draws_other_noise(folder, tmp_path, monkeypatch):
    """The difference of two sums with the same noise would show what one site sends."""
    images = ("north", "east", "east")  # a product that no site had yet could not come
    found = [quiet_site(settings(folder, name, *OWN)) for name in images]
    private = ["federation/privacy=central", "federation.privacy.epsilon=8"]
    overrides = [*SUBSPACE, *private, "federation.sampler.on_failure=skip"]
    plan = coordinator.Plan(overrides, NAMES, str(tmp_path / "run"), OWN)

    def drawn(folder, seed, images):
        raise Drawn(images)

    def key(sites):
        with pytest.raises(Drawn) as caught:
            coordinate(plan, Here(sites), quiet=True)
        return caught.value.args

    monkeypatch.setattr(coordinator, "noise_key", drawn)
    two = key(found[:2])
    assert two == key(found[:2])
    assert two != key(found)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["method=fedavg", "federation=secure", "federation/privacy=distributed"],
            "exchange 'statistics' of FedAvgClient is no sum over images",
        ),
        (
            [*SUBSPACE, "federation/privacy=distributed"],
            "where=distributed: a client's share of the noise hides",
        ),
        (["method=fedavg", "federation/privacy=dp_sgd"], "sends more than weights that are trained"),
    ],
)
def test_a_method_that_cannot_be_noised_is_refused_before_sites_are_asked(tmp_path, overrides, line):
    """Each site would say that entry N of its log says why."""
    if "federation/privacy=dp_sgd" in overrides:
        pytest.importorskip("opacus")
    words = [*overrides, "federation.privacy.epsilon=8", *DEBUG]
    plan = coordinator.Plan(words, NAMES, str(tmp_path / "run"), HERE)
    with pytest.raises(UserError, match=line):
        coordinate(plan, Here([]), quiet=True)

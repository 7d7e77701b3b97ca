"""Who takes part is settled when a run begins, and holds when it goes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lit_fedad
from lit_fedad.core.errors import UserError
from lit_fedad.federation.transport import Outcome
from lit_fedad.sites import enrolment
from lit_fedad.sites.enrolment import SiteSizes, check_agreement, enrol
from lit_fedad.sites.messages import Facts, Reply

NAMES = {0: "north", 1: "east"}
CONFIG = {"federation": {"sampler": {"on_failure": "skip"}}}
FACTS = {
    client: Facts(lit_fedad.__version__, torch.__version__, "c", "b", "i", [{product: 6}], {product: 8})
    for client, product in enumerate(("nut", "bolt"))
}


@pytest.fixture(autouse=True)
def model(monkeypatch):
    """A model of which sites have the same."""
    monkeypatch.setattr(enrolment, "agreed", lambda config: "c")
    monkeypatch.setattr(enrolment, "digest_of", lambda state: "i")
    monkeypatch.setattr(enrolment, "state_of", lambda client: {})
    return SimpleNamespace(
        fingerprint="b", client=None, task=SimpleNamespace(state_dict=nn.Module().state_dict)
    )


def call(folder, model, away=(), config=CONFIG):
    """Enrols both sites, but those that are away; returns the transport and what `enrol` does."""
    values = {client: Reply(facts=own) for client, own in FACTS.items() if client not in away}
    sites = SimpleNamespace(hello=lambda: Outcome(values, dict.fromkeys(away, "did not connect")), classes=())
    return sites, *enrol(sites, config, model, NAMES, folder / "sites.json")


def test_a_run_goes_on_without_a_site_that_is_away(tmp_path, model):
    sites, facts, warnings = call(tmp_path, model)
    assert (facts, warnings, sites.products) == (FACTS, [], ["nut", "bolt"])
    sites, facts, warnings = call(tmp_path, model, away=[0])
    assert (facts, sites.products) == (FACTS, ["nut", "bolt"])
    assert list(facts) == [0, 1]
    assert warnings == [
        "site north: did not connect; the run goes on, and it takes part again when it answers"
    ]


def test_a_run_does_not_begin_without_one(tmp_path, model):
    with pytest.raises(UserError, match="^site north: did not connect$"):
        call(tmp_path, model, away=[0])


def test_a_run_that_fails_with_a_client_does_not_go_on_without_it(tmp_path, model):
    call(tmp_path, model)
    with pytest.raises(UserError, match="^site north: did not connect$"):
        call(tmp_path, model, away=[0], config={"federation": {"sampler": {"on_failure": "fail"}}})
    with pytest.raises(UserError, match="^site north: did not connect$"):
        call(tmp_path, model, away=[0, 1])


@pytest.mark.parametrize("content", ["{", "[]", '{"north": {}}', '{"north": {"other": 1}, "east": {}}'])
def test_what_was_kept_and_cannot_be_read_is_told(tmp_path, model, content):
    (tmp_path / "sites.json").write_text(content)
    with pytest.raises(UserError, match=r"sites\.json: cannot be read; remove it"):
        call(tmp_path, model, away=[0])


def test_sizes_follow_the_stages_of_each_site():
    """Two stages, one, and three in six rounds; rounds before the first are of the first stage."""
    stages = {0: [{"nut": 4}, {"bolt": 2}], 1: [{"nut": 3, "cap": 2}], 2: [{"a": 1}, {"b": 2}, {"c": 3}]}
    facts = {client: Facts(stages=own) for client, own in stages.items()}
    sizes = SiteSizes.of(facts, rounds=6)
    assert [dict(sizes.at(round).sizes) for round in (-1, 1, 3, 4, 5, 6)] == [
        {0: 4, 1: 5, 2: 1}, {0: 4, 1: 5, 2: 1}, {0: 4, 1: 5, 2: 2}, {0: 2, 1: 5, 2: 2}, {0: 2, 1: 5, 2: 3},
        {0: 2, 1: 5, 2: 3},
    ]  # fmt: skip
    assert sizes.sizes == {0: 6, 1: 5, 2: 6}
    assert dict(sizes.at(5).stages) == {0: 1, 1: 0, 2: 2}
    assert sizes.milestones == {2, 3, 4, 6}
    assert [facts[0].of_product(name) for name in ("nut", "bolt", "cap")] == [4, 2, 0]


def test_without_stages_nothing_changes_with_the_rounds():
    sizes = SiteSizes.of({0: Facts(stages=[{"nut": 4}]), 1: Facts(stages=[{"nut": 5}])}, rounds=0)
    assert (sizes.milestones, sizes.at(3).sizes, sizes.at(3).stages) == (set(), {0: 4, 1: 5}, {0: 0, 1: 0})


@pytest.mark.parametrize(
    ("stages", "cause"),
    [
        ([{"nut": 1}, {"bolt": 1}, {"cap": 1}], "rounds=2, but the images of site east come in 3 stages"),
        ([{"nut": 1}, {"bolt": 0}], "site east has no image to train with"),
    ],
)
def test_stages_that_a_site_cannot_have_are_refused(model, stages, cause):
    facts = FACTS | {1: replace(FACTS[1], stages=stages)}
    with pytest.raises(UserError, match=cause):
        check_agreement(CONFIG | {"rounds": 2}, model, facts, NAMES)

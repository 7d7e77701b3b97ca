"""Who takes part is settled when a run begins, and holds when it goes on."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lit_fedad
from lit_fedad.errors import UserError
from lit_fedad.federation.transport import Outcome
from lit_fedad.sites import enrolment
from lit_fedad.sites.enrolment import enrol
from lit_fedad.sites.letters import Facts, Reply

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
    monkeypatch.setattr(enrolment, "read_kept", lambda client: {})
    return SimpleNamespace(
        fingerprint="b", client=None, task=SimpleNamespace(learned_state=nn.Module().state_dict)
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

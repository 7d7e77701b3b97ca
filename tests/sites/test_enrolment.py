"""Who takes part is settled when a run begins, and holds when it goes on."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lit_fedad
from lit_fedad.core.errors import UserError
from lit_fedad.federation.transport import Outcome
from lit_fedad.sites import enrolment
from lit_fedad.sites.enrolment import ABSENT, SiteSizes, enrol
from lit_fedad.sites.messages import Facts, Reply

NAMES = {0: "north", 1: "east"}
FACTS = {
    client: Facts(lit_fedad.__version__, torch.__version__, "c", "b", "i", [{product: 6}], {product: 8})
    for client, product in enumerate(("nut", "bolt"))
}


@pytest.fixture(autouse=True)
def model(monkeypatch):
    """A model that has the same weights at all sites."""
    monkeypatch.setattr(enrolment, "agreed_hash", lambda config: "c")
    monkeypatch.setattr(enrolment, "digest_of", lambda state: "i")
    monkeypatch.setattr(enrolment, "state_of", lambda client: {})
    monkeypatch.setattr(enrolment, "tells_products", lambda config: False)
    return SimpleNamespace(
        fingerprint="b",
        client=None,
        task=SimpleNamespace(state_dict=nn.Module().state_dict),
        provenance={"name": "resnet10t", "taken": "own"},
    )


def call(folder, model, away=(), policy="skip", facts=FACTS, joinable=True, known=None, classes=()):
    """Enrols both sites, but those that are away; returns the transport and what `enrol` does."""
    values = {client: Reply(facts=own) for client, own in facts.items() if client not in away}
    sites = SimpleNamespace(
        hello=lambda clients: Outcome(
            {c: values[c] for c in clients if c in values}, dict.fromkeys(away, "did not connect")
        ),
        asked=SimpleNamespace(classes=classes),
        told_apart=[],
        names=list(NAMES.values()),
    )
    config = {"federation": {"sampler": {"on_failure": policy}}, "rounds": 3}
    return sites, *enrol(sites, config, model, folder / "sites.json", joinable, known or {})


def test_a_run_goes_on_without_a_site_that_is_away(tmp_path, model):
    sites, facts, warnings = call(tmp_path, model)
    assert (facts, warnings, sites.products) == (FACTS, [], ["nut", "bolt"])
    sites, facts, warnings = call(tmp_path, model, away=[0])
    assert (facts, sites.products) == (FACTS, ["nut", "bolt"])
    assert list(facts) == [0, 1]
    assert warnings == [
        "site north: did not connect; the run goes on, and it takes part again when it answers"
    ]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_run_whose_sites_all_agree_has_no_trouble(tmp_path, model, policy):
    sites, facts, warnings = call(tmp_path, model, policy=policy)
    assert (facts, warnings, sites.left_out, sites.told_apart) == (FACTS, [], {}, [])


def test_classes_stand_in_the_federations_order(tmp_path, model):
    sites, *_ = call(tmp_path, model, classes=("bolt", "cap", "nut"))
    assert sites.products == ["bolt", "cap", "nut"]


def test_a_site_that_differs_is_left_out_whatever_it_said_before(tmp_path, model):
    call(tmp_path, model)
    sites, facts, _ = call(tmp_path, model, facts=FACTS | {0: replace(FACTS[0], initial="j")})
    assert (facts, set(sites.left_out)) == ({0: ABSENT, 1: FACTS[1]}, {0})


def test_a_site_without_images_is_not_what_others_are_compared_with(tmp_path, model):
    form = "3 classes and sets of anomalies (0123abcd)"
    given = {0: replace(FACTS[0], stages=[]), 1: replace(FACTS[1], form=form, anomalies=["odd"])}
    sites, facts, _ = call(tmp_path, model, facts=given)
    assert (facts, set(sites.left_out)) == ({0: ABSENT, 1: given[1]}, {0})


def test_sites_of_the_minor_version_before_and_of_a_stage_for_every_round_take_part(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr(lit_fedad, "__version__", "0.4.2")
    given = {
        0: replace(FACTS[0], version="0.3.1"),
        1: replace(FACTS[1], version="0.4.2", stages=[{"bolt": 6}] * 3),
    }
    _, facts, warnings = call(tmp_path, model, facts=given)
    assert facts == given
    assert warnings == ["site north has lit_fedad 0.3.1, here is 0.4.2: last digits may differ"]


def test_a_site_that_says_to_have_nearly_all_images_is_named(tmp_path, model):
    """Its messages weigh by that number, and nobody else can check it."""
    given = FACTS | {1: replace(FACTS[1], stages=[{"bolt": 1e8}])}
    assert call(tmp_path, model, facts=given)[2] == [
        "site east says that it has 100000000 of all 100000006 images: the merged model is nearly its own; ask its"
        " operator"
    ]


def test_a_run_begins_without_a_site_that_may_join_later(tmp_path, model):
    _, facts, warnings = call(tmp_path, model, away=[0])
    assert facts == {0: ABSENT, 1: FACTS[1]}
    assert warnings == ["site north: did not connect; the run goes on"]
    _, facts, _ = call(tmp_path, model)
    assert facts == FACTS


def test_a_site_that_comes_late_is_named_where_the_method_takes_none(tmp_path, model):
    call(tmp_path, model, away=[0])
    sites, facts, warnings = call(tmp_path, model, joinable=False)
    assert (facts, set(sites.left_out)) == ({0: ABSENT, 1: FACTS[1]}, {0})
    assert warnings == [
        "site north was not in this run from its beginning, and cannot join: another out in federation.yaml is another"
        " run; the run goes on"
    ]


def test_products_that_a_model_tells_apart_are_those_of_the_sites_that_began(tmp_path, model, monkeypatch):
    """A site that comes late may hold some of them, and no other; their order stays, whoever comes.

    Also where the coordinator was killed before its first checkpoint: to the sites it is the same run.
    """
    monkeypatch.setattr(enrolment, "tells_products", lambda config: True)
    sites, *_ = call(tmp_path, model, away=[0])
    assert sites.told_apart == sites.products == ["bolt"]
    sites, facts, (warning,) = call(tmp_path, model)
    assert (sites.told_apart, set(sites.left_out), facts[0]) == (["bolt"], {0}, ABSENT)
    assert warning.startswith("site north has products that no site had when this run began")
    of_both = FACTS | {1: replace(FACTS[1], held={"bolt": 4, "nut": 4})}
    (another := tmp_path / "another").mkdir()
    call(another, model, away=[0], facts=of_both)
    sites, facts, warnings = call(another, model, facts=of_both)
    assert (sites.told_apart, facts, warnings) == (["bolt", "nut"], of_both, [])


def test_products_are_named_anew_where_what_was_kept_is_gone(tmp_path, model, monkeypatch):
    monkeypatch.setattr(enrolment, "tells_products", lambda config: True)
    assert call(tmp_path, model)[0].told_apart == ["nut", "bolt"]


@pytest.mark.parametrize(
    ("apart", "most", "advice"), [(True, 200, r"\), or give a method"), (False, 1000, r"\)$")]
)
def test_more_products_than_a_model_tells_apart_or_a_message_names_are_refused(
    tmp_path, model, monkeypatch, apart, most, advice
):
    """Sites could not read the longer lists of names, and said that their versions differ."""
    monkeypatch.setattr(enrolment, "tells_products", lambda config: apart)
    half = most // 2
    many = {c: replace(own, held={f"{c}.{n}": 1 for n in range(half + 1 - c)}) for c, own in FACTS.items()}
    said = (
        rf"^sites name {most + 1} products, and at most {most} take part in such a run; site north names most,"
        rf" {half + 1}: leave some out \(data.products at the sites{advice}"
    )
    with pytest.raises(UserError, match=said):
        call(tmp_path, model, facts=many)
    many[0].held.popitem()
    assert len(call(tmp_path, model, facts=many)[0].products) == most


def test_a_site_that_is_known_is_not_asked_again(tmp_path, model):
    _, facts, _ = call(tmp_path, model, known={1: replace(FACTS[1], torch="3")})
    assert (facts[0], facts[1].torch) == (FACTS[0], "3")


@pytest.mark.parametrize("away", [[0], [0, 1]])
def test_a_run_ends_where_its_policy_says_so_or_nobody_is_left(tmp_path, model, away):
    call(tmp_path, model)
    named = {
        0: "^site north: did not connect$",
        1: "^site north: did not connect; site east: did not connect$",
    }
    with pytest.raises(UserError, match=named[away[-1]]):
        call(tmp_path, model, away, "fail" if len(away) < 2 else "skip")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": "0.1.0"}, r"site north has another version of lit_fedad \(0.1.0, here"),
        ({"configuration": "d"}, "site north has another composed configuration"),
        (
            {"backbone": ""},
            r"site north has another backbone \(none, here b\); give it the same file .*: here own, of resnet10t",
        ),
        ({"initial": "j"}, "site north has another initial weights"),
        ({"stages": []}, "site north has no image to train with"),
        ({"stages": [{"nut": 1}] * 4}, "site north has images in 4 stages, and rounds=3"),
        ({"stages": [{"nut": 1}, {"bolt": 0}]}, "site north has no image to train with"),
    ],
)
def test_a_site_that_differs_is_named_and_does_not_stop_the_rest(tmp_path, model, change, line):
    differing = FACTS | {0: replace(FACTS[0], **change)}
    sites, facts, (warning,) = call(tmp_path, model, facts=differing)
    assert (facts, set(sites.left_out)) == ({0: ABSENT, 1: FACTS[1]}, {0})
    assert re.match(line, warning)
    assert re.match(line, sites.absent[0])
    with pytest.raises(UserError, match=line):
        call(tmp_path, model, policy="fail", facts=differing)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"north": {}}', '{"products": [], "sites": {"north": {"client": 0, "other": 1}}}'],
)
def test_stored_facts_that_cannot_be_read_are_named(tmp_path, model, content):
    (tmp_path / "sites.json").write_text(content)
    with pytest.raises(UserError, match=r"sites\.json: cannot be read; remove it"):
        call(tmp_path, model, away=[0])


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 3}, {"stages": [{"nut": -3.0}]}, {"stages": [{"nut": 1.5}]}, {"stages": [[1]]}, {"held": [1]},
        {"held": {" ": 1.0}}, {"tested": "x"}, {"version": 5}, {"backbone": "a b"}, {"anomalies": "ab"},
        {"form": None}, {"client": [0]},
    ],
    ids=str,
)  # fmt: skip
def test_stored_facts_have_types_and_ranges(tmp_path, model, change):
    call(tmp_path, model)
    content = json.loads((tmp_path / "sites.json").read_text())
    content["sites"]["north"] |= change
    (tmp_path / "sites.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"sites\.json: cannot be read; remove it"):
        call(tmp_path, model, away=[0])


@pytest.mark.parametrize("products", ["ab", [1], ["nut", "nut"], {"nut": 1}, None], ids=str)
def test_stored_products_are_names(tmp_path, model, products):
    call(tmp_path, model)
    content = json.loads((tmp_path / "sites.json").read_text())
    (tmp_path / "sites.json").write_text(json.dumps(content | {"products": products}))
    with pytest.raises(UserError, match=r"sites\.json: cannot be read; remove it"):
        call(tmp_path, model, away=[0])


def test_a_site_keeps_its_place(tmp_path, model, monkeypatch):
    call(tmp_path, model)
    monkeypatch.setitem(NAMES, 0, "east")
    monkeypatch.setitem(NAMES, 1, "north")
    with pytest.raises(UserError, match="sites: north has been in this run and keeps its place"):
        call(tmp_path, model)


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
    assert sizes.stages == {0: 0, 1: 0, 2: 0}  # of no round
    assert sizes.milestones == {2, 3, 4, 6}
    assert [facts[0].of_product(name) for name in ("nut", "bolt", "cap")] == [4, 2, 0]


def test_a_site_that_is_away_has_no_image_in_any_stage():
    sizes = SiteSizes.of({0: Facts(stages=[{"nut": 4}, {"bolt": 2}]), 1: ABSENT}, rounds=2)
    assert [dict(sizes.at(round).sizes) for round in (1, 2)] == [{0: 4, 1: 0}, {0: 2, 1: 0}]


def test_without_stages_nothing_changes_with_the_rounds():
    sizes = SiteSizes.of({0: Facts(stages=[{"nut": 4}]), 1: Facts(stages=[{"nut": 5}])}, rounds=0)
    assert (sizes.milestones, sizes.at(3).sizes, sizes.at(3).stages) == (set(), {0: 4, 1: 5}, {0: 0, 1: 0})

"""Requests and replies are read as what anybody could have sent."""

import json
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.sites.messages import Facts, Reply, Request
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.site_part import federated_images

RUN = "0123456789abcdef"
REQUEST = Request(
    "ask", RUN, ["method=fedavg", "rounds=2"], 3, round=-1, step=7, base=5, settled=4, keep=True,
    question="decisions", numbers={"nut": 0.5, "bolt": float("inf")}, names=["nut", "bolt"], payload=b"\x00payload",
)  # fmt: skip


def test_what_is_written_is_read():
    assert Request.from_bytes(REQUEST.to_bytes()) == REQUEST
    facts = Facts("0.2", "2.11", "c", "b", "i", [{"nut": 6}], {"nut": 8})
    reply = Reply(scalars={"loss": 0.25}, facts=facts, payload=b"abc")
    assert Reply.from_bytes(reply.to_bytes()) == reply
    assert reply.facts.size == 6


def changed(**values):
    """A request whose header says something else."""
    blob = REQUEST.to_bytes()
    (length,) = struct.unpack_from(">I", blob)
    header = json.loads(blob[4 : 4 + length]) | values
    text = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    return struct.pack(">I", len(text)) + text


@pytest.mark.parametrize(
    "values",
    [
        {"client": -1}, {"client": True}, {"client": "3"}, {"client": 10_000}, {"run": "../../etc"}, {"kind": "run"},
        {"base": 8}, {"settled": 6}, {"step": 1 << 41}, {"overrides": "method=fedavg"}, {"overrides": [1]},
        {"overrides": ["x" * 501]},
        {"numbers": {"nut": "1"}}, {"keep": 1}, {"exchange": -1}, {"round": None}, {"more": 1}, {"payload": "x"},
        {"names": ["x"] * 1001}, {"same": 3}, {"kind": "play"}, {"numbers": {"nut": 10**400}},
        {"question": "images"}, {"question": "Decisions"}, {"kind": "run", "question": ""}, {"run": [RUN]},
        {"round": 1 << 31}, {"sealed": 1}, {"sealed": -1},
    ],
)  # fmt: skip
def test_requests_of_another_form_are_refused(values):
    with pytest.raises(UserError, match="^the coordinator sent"):
        Request.from_bytes(changed(**values))


@pytest.mark.parametrize(
    "blob", [b"", b"\x00", b"\x00\x00\x00\x05{", struct.pack(">I", 2) + b"[]", b"\xff" * 64]
)
def test_other_bytes_are_refused(blob):
    for kind in (Request, Reply):
        with pytest.raises(UserError):
            kind.from_bytes(blob)


def test_a_header_longer_than_any_is_not_read():
    blob = REQUEST.to_bytes()
    (length,) = struct.unpack_from(">I", blob)
    for spaces, refused in ((1, False), (1 << 20, True)):
        padded = struct.pack(">I", length + spaces) + blob[4 : 4 + length] + b" " * spaces
        with pytest.raises(UserError, match="hold no message") if refused else nullcontext():
            Request.from_bytes(padded)


def test_another_version_is_told():
    with pytest.raises(UserError, match="another version of lit_fedad: install the same at all sites"):
        Request.from_bytes(changed(format=6))


@pytest.mark.parametrize("size", [-1, 0.5, 1e12, float("nan")])
def test_sizes_are_numbers_of_images(size):
    with pytest.raises(UserError, match="no numbers of images"):
        Reply.from_bytes(Reply(facts=Facts(stages=[{"nut": size}])).to_bytes())


@pytest.mark.parametrize(
    "names", [["nut"] * 2, ["x" * 101], [" "], [f"nut {number}" for number in range(201)]]
)
def test_names_of_products_are_few_and_short(names):
    for kind in ("products", "classes"):
        with pytest.raises(UserError, match="out of range"):
            Request.from_bytes(changed(**{kind: names}))
    if len(set(names)) == len(names):
        with pytest.raises(UserError, match="names that are not those of at most 200 products"):
            Reply.from_bytes(Reply(facts=Facts(tested=dict.fromkeys(names, 1))).to_bytes())


def test_a_terminal_is_not_given_requests():
    reply = Reply.from_bytes(Reply(facts=Facts(anomalies=["1\x1b[2J"])).to_bytes())
    assert reply.facts.anomalies == ["1\\x1b[2J"]


@pytest.mark.parametrize(
    "said",
    [
        {"torch": "2.0 (see http://x)"}, {"version": "1\n"}, {"backbone": "x" * 65}, {"initial": "\u0430" * 16},
        {"configuration": "../.."}, {"form": "3 classes and sets of anomalies, and more"},
    ],
)  # fmt: skip
def test_no_free_text_comes_with_versions_and_hashes(said):
    known = Facts(
        "0.3.0",
        "2.13.0+cpu",
        "9cf76328517918dd",
        "none",
        "",
        form="3 classes and sets of anomalies (0a1b2c3d)",
    )
    assert Reply.from_bytes(Reply(facts=known).to_bytes()).facts == known
    with pytest.raises(UserError, match="no versions or hashes"):
        Reply.from_bytes(Reply(facts=replace(known, **said)).to_bytes())


def test_of_an_error_comes_a_number_that_this_version_may_not_know():
    assert "number 999" in Reply.from_bytes(Reply(code=999).to_bytes()).cause
    assert "number 24" in Reply.from_bytes(Reply(code=24).to_bytes()).cause  # without the numbers of its text
    for wrong in (Reply(numbers=[0.0] * 5), Reply(scalars={"\n": 1.0}), Reply(scalars={"a/../b": 1.0})):
        with pytest.raises(UserError, match="more of an error than its number"):
            Reply.from_bytes(wrong.to_bytes())


def test_a_site_draws_no_more_curves_in_the_tracker_than_methods_have():
    with pytest.raises(UserError, match="sent 51 scalars, at most 50"):
        Reply.from_bytes(Reply(scalars={f"loss_{number}": 1.0 for number in range(51)}).to_bytes())


def test_a_site_brings_no_more_products_than_its_facts_hold(tmp_path):
    """Other names would not help: the operator reads how many there are, and where to choose."""
    many = ImageSet("many", tuple(Sample(Path("image.png"), f"{number}") for number in range(201)), ())
    settings = SiteSettings("north", tmp_path, (), ())
    with pytest.raises(RefusalError, match=r"it has 201, and at most 200 .* data\.products") as refused:
        federated_images(many, None, (), settings)
    assert refused.value.code == Code.PRODUCTS
    assert not refused.value.numbers
    of_200 = replace(many, train=many.train[1:])
    assert len(federated_images(of_200, None, (), settings).categories) == 200

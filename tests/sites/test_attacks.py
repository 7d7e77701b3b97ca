"""Attacks on a site: on images, names and files, ledgers and sums, memory; others stand beside what they attack."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from helpers.class_sites import CLASSES, class_data
from helpers.sites import DEBUG, HERE, message_of, quiet_site, reply_of, settings, with_keys
from safetensors.torch import save

from lit_fedad.contracts import TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.channel import Link, Plain
from lit_fedad.sites.claims import Claims
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.overrides import compose_overrides
from lit_fedad.sites.refusals import Code
from lit_fedad.sites.settings import Policy, SiteSettings

RUN = "0123456789abcdef"
SMALL = [*DEBUG, "rounds=1"]


@pytest.fixture
def site(folder, tmp_path):
    """A site of image files with the policy that `site init` writes."""
    return quiet_site(settings(folder, "north"), folder=tmp_path, policy=Policy())


ON_IMAGES = [
    ["method=fedmix", "method.client.group=-5"], ["method=fedmix", "method.client.group=nan"],
    ["method=fedmix", "method.client.group=null"], ["method=fedmix", "method.client.group=five"],
    ["method=fedmix", "federation=secure"], ["method=fedvck", "method.client.init=noise"],
    ["method=fedvck_released"], ["method=creff", "federation=secure"],
]  # fmt: skip
ON_PATCHES = [
    ["method=panda"], ["method=feddymem_literal"], ["method=federated_bank", "federation=secure"],
    ["method=federated_bank", "federation/privacy=central", "federation.privacy.epsilon=1e6"],
    ["method=deep_svdd", "task.objective=soft-boundary", "task.radius_rounds=0", "task.nu=0.001"],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ON_IMAGES + ON_PATCHES, ids=" ".join)
def test_settings_that_ask_for_images_are_refused(folder, tmp_path, site, overrides):
    if overrides in ON_IMAGES:
        own = (*HERE, f"cache.folder={folder / 'cache'}")
        data = class_data(folder / "classes" / "east")
        site = quiet_site(SiteSettings("east", tmp_path, data, own))
    classes = list(CLASSES) if overrides in ON_IMAGES else []
    reply = reply_of(site, Request("hello", RUN, [*SMALL, *overrides], 0, classes))
    assert reply.code
    assert "\n" not in reply.cause
    assert not reply.facts.held


@pytest.mark.parametrize(
    "run", ["../../etc/passwd", "0123456789ABCDEF", "/" * 16, RUN + "\n", RUN[:-1] + "\0", "", "e" * 17]
)
def test_a_runs_number_that_is_a_path_is_refused(run):
    with pytest.raises(UserError, match="out of range"):
        Request.from_bytes(Request("hello", run, SMALL, 0).to_bytes())


def test_links_in_a_sites_folder_are_not_followed(site, tmp_path):
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "elsewhere")
    assert Reply.from_bytes(site.answer(b"x")).code == Code.LOG
    assert (tmp_path / "elsewhere").read_text() == "kept"


@pytest.mark.parametrize(
    "members", [["east", "north", "south"], ["north", "east"], ["north", "east", "south", "west"]]
)
def test_a_run_of_secure_sums_keeps_its_sites(tmp_path, members):
    Claims(tmp_path / "runs.jsonl").fix(RUN, ["north", "east", "south"])
    claims = Claims(tmp_path / "runs.jsonl")
    claims.fix(RUN, ["north", "east", "south"])
    with pytest.raises(UserError, match="under other names or keys"):
        claims.fix(RUN, members)


def test_a_place_of_a_run_has_few_messages(tmp_path):
    for message in ("a", "b", "a", "c", "b"):
        Claims(tmp_path / "runs.jsonl").answer(RUN, (1, 0, "play"), message)
    with pytest.raises(UserError, match="has answered 3 different messages in round 1, and answers no other"):
        Claims(tmp_path / "runs.jsonl").answer(RUN, (1, 0, "play"), "d")
    Claims(tmp_path / "runs.jsonl").answer(RUN, (2, 0, "play"), "d")


@pytest.mark.slow
def test_a_run_keeps_the_products_whose_sums_were_asked_for(site, folder):
    """Sums by other products would be other sums of the same images, and their difference would tell more."""
    (own,) = (folder / "north" / "images").iterdir()
    codes = []
    for others in (["nut"], ["nut", "bolt"], []):
        named = {"products": [own.name, *others], "round": 7, "step": 1, "payload": b"x"}
        request = Request("play", RUN, ["method=federated_subspace", *SMALL], 0, **named)
        codes.append(reply_of(site, request).code)
    assert codes == [Code.EXCHANGE, Code.REUSED, Code.REUSED]


@pytest.mark.slow
def test_no_round_is_answered_that_was_not_offered(site):
    overrides = ["method=federated_padim", *SMALL]
    for round, kind in ((2, "play"), (1 << 30, "play"), (-5, "play"), (3, "ask")):
        asked = {"question": "scores"} if kind == "ask" else {}
        request = Request(kind, RUN, overrides, 0, round=round, step=1, payload=b"x", **asked)
        assert reply_of(site, request).code == Code.EXCHANGE


@pytest.mark.slow
def test_the_difference_of_two_runs_is_of_no_single_image(site, folder):
    """The coordinator chooses what is held out for calibration: of eight images two, three, six."""
    (own,) = (folder / "north" / "images").iterdir()
    codes = []
    for number, share in enumerate((0.25, 0.375, 0.25)):
        overrides = ["method=federated_subspace", f"calibration.share={share}", *SMALL]
        request = Request("play", f"{number:016x}", overrides, 0, products=[own.name], step=1)
        codes.append(reply_of(site, request).code)
    assert codes == [Code.NONE, Code.SUBSET, Code.NONE]


def test_sums_by_product_are_told_apart_also_beside_messages_that_are_not(folder, tmp_path):
    """The difference of two runs may be of few images of a product, however many others there are."""
    (own,) = (folder / "north" / "images").iterdir()
    site, run = quiet_site(settings(folder, "north"), folder=tmp_path), "b" * 16
    overrides = ["method=federated_bank", *SMALL]
    reply_of(site, Request("play", run, overrides, 0, products=[own.name, "nut"], round=-1, step=1))
    begun = [line for line in site.claims.entries() if line["run"] == run and "trained" in line]
    assert [list(line["trained"]) for line in begun] == [[f"0/{own.name}"]]


@pytest.mark.slow
def test_one_message_is_answered_from_few_states(site):
    """The coordinator has the state of a step written again and again."""
    small = ["features=train", "encoder=convnet", "encoder.channels=8", "task.decoder.channels=8"]
    overrides, codes = ["method=scaffold", "task=autoencoder", *small, *SMALL], []
    config = compose_overrides(overrides)
    request = Request("play", RUN, overrides, 0, round=1, payload=message_of(config, build_model(config, ())))
    for step, base in ((1, 0), (1, 0), (2, 1), (2, 2), (2, 2)):
        codes.append(reply_of(site, replace(request, step=step, base=base)).code)
    assert codes == [0, 0, 0, 0, Code.REPEATED]


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "code"), [("8", Code.NONE), ("1e6", Code.NOT_ALLOWED)])
def test_noise_that_hides_nothing_lets_no_sums_of_one_image_out(folder, tmp_path, epsilon, code):
    given = replace(with_keys(folder, "north"), folder=tmp_path, policy=Policy())
    overrides = ["method=federated_bank", "federation=secure", "federation/privacy=distributed", *SMALL]
    request = Request("hello", RUN, [*overrides, f"federation.privacy.epsilon={epsilon}"], 0)
    assert reply_of(quiet_site(given), request).code == code


def framed(text, length=None):
    return struct.pack(">I", len(text) if length is None else length) + text


HEADER = json.loads(Request("hello", RUN, SMALL, 0).to_bytes()[4:])
BLOBS = {
    "longer than it is": framed(b"{}", 1 << 31),
    "nested": framed(b"[" * 500_000 + b"]" * 500_000),
    "digits": framed(json.dumps(HEADER).replace('"step": 0', f'"step": {"9" * 5000}').encode()),
    "exponent": framed(json.dumps(HEADER).replace('"step": 0', '"step": 1e999').encode()),
    "not a number": framed(json.dumps(HEADER).replace('"step": 0', '"step": NaN').encode()),
    "half a pair": framed(json.dumps(HEADER | {"overrides": ["\ud800"]}).encode()),
    "wide": framed(json.dumps(HEADER | {"overrides": ["rounds=1"] * 1001}).encode()),
    "deep": framed(json.dumps(HEADER | {"numbers": {"a": {"b": {"c": 1}}}}).encode()),
    "two bombs": framed(b'{"a":' * 100_000),
    "header of a megabyte and more": framed(b" " * ((1 << 20) + 1)),
    "keys": framed(json.dumps(HEADER | {str(number): 0 for number in range(50_000)}).encode()),
    "no text": framed(b"\xff" * 1000),
}


@pytest.mark.parametrize("blob", BLOBS.values(), ids=BLOBS)
def test_bytes_that_would_fill_the_memory_are_one_code(site, blob):
    reply = Reply.from_bytes(site.answer(blob))
    assert reply.code in (Code.REQUEST, Code.OVERRIDE, Code.CONFIGURATION)
    assert len(reply.to_bytes()) < 2000


def replied(**changes):
    header = json.loads(Reply().to_bytes()[4:])
    facts = header["facts"] | changes.pop("facts", {})
    return framed(json.dumps({**header, "facts": facts, **changes}).encode())


MANY = {f"nut {number}": 1 for number in range(201)}
REPLIES = {
    "products": replied(facts={"held": MANY}),
    "products of a stage": replied(facts={"stages": [MANY]}),
    "stages": replied(facts={"stages": [{}] * 1001}),
    "a long name": replied(facts={"tested": {"x" * 101: 1}}),
    "no name": replied(facts={"held": {"": 1}}),
    "endless images": replied(facts={"held": {"nut": float("inf")}}),
    "sets of anomalies": replied(facts={"anomalies": ["x"] * 1001}),
    "a long version": replied(facts={"version": "x" * 501}),
    "scalars": replied(scalars={str(number): 1 for number in range(1001)}),
    "numbers of a code": replied(numbers=[0.0] * 5),
    "a list of facts": framed(replied()[4:].replace(b'"facts": {', b'"facts": [{', 1) + b"]"),
    "no header": framed(b""),
    "a header in parts": replied()[:40],
}


@pytest.mark.parametrize("blob", REPLIES.values(), ids=REPLIES)
def test_what_a_site_says_of_itself_is_bounded(blob):
    with pytest.raises(UserError) as refused:
        Reply.from_bytes(blob)
    assert len(str(refused.value)) < 200


def tensors(header, data=bytes(16)):
    """Bytes in the format of safetensors."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape, start=0, end=16, kind="F32"):
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


FORM = {"w": TensorSpec((4,))}
TENSORS = {
    "more": save({"w": torch.zeros(4), "v": torch.zeros(1 << 20)}),
    "larger": save({"w": torch.zeros(1 << 20)}),
    "another type": save({"w": torch.zeros(4, dtype=torch.float64)}),
    "endless": save({"w": torch.tensor([0.0, 1.0, torch.inf, 0.0])}),
    "header of an exabyte": struct.pack("<Q", 1 << 60) + b"{}",
    "offsets outside": tensors({"w": tensor([4], end=1 << 40)}),
    "offsets in another order": tensors({"w": tensor([4], start=16, end=0)}),
    "a shape of an exabyte": tensors({"w": tensor([1 << 30, 1 << 30])}),
    "a shape below nothing": tensors({"w": tensor([-4])}),
    "a shape that runs over": tensors({"w": tensor([1 << 62, 1 << 2, 4])}),
    "a type that is none": tensors({"w": tensor([4], kind="F99")}),
    "one in another": tensors({"w": tensor([4]), "v": tensor([4])}),
    "bytes of nobody": tensors({"w": tensor([4])}, bytes(1 << 16)),
    "a long name": tensors({"w" * (1 << 20): tensor([4])}),
}


@pytest.mark.parametrize("blob", TENSORS.values(), ids=TENSORS)
def test_tensors_of_another_form_are_refused_before_they_are_used(blob):
    with pytest.raises(UserError):
        Link(Plain()).unpack(blob, FORM, "the client")

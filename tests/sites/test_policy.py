"""A coordinator that lies: what a site's policy lets out, whatever it asks."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from helpers.class_sites import CLASSES, class_data, semantic_data
from helpers.refusals import refusal
from helpers.sites import DEBUG, HERE, message_of, quiet_site, reply_of, settings

from lit_fedad.contracts.disclosure import Kind, summed
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.sites.coordinator import Plan
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.offer import APPROVED, Approvals, Offer, Taken
from lit_fedad.sites.refusals import KINDS, Code, RefusalError
from lit_fedad.sites.review import review
from lit_fedad.sites.settings import Policy, SiteSettings

RUN = "0123456789abcdef"
SMALL = [*DEBUG, "rounds=1"]


@pytest.fixture
def classes(folder, tmp_path):
    """A site with labelled images, and the policy that `site init` writes."""
    data = class_data(folder / "classes" / "east")
    own = (*HERE, f"cache.folder={folder / 'cache'}")
    return SiteSettings("east", tmp_path, data, own)


@pytest.fixture
def files(folder, tmp_path):
    """A site with image files, and the policy that `site init` writes."""
    return replace(settings(folder, "north"), folder=tmp_path, policy=Policy())


def hello(given, overrides, learnt=(), run=RUN):
    site = quiet_site(given)
    return reply_of(site, Request("hello", run, [*SMALL, *overrides], 0, list(learnt)))


IMAGES, MEANS, PATCHES = (KINDS.index(kind) for kind in (Kind.IMAGES, Kind.MEAN_IMAGES, Kind.PATCHES))
SYNTHETIC, STATISTICS = (KINDS.index(kind) for kind in (Kind.SYNTHETIC_IMAGES, Kind.CLASS_STATISTICS))

ASK_FOR_IMAGES = [
    (["method=fedmix"], Code.NOT_ALLOWED, MEANS),
    (["method=fedmix", "method.client.group=1"], Code.FLOOR, 5),
    (["method=fedmix", "method.client.group=4"], Code.FLOOR, 5),
    (["method=fedmix", "method.client.group=5"], Code.NOT_ALLOWED, MEANS),
    (["method=feddm"], Code.NOT_ALLOWED, IMAGES),
    (["method=feddm", "method.client.init=noise"], Code.NOT_ALLOWED, SYNTHETIC),
    (["method=feddm", "method.client.init=noise", "method.client.min_class_images=1"], Code.FLOOR, 5),
    (["method=fedvck"], Code.NOT_ALLOWED, SYNTHETIC),
    (["method=fedvck", "method.client.init=real"], Code.NOT_ALLOWED, IMAGES),
    (
        ["method=fedvck", "method.client.prototype_images=1", "method.client.min_class_images=1"],
        Code.FLOOR,
        5,
    ),
    (["method=desa"], Code.NOT_ALLOWED, SYNTHETIC),
    (["method=creff"], Code.NOT_ALLOWED, STATISTICS),
    (["method=fedvck_sums"], Code.NOT_ALLOWED, STATISTICS),
    (["method=gldp"], Code.NOT_ALLOWED, STATISTICS),
    (["method=prototype_statistics"], Code.NOT_ALLOWED, STATISTICS),
]
ASK_FOR_PATCHES = [
    (["method=feddymem", "calibration.share=0.2"], Code.NOT_ALLOWED, PATCHES),
    (["method=federated_bank"], Code.NOT_ALLOWED, PATCHES),
    (["method=federated_bank", "method.client.min_images=1"], Code.FLOOR, 2),
    (["method=federated_patchcore"], Code.NOT_ALLOWED, PATCHES),
    (["method=federated_subspace", "task.clusters=4"], Code.NOT_ALLOWED, PATCHES),
    (["method=federated_subspace", "calibration.share=0.0001"], Code.FLOOR, 0.05),
]
ASK_FOR_ONE_BATCH = [
    (["method=fedavg", "batch_size=1"], Code.FLOOR, 4),
    (["method=fedavg", "task.learning_rate=1e6"], Code.CEILING, 1),
    (["method=fedavg", "task.learning_rate=-1e6"], Code.CEILING, 1),
    (["method=fedprox", "task.learning_rate=0.01", "method.client.mu=100"], Code.CEILING, 50),
    (["method=fedprox", "task.learning_rate=1", "task.weight_decay=1"], Code.CEILING, 0.5),
    (["method=fedavg", "task=autoencoder", "calibration.share=0.9"], Code.CEILING, 0.5),
    (["method=fedavg", "rounds=1001"], Code.CEILING, 1000),
    (["method=fedavg", "task=panda", "task.momentum=1.5"], Code.CEILING, 0.99),
    (["method=dbe", "calibration.share=0.1"], Code.NOT_ALLOWED, KINDS.index(Kind.SUMS)),
]


def quick(cases):
    """The first quickly, the others in the slow tests: each composes and builds another federation."""
    return [*cases[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[4:])]


@pytest.mark.parametrize(("overrides", "code", "number"), quick(ASK_FOR_IMAGES))
def test_what_asks_for_images_is_refused(classes, overrides, code, number):
    reply = hello(classes, overrides, CLASSES)
    assert (reply.code, reply.numbers[0]) == (code, number)
    assert not reply.facts.held  # not even numbers of images
    assert "\n" not in reply.cause


@pytest.mark.parametrize(("overrides", "code", "number"), quick(ASK_FOR_PATCHES) + quick(ASK_FOR_ONE_BATCH))
def test_what_asks_for_single_patches_or_one_batch_is_refused(files, overrides, code, number):
    reply = hello(files, overrides)
    assert (reply.code, reply.numbers[0]) == (code, number)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["method=federated_subspace"], 0),
        (["method=fedavg", "task=autoencoder"], 0),
        (["method=federated_subspace", "rounds=0"], 0),
    ],
)
@pytest.mark.slow
def test_sums_and_weights_leave_by_default(files, overrides, code):
    assert hello(files, overrides).code == code


def test_of_four_images_no_sum_leaves(files, tmp_path):
    own = (*HERE, f"cache.folder={tmp_path / 'cache'}")
    few = replace(files, own=own, policy=Policy(images=9))
    reply = hello(few, ["method=federated_subspace"])
    assert (reply.code, reply.numbers[0]) == (Code.NOT_ALLOWED, KINDS.index(Kind.SUMS))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nor are features computed for it


def told_of_test_images(given, *words):
    lines = review(given, Offer([*SMALL, *words], CLASSES)).lines
    return next(line for line in lines if "numbers of test images" in line)


def test_counts_of_a_class_with_few_test_images_need_an_approval(classes):
    told = told_of_test_images(classes, "method=fedavg", "task=classifier_convnet")
    assert told.endswith("by class and predicted class. NEEDS YOUR APPROVAL: 3 images are few.")  # of nine


@pytest.mark.slow
def test_scores_of_a_set_of_few_anomalies_need_an_approval(classes):
    of_set = "+data.anomalies.more."  # beside another set of four
    more = ("_target_=lit_fedad.data.packed.packed", "_partial_=true", "train=null", "test=odd.npz")
    data = (*semantic_data(classes.data[1].partition("=")[2]), *(of_set + word for word in more))
    told = told_of_test_images(replace(classes, data=data), "method=fadngs")
    assert told.endswith("by bin of their score, and set. NEEDS YOUR APPROVAL: 4 images are few.")


@pytest.mark.slow
def test_products_have_numbers_where_the_policy_does_not_tell_their_names(files, folder):
    (own,) = (folder / "north" / "images").iterdir()
    answers = {}
    for names in (True, False):
        given = replace(files, policy=Policy(names=names))
        answers[names] = hello(given, ["method=federated_subspace"])
        told = " ".join(review(given, Offer(["method=federated_subspace", *SMALL])).lines)
        assert (own.name in told) is names
    assert [set(answers[names].facts.held) for names in (True, False)] == [{own.name}, {"north.1"}]
    assert own.name.encode() not in answers[False].to_bytes()


@pytest.mark.parametrize(
    ("kinds", "code"), [(["sums", "weights"], Code.NOT_ALLOWED), (["counts", "sums"], 0)]
)
def test_products_are_counted_for_nobody_where_counts_do_not_leave(files, kinds, code):
    reply = hello(replace(files, policy=Policy(allow=kinds)), ["method=federated_subspace"])
    assert reply.code == code
    assert bool(reply.facts.held) == (code == 0)


@pytest.mark.parametrize("products", [[], ["nut", "bolt"]])
def test_no_sums_leave_before_the_sites_product_is_known(files, products):
    asked = Request("play", RUN, ["method=federated_subspace", *SMALL], 0, products=products, step=1)
    assert reply_of(quiet_site(files), asked).code == Code.PRODUCT


NAMES = [
    "calibration.group=Adler", "backbone.weights=site.yaml", "federation.sampler.on_failure=Adler",
    "features.backbone.weights=key", "method.client=x", "encoder.norm=x",
]  # fmt: skip
"""One of each way in which `tests/sites/test_overrides.py` sees such words refused."""


@pytest.mark.parametrize("word", NAMES)
def test_no_override_names_a_file_or_learns_a_name(files, folder, word):
    site = quiet_site(files)
    request = Request("hello", RUN, ["method=federated_subspace", *SMALL, word], 0)
    blob = site.answer(request.to_bytes())
    reply = Reply.from_bytes(blob)
    assert reply.code in (Code.OVERRIDE, Code.CONFIGURATION)
    assert not reply.facts.held
    for name in ("Adler", str(folder), ".png", "site.yaml", "no such file"):
        assert name.encode() not in blob


def test_errors_of_images_are_numbers(files, tmp_path):
    """Relative paths, spaces, commas and bare names, which once got through as texts."""
    root = tmp_path / "images" / "Adler, Karin 1950" / "train" / "good"
    root.mkdir(parents=True)
    (root / "Adler_Karin_1950.png").write_bytes(b"no image")
    broken = replace(files, data=("data=mvtec_mixture", f"data.root={tmp_path / 'images'}"))
    site = quiet_site(broken)
    overrides = ["method=federated_subspace", *SMALL]
    for kind in ("hello", "play", "ask", "offer", "reveal"):
        answer = site.answer(Request(kind, RUN, overrides, 0, payload=b"x", question="scores").to_bytes())
        assert b"Adler" not in answer


def test_what_was_approved_is_answered_and_nothing_else(files):
    overrides = ["method=federated_bank", *SMALL]
    found = review(files, Offer(overrides))
    assert any("single patches" in line and "NEEDS YOUR APPROVAL" in line for line in found.lines)
    approvals = Approvals(files.folder / APPROVED)
    approvals.add(found.digest, found.method, found.taken)
    assert hello(files, ["method=federated_bank"]).code == 0
    for other in (["method=federated_bank", "seed=1"], ["method=federated_subspace"]):
        assert hello(files, other, run="f" * 16).code == Code.NOT_APPROVED
    varies = replace(files, policy=Policy(vary=["seed"]))
    found = review(varies, Offer(overrides))
    approvals.add(found.digest, found.method, found.taken)
    assert hello(varies, ["method=federated_bank", "seed=1"], run="e" * 16).code == 0
    assert hello(varies, ["method=federated_bank", "task.slots=9"], run="d" * 16).code == Code.NOT_APPROVED


def test_a_review_says_what_may_vary_and_which_word_is_no_setting(files):
    varies = replace(files, policy=Policy(vary=["seed", "batch_sise", "task"]))
    lines = review(varies, Offer(["method=federated_bank", *SMALL])).lines
    assert "Settings that may change without another approval: seed." in lines
    assert any("'batch_sise', which is no setting" in line and "mean 'batch_size'?" in line for line in lines)
    # It is a section, whose settings stay bound.
    assert any("'task', which is no setting" in line for line in lines)


def test_an_approval_is_also_one_of_sums_over_more_images():
    taken = [Taken(0, 0, "moments", summed("means", images), 9) for images in (4, 5, 6, None)]
    assert [part.within(["moments", "sums", 5]) for part in taken] == [False, True, True, True]
    assert [part.within(["moments", "sums", None]) for part in taken] == [False, False, False, True]
    assert not any(part.within(["memory", "sums", 1]) for part in taken)


def test_no_approval_lets_images_go(classes):
    found = review(classes, Offer(["method=feddm", *SMALL], CLASSES))
    assert any("REFUSED, unless policy.allow" in line for line in found.lines)
    with pytest.raises(UserError, match="does not let out images"):
        found.check(classes.policy)


def test_a_site_under_another_number_tells_no_means_of_other_groups(classes):
    """Its number is part of what groups are drawn by."""
    site = quiet_site(classes, policy=Policy(allow=["counts", "weights", "mean_images"]))
    codes = []
    for number in (0, 1):
        words = [*SMALL, "method=fedmix", "method.client.group=5"]
        request = Request("play", f"{number:016x}", words, number, list(CLASSES), round=-1, step=1)
        codes.append(reply_of(site, request).code)
    assert codes == [Code.NONE, Code.GROUPS]


@pytest.mark.parametrize(("method", "sent"), [("fedmix", "mean images"), ("fedvck", "images")])
def test_of_any_number_of_images_the_size_of_one_is_said(classes, method, sent):
    found = review(classes, Offer([f"method={method}", *SMALL], CLASSES))
    assert {part.each for part in found.taken} - {""} == {sent}
    assert "GB" not in " ".join(found.lines)


@pytest.mark.parametrize("overrides", [["method=fedmix"], ["method=fedavg", "rounds=1001"]])
def test_what_is_offered_is_kept_for_review(classes, overrides):
    hello(classes, overrides, CLASSES)
    content = json.loads((classes.folder / "offer.json").read_text())
    assert content == {"overrides": [*SMALL, *overrides], "classes": list(CLASSES)}


def test_the_log_says_what_was_asked_and_what_was_answered(files, folder):
    site = quiet_site(files)
    overrides = ["method=federated_subspace", *SMALL]
    config = Plan(overrides, ["north"], "x").config()
    payload = message_of(config, build_model(config, ()), round=0)
    (own,) = (folder / "north" / "images").iterdir()
    named = {"products": [own.name, "nut"]}
    requests = [
        Request("hello", RUN, overrides, 0),
        Request("play", RUN, overrides, 0, round=0, step=1, payload=payload, **named),
        Request("hello", RUN, ["method=feddymem", *SMALL], 0),
    ]
    answers = [site.answer(request) for request in (*(one.to_bytes() for one in requests), b"garbage")]
    log = quiet_site(files).log.entries()
    assert [line["asked"] for line in log] == ["hello", "play", "hello", "bytes that are no request"]
    assert [line["verdict"] for line in log] == ["answered", "answered", "refused", "refused"]
    assert "mean and covariance of the features of each product's patches" in log[1]["told"]
    assert log[1]["bytes_out"] > 1000
    assert [line["bytes_out"] for line in log] == [len(answer) for answer in answers]
    text = site.log.file.read_text()
    site.log.file.write_text(text.replace('"answered"', '"refused"', 1))
    with pytest.raises(UserError, match="line 1: does not follow"):
        quiet_site(files).log.entries()
    assert reply_of(site, requests[0]).code == Code.LOG


def test_made_up_runs_leave_nothing_behind(files):
    for number in range(3):
        hello(files, ["method=federated_subspace"], run=f"{number:016x}")
    assert not (files.folder / "states").exists()


@pytest.mark.slow
def test_runs_without_noise_are_few(files):
    few = replace(files, policy=Policy(runs=1))
    site = quiet_site(few)
    overrides = ["method=federated_padim", *SMALL]
    codes = [reply_of(site, Request("reveal", f"{number:016x}", overrides, 0)).code for number in range(2)]
    assert codes == [Code.PART, Code.RUNS]


@pytest.mark.parametrize(
    "content",
    [
        {"allow": ["everything"]}, {"allow": "counts"}, {"allow": None}, {"vary": 5}, {"allow": {"counts": 1}},
        {"images": 0}, {"images": 1.5}, {"runs": "many"}, {"names": 1}, {"vary": [5]},
        {"floors": {"method.client.x": 1}}, {"floors": {"method.client.group": "1"}}, {"ceilings": {"x": 1}},
        {"floors": {"batch_size": math.nan, "calibration.share": 0.1}}, {"floors": ["batch_size"]},
        {"other": 1}, [], None,
    ],
)  # fmt: skip
def test_a_policy_that_is_none_is_refused_in_one_line(content):
    with refusal("^policy"):
        Policy.read(content)
    assert Policy.read(Policy().content).content == Policy().content


@pytest.mark.parametrize("classes", ["nut", {"nut": 1}, [1], ["x" * (1 << 20)], ["a\nNoise: x"]])
def test_a_file_that_holds_no_offer_is_refused(tmp_path, classes):
    (tmp_path / "offer.json").write_text(json.dumps({"overrides": ["rounds=1"], "classes": classes}))
    with pytest.raises(UserError, match="holds no offer"):
        Offer.read(tmp_path / "offer.json")


@pytest.mark.parametrize(
    ("key", "usual", "value", "code"),
    [
        ("nu", 0.5, 1e-9, Code.FLOOR), ("weight", 10.0, 1e9, Code.CEILING), ("kappa", -1.0, 1e3, Code.CEILING),
        ("ewc", 0.0, 2.0, Code.CEILING), ("bias", 0.3, 4.0, Code.CEILING),
        ("base_temperature", None, 1e-9, Code.FLOOR), ("base_temperature", None, 0.07, None),
        ("nu", 0.5, 0.005, None), ("weight", 10.0, 0, None), ("ewc", 0.0, 1.0, None), ("epochs", 1, 9000, None),
        ("learning_rate", 1e-4, 0.5, None),
    ],
)  # fmt: skip
def test_numbers_that_multiply_gradients_are_near_those_of_the_package(key, usual, value, code):
    offered, packaged = ({"method": {"client": {key: number}}} for number in (value, usual))
    if code is None:
        Policy().check_bounds(offered, packaged)
        return
    with pytest.raises(RefusalError) as refused:
        Policy().check_bounds(offered, packaged)
    assert refused.value.code is code


@pytest.mark.parametrize(
    ("task", "batch", "refused"),
    [
        ({"learning_rate": 2.0, "head_rate": 0.1}, 4, "task.learning_rate"), ({"learning_rate": 2.0}, 2, "task.l"),
        ({"learning_rate": 2.0}, 1, ""), ({"learning_rate": 1.0, "weight_decay": 0.6}, 4, "task.weight_decay"),
        ({"learning_rate": 1.0, "weight_decay": 0.5}, 4, ""),
    ],
)  # fmt: skip
def test_rates_and_pulls_leave_more_than_the_last_gradient(task, batch, refused):
    """A site whose floor is one image a batch allows more."""
    with refusal(refused) if refused else nullcontext():
        Policy(floors={"batch_size": batch}).check_bounds({"task": task}, {})


@pytest.mark.slow
@pytest.mark.parametrize("learnt", [["dark"], list(CLASSES)])
@pytest.mark.parametrize(
    ("policy", "code"),
    [(Policy(names=False), Code.NAMED), (Policy(allow=["sums", "weights"]), Code.NOT_ALLOWED)],
)
def test_no_list_of_names_is_compared_with_those_that_a_site_keeps(classes, learnt, policy, code):
    given = replace(classes, policy=policy)
    assert hello(given, ["method=fedavg", "task=classifier"], learnt).code == code


@pytest.mark.slow
def test_an_approval_holds_for_a_run_that_goes_on(files):
    site = quiet_site(files)
    asked = Request("hello", RUN, ["method=federated_subspace", *SMALL], 0).to_bytes()
    codes = [Reply.from_bytes(site.answer(asked)).code]
    Approvals(files.folder / APPROVED).add("another", "fedavg", [])
    codes.append(Reply.from_bytes(site.answer(asked)).code)
    assert codes == [Code.NONE, Code.NOT_APPROVED]

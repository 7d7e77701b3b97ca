"""What a site takes from a federation's configuration: choices and scalar values."""

import sys

import pytest
from helpers.refusals import refusal

from lit_fedad.core import sizes
from lit_fedad.core.errors import UserError
from lit_fedad.sites.overrides import agreed_hash, check_overrides, compose_overrides, with_size

GOOD = ("method=fedavg", "debug=seconds", "rounds=3", "task.learning_rate=3e-4", "federation/robust=off", "seed=-1",
        "federation.sampler.on_failure=skip", "backbone.weights=random")  # fmt: skip


def test_choices_and_scalars_are_taken():
    check_overrides(GOOD)
    words = ["method=fedavg", "debug=seconds", "rounds=3", "seed=7", "learning_rate_decay=cosine"]
    config = compose_overrides(words)
    assert (config["rounds"], config["seed"], config["method"]["name"]) == (3, 7, "fedavg")
    assert config["learning_rate_decay"] == "cosine"
    assert config["data"] is config["partition"] is config["out"] is None


@pytest.mark.parametrize(
    "override",
    [
        "federation.participation._target_=subprocess.getoutput", "task._target_=os.system", "+task.x=1", "~task",
        "++rounds=2", "data=folders", "data.root=x", "out=x", "cache.folder=x", "cache=x", "fabric.accelerator=cpu",
        "fabric.devices=2", "tracking.uri=x", "tracking=mlflow", "callbacks.x=1", "start=x", "public=folder",
        "fresh=true",
        "backbone.weights=/etc/passwd", "data.mean=x", "data.std=nan", "data.std=1e-12", "data.mean=2",
        "x" * 300 + "/y=1",
        "backbone.weights=../x", "seed=${oc.env:HOME}", "seed=[1]", "seed={a: 1}",
        "method=../../x", "method=fedavg2", "hydra.run.dir=x", "hydra/launcher=x", "partition=iid", "partition.path=x",
        "backbone.weights=..", "backbone.name=../x", "calibration.group=a+", "image.page=1", "image.fit=/etc/passwd",
        "method.client.init=/etc/hostname", "simulation.address=auto", "task=../task", "debug=/tmp/x",
        "evaluation.client_test=/dev/zero", "calibration.by=file", "partition=file", "backbone.weights=https://x",
        "hydra.searchpath=file:///tmp", "backbone.weights=a.pth", "backbone.name=local-dir", "backbone.name=hf-hub",
        "method.name=x", "method.paper=5", "method.under=x", "method.exchanges=x", "data.train_per_product=1",
        "rounds", "rounds=", "rounds=1 2", "rounds=1\n", "", "a/b=c", "evaluation.alpha='0.1'", "task@x=subspace",
    ],
)  # fmt: skip
def test_anything_else_is_refused(override):
    with refusal("is not taken from a federation|^calibration.by=.* must be one of"):
        compose_overrides(["method=fedavg", override])


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_number_without_a_value_is_refused_as_such(number):
    with pytest.raises(UserError, match=f"^'task.learning_rate={number}' is not taken .*: it is no number$"):
        compose_overrides(["method=fedavg", f"task.learning_rate={number}"])


def test_texts_that_a_setting_lists_are_taken():
    config = compose_overrides(
        ["method=deep_svdd", "task.objective=soft-boundary", "backbone.weights=random"]
    )
    assert config["task"]["objective"] == "soft-boundary"


@pytest.mark.parametrize(
    ("given", "data"),
    [
        ([], {"mean": [0.5] * 3, "std": [0.5] * 3}),
        (["data.mean=0.25", "data.std=0.125", "image.channels=1"], {"mean": [0.25], "std": [0.125]}),
    ],
)
def test_the_federation_says_how_labelled_images_are_normalised(given, data):
    assert compose_overrides(["method=fedavg", "task=classifier", *given])["data"] == data


def test_half_a_normalisation_is_refused():
    with pytest.raises(UserError, match="^data.mean: give data.mean and data.std, or neither$"):
        compose_overrides(["method=fedavg", "data.mean=0.5"])
    with pytest.raises(UserError, match=r"'data.std=200' is not taken .*: it is no number in \[.*\]$"):
        compose_overrides(["method=fedavg", "data.mean=0.5", "data.std=200"])


def test_a_site_needs_no_library_that_draws_images(monkeypatch):
    monkeypatch.setitem(sys.modules, "lit_fedad.data.textures", None)
    assert compose_overrides(["method=federated_subspace", "debug=seconds"])["data"] is None


def test_what_a_word_names_is_never_called(tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(UserError):
        compose_overrides([
            "method=fedavg", "+federation.participation._target_=subprocess.getoutput",
            f"+federation.participation.cmd=touch {marker}",
        ])  # fmt: skip
    assert not marker.exists()


def test_a_coordinator_is_told_of_settings_that_contradict_each_other():
    words = ["method=feddymem", "task=memory_bank_sums"]
    with pytest.raises(UserError, match="^method=feddymem sets task.head, which task=memory_bank_sums"):
        compose_overrides(words, coordinator=True)
    # Images of its preset are none of a federation's: sites set their own.
    assert compose_overrides(["method=fedavg", "experiment=medical"], coordinator=True)["data"] is None


def test_more_words_than_any_use_are_refused():
    check_overrides(["seed=0"] * 200)
    with pytest.raises(UserError, match="201 overrides"):
        check_overrides(["seed=0"] * 201)


def test_machines_agree_whatever_is_their_own():
    one = compose_overrides(["method=fedavg", "debug=seconds"], ["cache.folder=/a", "fabric.accelerator=cpu"])
    other = compose_overrides(["method=fedavg", "debug=seconds"], ["cache.folder=/b"])
    other["data"] = {"root": "/images"}
    assert agreed_hash(one) == agreed_hash(other)
    for overrides, own in (
        (["seed=1"], []),
        ([], ["fabric.precision=bf16-mixed"]),
        ([], ["cache.enabled=false"]),
    ):
        assert agreed_hash(
            compose_overrides(["method=fedavg", "debug=seconds", *overrides], own)
        ) != agreed_hash(one)


def test_machines_agree_about_the_code_of_own_parts(tmp_path, monkeypatch):
    """Their settings and first weights may be equal all the same."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (code := tmp_path / "own_client.py").write_text("RATE = 1")
    config = compose_overrides(["method=fedavg", "debug=seconds"])
    config["method"]["client"]["_target_"] = "own_client.Client"
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_client")
    one = agreed_hash(config)
    assert agreed_hash(config) == one
    code.write_text("RATE = 2")
    assert agreed_hash(config) != one


@pytest.mark.parametrize("word", ["method=own", "task=own"])
def test_a_choice_that_is_missing_here_may_be_of_an_own_package(word):
    with pytest.raises(UserError, match="no choice own here; .*install that and set LIT_FEDAD_PACKAGES$"):
        check_overrides([word])


@pytest.mark.slow
def test_the_coordinator_decides_the_size_of_photographs_for_sites_of_any_memory(monkeypatch):
    words = with_size(["method=federated_bank"])
    assert words == ["method=federated_bank", "image.size=256"]
    monkeypatch.setattr(sizes, "machine_memory", lambda: 2**30)
    assert compose_overrides(words)["image"]["size"] == 256
    assert with_size(["method=fedavg", "experiment=small"]) == ["method=fedavg", "experiment=small"]

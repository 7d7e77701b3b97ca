"""Whole runs with differential privacy, and with rounded messages: what they say, leave behind and refuse."""

import json

import pytest
from helpers.refusals import refusal

from lit_fedad.core.config import compose
from lit_fedad.deployment.model_card import Facts, model_card
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train
from lit_fedad.tracking.tracker import Tracker

SETTINGS = [
    "debug=seconds", "data.train_per_product=8", "evaluation.pictures=0",
    "cache.enabled=false", "federation/privacy=central", "federation.privacy.epsilon=50",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize(
    ("method", "sums"), [("federated_subspace", 3), ("federated_bank", 5), ("federated_padim", 4)]
)
def test_a_run_says_what_it_has_spent(tmp_path, capsys, monkeypatch, method, sums):
    recorded = []
    monkeypatch.setattr(Tracker, "metrics", lambda self, values, step: recorded.append(values))
    places = [f"data.root={tmp_path / 'data'}", f"out={tmp_path / 'run'}", f"tracking.uri={tmp_path / 'ml'}"]
    # 24 images in 64 slots would be so few a slot that the noise, which no seed repeats, hides now and then all.
    few = ["task.slots=8"] if method == "federated_bank" else []
    config = compose([f"method={method}", *SETTINGS, *few, *places])
    result = train(config)
    spent = result["differential_privacy"]
    assert spent["epsilon"] == pytest.approx(50, rel=1e-6)
    assert (spent["delta"], spent["unit"], spent["sums"], spent["secret"]) == (1e-5, "image", sums, True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["differential_privacy"] == spent
    # With the secret the noise could be taken away; who reads the run again makes no new one.
    assert not (tmp_path / "run" / "noise.key").exists()
    assert reopen(str(tmp_path / "run")).federation.privacy == spent
    assert not (tmp_path / "run" / "noise.key").exists()
    # A run that was killed when its result was written has left one.
    (tmp_path / "run" / "noise.key").write_bytes(bytes(32))
    train(config, quiet=True)
    assert not (tmp_path / "run" / "noise.key").exists()
    assert "epsilon 50 at delta 1e-05, unit: image" in capsys.readouterr().out
    assert any(values.get("epsilon") == pytest.approx(50, rel=1e-6) for values in recorded)
    how = {"size": 32, "resize": None, "fit": "squeeze", "mode": "RGB"}
    facts = Facts(result, config, 0, {}, how, {"probabilities": (2,)}, [], (0, 0))
    assert "| differential privacy | epsilon 50" in model_card(facts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize("method", ["feddymem", "fedavg"])
def test_methods_whose_exchanges_cannot_be_noised_say_so(tmp_path, method):
    places = [f"data.root={tmp_path / 'data'}", f"out={tmp_path / 'run'}", "tracking=off"]
    with refusal(r"is no sum over images .* docs/privacy\.md"):
        train(compose([f"method={method}", *SETTINGS, *places]), quiet=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize(
    ("method", "federation"),
    [
        ("federated_bank", "half"),
        ("federated_bank", "byte"),
        ("federated_padim", "half"),
    ],
)
def test_covariances_of_few_vectors_stay_covariances(tmp_path, method, federation):
    given = ["debug=seconds", "tracking=off", "evaluation.pictures=0", f"out={tmp_path / 'run'}"]
    result = train(compose([f"method={method}", f"federation={federation}", *given]), quiet=True)
    assert not result["refused"]
    assert not result["failures"]

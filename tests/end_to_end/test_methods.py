"""What a run writes and draws says all that it should, for each kind of data."""

from __future__ import annotations

import json
from itertools import product

import pytest
from helpers.pairs import of_method
from helpers.refusals import refusal
from helpers.small_tasks import CONDENSING, SEMANTIC, STREAM
from helpers.strict_json import strict_json

from lit_fedad.core.errors import UserError
from lit_fedad.data.partition import Partition
from lit_fedad.deployment.predict import evaluate
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.evaluation.semantic import semantic_names
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.loop import Federation

CLASSIFYING = ("gldp", "prototype_statistics", "creff", "fedic")


# What a result says is one function's, whatever the method; test_pairs.py plays the others.
@pytest.mark.parametrize("method", ["fedavg", pytest.param("federated_bank", marks=pytest.mark.slow)])
def test_method_trains_and_writes_its_files(lab, method):
    out, result = lab.finished(f"method={method}")
    stored = strict_json(out / "result.json")
    assert stored == json.loads(json.dumps(result))
    rounds = stored["rounds"]
    assert rounds == 2
    assert stored["method"] == method
    assert stored["task"]
    assert stored["data"] == "textures"
    assert stored["seed"] == 0
    assert stored["backbone"]["name"] == "test_resnet"
    assert stored["backbone"]["weights"] == "random"
    assert stored["exchanges"][-3:] == [0, 1, 2]
    for name in ("bytes_up", "bytes_down", "elements_up", "seconds_per_round", "scalars", "client_losses"):
        assert len(stored[name]) == len(stored["exchanges"])
    assert all(seconds > 0 for seconds in stored["seconds_per_round"])
    assert stored["peak_rss_bytes"] > 50e6
    assert stored["config"] == RunFolder(out).config()
    clients = {str(client) for client in range(len(stored["partition"]["sizes"]))}
    assert (stored["first"]["round"], stored["last"]["round"]) == (0, rounds)
    for chosen in ("first", "last", "best"):
        assert stored[chosen]["aupimo"]["mean"] is None  # of so few pixels
        for metric in set(AnomalyEvaluator.metrics) - {"aupimo"}:
            values = stored[chosen][metric]
            assert set(values) == {"mean", "worst", "pooled", "per_client", "per_product", "product_mean"}
            assert set(values["per_client"]) == clients
            assert set(values["per_product"]) == set(stored["partition"]["products"])
            assert 0 <= values["product_mean"] <= 1
            assert 0 <= values["worst"] <= values["mean"] <= 1
            assert 0 <= values["pooled"] <= 1
    best = max(values["i_auroc"] for values in stored["metrics"].values())
    assert stored["best"]["i_auroc"]["mean"] == best >= stored["last"]["i_auroc"]["mean"]
    assert set(strict_json(out / "calibration.json")["clients"]) == clients
    partition = Partition.load(out / "partition.json")
    assert list(partition.sizes) == stored["partition"]["sizes"]
    held = (*partition.clients, *partition.calibration)
    assert sorted(index for own in held for index in own) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["federated_bank", "federated_subspace", "federated_padim"])
def test_methods_of_sums_score_and_calibrate_images_in_memory(lab, tmp_path, method):
    """Their thresholds come after the last round: before it, sums are not whole."""
    small = ["data.train_per_class=5", "data.test_per_class=1", "data.train_per_set=2", "data.test_per_set=5"]
    result = lab.train(tmp_path, f"method={method}", "data=motifs", *small, "debug=seconds")
    assert 0 < result["last"]["auroc"]["mean"] < 1
    assert "false_alarm_rate" in result["last"]


@pytest.mark.parametrize(
    "method", ["fadngs", *(pytest.param(f"fadngs_{m}", marks=pytest.mark.slow) for m in ("code", "literal"))]
)
def test_semantic_method_trains_and_writes_its_files(lab, method):
    out, result = lab.finished(f"method={method}", *SEMANTIC)
    stored = strict_json(out / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert (stored["method"], stored["task"], stored["data"]) == (method, "Contrastive", "motifs")
    assert stored["exchanges"] == [0, 1, 2]
    assert "distillation_loss" in stored["scalars"][2]
    assert "distillation_loss" not in stored["scalars"][1]
    sets = ("stripes", "dots", "zigzag")
    for chosen in ("first", "last", "best"):
        for metric in semantic_names(["any"]):
            values = stored[chosen][metric]
            assert set(values["per_client"]) == {"0", "1"}
            if metric in ("auroc", "aupr", "me"):  # a false error may be undefined
                of_sets = [stored[chosen][f"{metric}_{name}"]["mean"] for name in sets]
                assert values["mean"] == pytest.approx(sum(of_sets) / 3)
        # With weights and densities in common, clients part at their own thresholds alone.
        assert len(set(stored[chosen]["auroc"]["per_client"].values())) == 1
        assert 0 <= stored[chosen]["auroc"]["mean"] <= 1
    assert set(strict_json(out / "calibration.json")["clients"]) == {"0", "1"}


SHORT = {
    "gldp": ("method.client.base_epochs=1", "method.client.head_epochs=2"),
    "prototype_statistics": ("experiment=gldp_frozen",),
    "creff": ("method.client.local_epochs=1", "method.server.retraining_epochs=2"),
    "fedic": ("method.client.local_epochs=1", "method.server.steps=2", "public.count=8"),
}


@pytest.mark.parametrize(
    "method", ["gldp", *(pytest.param(m, marks=pytest.mark.slow) for m in CLASSIFYING if m != "gldp")]
)
def test_classifying_method_trains_and_writes_its_files(lab, differences, method):
    out, result = lab.finished(f"method={method}", *of_method(method, STREAM), *SHORT[method])
    stored = strict_json(out / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert (stored["method"], stored["task"], stored["data"]) == (method, "Classifier", "motif_classes")
    # One round a task; statistics are sent before the first.
    begins = 0 if method == "prototype_statistics" else 1
    assert stored["exchanges"] == list(range(begins, 3))
    first, last = stored["first"], stored["last"]
    assert (first["round"], last["round"]) == (begins, 2)
    for chosen in (first, last):
        # Where only the server makes models that are meant to predict, clients have none of their own.
        assert (chosen["local_accuracy"]["mean"] is None) == (
            method in ("creff", "fedic", "prototype_statistics")
        )
        for name in ("selection_accuracy", "global_accuracy", "incremental_accuracy"):
            assert set(chosen[name]["per_client"]) == {"0", "1"}
            assert 0 <= chosen[name]["worst"] <= chosen[name]["mean"] <= 1
    assert first["forgetting"]["mean"] is None
    assert -1 <= last["forgetting"]["mean"] <= 1
    assert Partition.load(out / "partition.json").stages is not None
    evaluate(str(out))
    assert differences(strict_json(out / "evaluation.json"), last) == []


@pytest.mark.parametrize("method", ["fedvck", pytest.param("feddm", marks=pytest.mark.slow)])
def test_image_sharing_method_trains_and_writes_its_files(lab, differences, method):
    out, result = lab.finished(f"method={method}", *CONDENSING, "partition.clients=2")
    stored = strict_json(out / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert (stored["method"], stored["task"], stored["data"]) == (method, "Classifier", "motif_classes")
    assert stored["exchanges"] == [1, 2]
    first, last = stored["scalars"]
    assert {"loss", "last_loss", "images", "images_mib", "server_loss", "server_accuracy"} <= first.keys()
    assert last.keys() - first.keys() == {"knowledge_mmd", "knowledge_mmd_random"}
    # The weighted mean over clients lies between the clients' own losses.
    own = stored["client_losses"][-1]
    assert own.keys() <= {str(client) for client in range(len(stored["partition"]["sizes"]))}
    assert min(own.values()) - 1e-6 < last["loss"] < max(own.values()) + 1e-6
    # Images, and the names of what else is sent.
    sent = stored["bytes_up"][-1] - last["images_mib"] * 2**20
    assert 0 < sent < 3000
    for chosen in ("first", "last", "best"):
        values = stored[chosen]["accuracy"]
        assert set(values["per_client"]) == {"0", "1"}
        assert 0 <= values["worst"] == values["pooled"] <= 1  # one model for all
    evaluate(str(out))
    assert differences(strict_json(out / "evaluation.json"), stored["last"]) == []


def test_evaluating_a_semantic_run_again_gives_the_same(lab, differences):
    """Without its public images, which a trained server has no need of."""
    out, last = ended(lab)
    evaluate(str(out))
    assert differences(strict_json(out / "evaluation.json"), last) == []


def ended(lab):
    """Folder, and what it says of its last round, of a run to start from."""
    out, result = lab.finished("method=fadngs", *SEMANTIC)
    return out, result["last"]


def test_a_run_that_starts_from_another_begins_where_that_ended(lab, tmp_path, differences):
    """Densities are made anew, under weights that are the other run's: scores are the same to the last bit."""
    start, last = ended(lab)
    settings = ("method=fadngs", *SEMANTIC, f"start={start}", "rounds=1")
    config = (start / "config.yaml").read_bytes()
    other = lab.train(tmp_path / "other", *settings)
    assert other["first"]["round"] == 0
    measured = {name: values for name, values in last.items() if name not in RATES}
    assert differences({**other["first"], "round": 2}, measured) == []
    one, two = lab.state(start)["server"], lab.state(tmp_path / "other")["server"]
    assert differences(one["weights"], two["weights"]) != []
    assert (start / "config.yaml").read_bytes() == config


def test_weights_that_fit_are_taken_and_the_others_drawn(lab, tmp_path, differences):
    """An encoder trained by FADngs, with a projection of another width, under FedAvg."""
    start, _ = ended(lab)
    overrides = [
        override
        for override in SEMANTIC
        if not override.startswith(("public", "method.server", "task.projection"))
    ]
    overrides = [
        "method=fedavg",
        "task=contrastive",
        *overrides[:-1],
        "task.projection=6",
    ]
    lab.train(tmp_path / "other", *overrides, f"start={start}", "rounds=0")
    old = lab.state(start)["server"]["weights"]
    new = lab.state(tmp_path / "other")["server"]["weights"]
    assert differences(*({n: e for n, e in w.items() if n.startswith("encoder.")} for w in (old, new))) == []
    assert new["projection.2.weight"].shape[0] == 6


@pytest.mark.slow
def test_a_start_that_is_none_is_refused_in_one_line(lab, tmp_path):
    start, _ = ended(lab)
    for folder, name in product(("begun", "site"), ("config.yaml", "manifest.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes((start / name).read_bytes())
    save_json(tmp_path / "site", "result.json", {"own_client": ""})
    local, _ = lab.finished("method=local")
    for overrides, said in [
        ((f"start={tmp_path / 'nothing'}",), "start=.*nothing: no such folder, and no tracked run"),
        ((f"start={tmp_path / 'begun'}",), "start=.*begun: the run is not complete"),
        ((f"start={tmp_path / 'site'}",), "start=.*site: a site's own detector has no server's weights"),
        ((f"start={local}",), "start=.*holds no weights that fit this task"),
    ]:
        with refusal(said):
            lab.train(tmp_path / "run", "method=fadngs", *SEMANTIC, *overrides)


@pytest.mark.slow
def test_methods_differ_where_they_should(lab):
    """Bytes: nothing for local training, memories for FedDyMem; and each leaves another state."""
    assert not any(lab.finished("method=local")[1]["bytes_up"])
    assert not any(lab.finished("method=local")[1]["bytes_down"])
    literal = lab.finished("method=feddymem_literal")[1]
    memory = 16 * (32 + 48) * 4
    assert literal["elements_up"] == [2 * memory // 4] * 3
    assert all(2 * memory < sent < 2 * memory + 1000 for sent in literal["bytes_up"])
    assert literal["bytes_down"][0] == 0
    losses = {
        m: lab.finished(f"method={m}")[1]["scalars"][-1]["loss"]
        for m in ("feddymem", "feddymem_literal", "local")
    }
    assert len(set(losses.values())) == 3


@pytest.mark.parametrize(("coding", "share"), [("half", 1 / 2), ("byte", 1 / 4)])
@pytest.mark.slow
def test_coded_messages_take_their_share_of_the_bytes(lab, coding, share):
    # Slots beyond the two rows of minima and steps that a byte-coded matrix carries.
    settings = ("method=feddymem_literal", "task.grid=16", "rounds=1")
    plain = lab.finished(*settings)[1]
    coded = lab.finished(*settings, f"federation={coding}")[1]
    assert coded["bytes_up"][-1] == pytest.approx(share * plain["bytes_up"][-1], rel=0.06)
    assert coded["bytes_down"][-1] == pytest.approx(share * plain["bytes_down"][-1], rel=0.06)
    assert coded["elements_up"] == plain["elements_up"]


@pytest.mark.slow
def test_partial_participation(lab):
    settings = ("method=feddymem", "federation=partial", "partition.clients=5", "rounds=3")
    result = lab.finished(*settings)[1]
    memory = result["elements_up"][result["exchanges"].index(-1)] // 5
    assert result["elements_up"][-3:] == [2 * memory] * 3
    assert len(result["last"]["i_auroc"]["per_client"]) == 5


def test_same_command_shows_what_is_complete(lab, monkeypatch):
    out, result = lab.finished("method=local")
    before = (out / "result.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "run", lambda self: pytest.fail("trained again"))
        again = lab.train(out, "method=local", "fabric.devices=2")
    assert again == json.loads(json.dumps(result))
    assert (out / "result.json").read_bytes() == before


@pytest.mark.slow
def test_fresh_trains_anew(lab, tmp_path, monkeypatch, differences, outcome):
    settings = ("method=local", "rounds=0")
    first = lab.train(tmp_path / "run", *settings)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    played = []
    play = Federation.play
    monkeypatch.setattr(Federation, "play", lambda self, n: (played.append(n), play(self, n))[1])
    second = lab.train(tmp_path / "run", *settings, "fresh=true")
    assert played == second["exchanges"]
    assert differences(outcome(second), outcome(first)) == []
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_folder_of_another_configuration_is_refused(lab):
    out, _ = lab.finished("method=local")
    with refusal("another configuration.*fresh=true"):
        lab.train(out, "method=local", "seed=1")


def test_corrected_command_may_use_the_folder_of_the_refused_one(lab, tmp_path):
    settings = ("method=local", "rounds=0")
    with pytest.raises(UserError, match="learning_rate='high' must be"):
        lab.train(tmp_path / "run", *settings, "task.learning_rate=high")
    assert lab.train(tmp_path / "run", *settings)["last"]


DRAWN = ("evaluation.pictures=1",)
IN_TURN = ("partition=products_in_turn", "partition.order=[gravel,grain]", "partition.clients=2")
CLASSES = (*STREAM, "method.client.base_epochs=1", "method.client.head_epochs=2")
DETECTOR = {"partition", "heatmaps", "scores", "calibration", "i_auroc", "p_auroc", "pro", "aupr"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("method=fedavg",), {*DETECTOR, "loss", "communication"}),
        (("method=federated_bank", *IN_TURN, "rounds=2"), DETECTOR),
        (("method=gldp", *CLASSES), {"partition", "selection_accuracy", "loss", "communication"}),
    ],
)
def test_pictures_suit_the_data(lab, settings, expected):
    out, _ = lab.finished(*settings, *DRAWN)
    assert expected <= {path.stem for path in (out / "figures").glob("*.png")}
    assert all(path.stat().st_size > 1000 for path in (out / "figures").glob("*.png"))


@pytest.mark.slow
def test_no_pictures_are_drawn_where_none_are_wanted(lab):
    out, _ = lab.finished("method=federated_bank")
    assert not list(out.rglob("*.png"))

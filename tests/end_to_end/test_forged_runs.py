"""A run's folder whose files were changed together with their hashes: refused in one line that names the file."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from helpers.damage import forge, forge_config, forge_state
from helpers.refusals import refusal

from lit_fedad.core.config import compose
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.deployment.update import UpdateOptions, update
from lit_fedad.deployment.watch import watch
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.finished_run import load_client
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train
from lit_fedad.federation.processes import make_fabric

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.fixture
def forged(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture
def images(tiny_run, tmp_path):
    (tmp_path / "new").mkdir()
    shutil.copy(next((tiny_run.parent / "data").rglob("*.png")), tmp_path / "new" / "0.png")
    return tmp_path / "new"


def _set(values, key, value):
    *sections, leaf = key.split(".")
    for section in sections:
        values = values[section]
    if value is KeyError:
        del values[leaf]
    else:
        values[leaf] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task.grid", -1),
        ("task.unknown", 1),
        ("task.products", "x" * 10_000),
        ("task.image_size", 1_000_000),
        ("backbone", None),
        ("backbone.name", "../../secret"),
        ("method.exchanges", None),
        ("image.mean", [1, 2]),
        ("fabric.accelerator", "none of this machine"),
        ("callbacks", {"mine": {"_target_": "lit_fedad.tasks.padim.Nothing"}}),
        ("evaluation", KeyError),
        ("evaluation.batch_size", KeyError),
        ("rounds", KeyError),
    ],
)
def test_a_value_of_the_configuration_is_told_with_its_file(forged, images, key, value):
    forge_config(forged, lambda config: _set(config, key, value))
    with refusal(f"^{forged}/config.yaml: ") as caught:
        predict(str(forged), str(images), 0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [("image.size", 64), ("task.score._target_", "lit_fedad.tasks.slot_distances.HingeLoss")],
)
def test_parts_that_do_not_fit_each_other_are_found_before_images_are_read(forged, images, key, value):
    forge_config(forged, lambda config: _set(config, key, value))
    with refusal(f"^{forged}/checkpoints: its state does not fit the run's method"):
        predict(str(forged), str(images), 0)


def test_a_value_that_the_user_gives_is_not_told_of_the_run(forged, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with refusal(f"^data.root={tmp_path / 'empty'}"):
        evaluate(str(forged), {"data.root": str(tmp_path / "empty")})


def test_what_a_server_may_not_send_is_told_with_its_checkpoint(forged, images):
    forge_state(forged, "server.pt", lambda state: state["server"]["statistics"]["mean"].fill_(torch.nan))
    with refusal(f"^{forged}/checkpoints: the server sent 'mean' with values that are not finite"):
        predict(str(forged), str(images), 0)


def test_a_personal_state_without_a_part_is_told_with_its_checkpoint(forged, images):
    """The part would keep its initial value, such as an empty bank."""
    forge_state(forged, "client_00000.pt", lambda state: state.pop("sent"))
    with refusal(f"^{forged}/checkpoints/round_.*/client_00000.pt: lacks sent"):
        predict(str(forged), str(images), 0)


def test_a_defect_of_a_server_of_ones_own_is_not_taken_for_a_bad_checkpoint(forged):
    config = RunFolder(forged).config()
    model = build_model(config, RunFolder(forged).result()["partition"]["products"])
    kind = type(model.server)
    model.server.__class__ = type(
        "Own", (kind,), {"__module__": "own", "broadcast": lambda server, client: client.weight}
    )
    with pytest.raises(AttributeError, match="weight") as caught:
        load_client(model, forged, config, 0, make_fabric(accelerator="cpu"))
    assert caught.value.__notes__ == [f"The state was read from {forged}/checkpoints."]


def test_a_personal_state_by_which_scores_are_no_numbers_is_told_with_its_checkpoint(lab, tmp_path, images):
    """Messages are checked for it, but a client's own head comes from its file alone."""
    forged = shutil.copytree(lab.finished("method=feddymem")[0], tmp_path / "run")
    forge_state(forged, "client_00000.pt", lambda state: state["head"]["out.bias"].fill_(torch.nan))
    with refusal(f"^{forged}/checkpoints: .*its scores are no numbers"):
        predict(str(forged), str(images), 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", KeyError),
        ("partition.sizes", KeyError),
        ("partition.sizes", [-1, 0]),
        ("partition.sizes", ["1", "2"]),
        ("partition.products", [1, 2, 3, 4, 5]),
        ("partition.counts", 3),
        ("backbone.sha256", KeyError),
        ("method", ["a"]),
    ],
)
def test_a_result_of_other_kinds_is_told_with_its_file(forged, images, key, value):
    result = json.loads((forged / "result.json").read_text())
    _set(result, key, value)
    forge(forged, "result.json", json.dumps(result))
    with refusal(f"^{forged}/result.json does not hold what a run writes"):
        predict(str(forged), str(images), 0)


def _continued(run):
    """Configuration of a run of a further round, of which the folder then holds the beginning."""
    forge_config(run, lambda config: config.update(rounds=3))
    (run / "result.json").unlink()
    root = yaml.safe_load((run / "config.yaml").read_text())["data"]["root"]
    settings = ["method=federated_bank", "debug=seconds", "tracking=off", "cache.enabled=false", "rounds=3"]
    return compose([*settings, f"data.root={root}", f"out={run}"])


@pytest.mark.parametrize(
    ("command", "part", "name"),
    [("train", "subspace", "centre"), ("train", "moments", "count"), ("evaluate", "subspace", "centre")],
)
def test_a_state_from_which_nothing_can_be_sent_is_told_with_its_checkpoint(forged, command, part, name):
    config = _continued(forged) if command == "train" else None
    forge_state(forged, "server.pt", lambda state: state["server"][part].update({name: "text"}))
    with refusal(f"^{forged}/checkpoints/round_100002: cannot be continued from"):
        train(config, quiet=True) if config else evaluate(str(forged))


_ONE = {"bins": [1], "counts": [1]}


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ({"7": {"grass": _ONE}}, "holds scores of no client of the run"),
        ({"0": {"grass": {**_ONE, "counts": [1 << 30]}}}, "counts 1073741824 images, more than any run has"),
    ],
)
def test_scores_that_no_client_of_the_run_has_are_told_with_their_file(forged, images, clients, said):
    forge(forged, "calibration.json", json.dumps({"shared": True, "clients": clients}))
    with refusal(f"^{forged}/calibration.json: {said}"):
        watch(str(forged), str(images), once=True)


def test_sites_without_numbers_are_told_with_their_file(forged):
    result = json.loads((forged / "result.json").read_text())
    forge(forged, "result.json", json.dumps({**result, "sites": {"north": {"client": "first"}}}))
    with refusal(f"^{forged}/result.json: sites needs the number of each site"):
        RunFolder(forged).result()


def test_an_update_of_counts_that_are_none_begins_nothing(forged, images):
    forge_state(forged, "server.pt", lambda state: state["server"]["measured"].update({0: "ten"}))
    with refusal(f"^{forged}/checkpoints does not hold what a run writes"):
        update(UpdateOptions(str(forged), images=str(images), client=0, product="grass", force=True))
    assert RunFolder(forged).versions() == [0]


def test_an_update_whose_scores_are_no_numbers_is_refused_and_leaves_no_version(forged, images):
    """Such are the scores by the moments of another mean."""
    forge_state(forged, "server.pt", lambda state: state["server"]["moments"]["mean"].abs_().neg_().sub_(1))
    with refusal("client 0, client 1: anomaly scores hold NaN"):
        update(UpdateOptions(str(forged), images=str(images), client=0, product="grass", force=True))
    assert RunFolder(forged).versions() == [0]


def test_a_configuration_of_any_length_is_not_read(forged):
    forge(
        forged,
        "config.yaml",
        (forged / "config.yaml").read_text() + "".join(f"k{n}: 1\n" for n in range(200_000)),
    )
    with refusal(f"^{forged}/config.yaml: has .* more than any file of its kind"):
        RunFolder(forged).config()

"""A run that was damaged, or is somebody else's: refused in one line or used as it was, and none of its code runs."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil

import pytest
import yaml
from helpers.damage import DAMAGES, damage, forge, plant
from helpers.refusals import refusal

from lit_fedad.cli.main import main
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.experiment.run_folder import RunFolder

DAMAGED = int(os.environ.get("LIT_FEDAD_DAMAGED_RUNS", "40"))

FILES = (
    *("config.yaml", "manifest.json", "result.json", "calibration.json", "partition.json"),
    *("checkpoints/round_100002/meta.json", "checkpoints/round_100002/server.pt"),
    *("checkpoints/round_100002/client_00000.pt", "checkpoints/round_100002/client_00001.pt"),
)


@pytest.fixture(scope="module")
def used(tiny_run, tmp_path_factory):
    """A complete run, how its images are scored, and what they are."""
    images = tmp_path_factory.mktemp("new")
    for number, path in enumerate(sorted((tiny_run.parent / "data").rglob("*.png"))[:3]):
        shutil.copy(path, images / f"{number}.png")
    copy = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(tiny_run, copy)
    return copy, images, _uses(copy, images)


def _scores(run, images, client):
    with predict(str(run), str(images), client, str(run.parent / f"scores_{client}")).open() as file:
        return [(row["score"], row["threshold"], row["decision"]) for row in csv.DictReader(file)]


def _uses(run, images):
    """What a complete run gives: scores of both clients, metrics, the result itself."""
    return {
        "first": lambda: _scores(run, images, 0),
        "second": lambda: _scores(run, images, 1),
        "metrics": lambda: json.dumps(evaluate(str(run))),
        "result": lambda: RunFolder(run).result(),
    }


def _outcome(use):
    try:
        return use()
    except UserError as error:
        return error


@pytest.fixture(scope="module")
def expected(used):
    return {name: use() for name, use in used[2].items()}


def _compare(used, expected, tmp_path, capsys, file, kind, seed, names):
    whole, images, _ = used
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    other = run / random.Random(seed).choice([name for name in FILES if name != file])
    damage(run / file, kind, random.Random(f"{file} {kind} {seed}"), other)
    for name in names:
        got = _outcome(_uses(run, images)[name])
        if isinstance(got, UserError):
            assert "\n" not in str(got)
            assert str(run) in str(got)
        elif not (name == "result" and got is None):  # a lost result is an incomplete run
            assert got == expected[name], (file, kind, seed, name)
    capsys.readouterr()
    root = yaml.safe_load((whole / "config.yaml").read_text())["data"]["root"]
    config = ["data=textures", f"data.root={root}", "cache.enabled=false", "tracking=off", f"out={run}"]
    status = main(["train", "debug=seconds", *config])  # shows the result, or refuses
    said = capsys.readouterr()
    assert status in (0, 2)
    assert "Traceback" not in said.err
    if status == 0:
        shown = json.loads((run / "result.json").read_text())
        assert shown["last"] == expected["result"]["last"]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("result.json", "bit"),
        ("calibration.json", "bit"),
        ("config.yaml", "bit"),
        ("checkpoints/round_100002/client_00000.pt", "missing"),
    ],
)
def test_a_damaged_file_is_one_line(used, tmp_path, file, kind):
    """Those that 0.1 would have used as they were."""
    whole, images, _ = used
    shutil.copytree(whole, tmp_path / "run")
    damage(tmp_path / "run" / file, kind, random.Random(0), whole / "partition.json")
    with refusal(f"^{tmp_path / 'run'}/") as caught:
        predict(str(tmp_path / "run"), str(images), 0, str(tmp_path / "out"))
    assert file.rpartition("/")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("left", "said"), [(None, "no checkpoint"), ("round_100001", "that of round 1")], ids=["none", "earlier"]
)
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_run_without_its_last_checkpoint_is_not_taken_for_the_trained_one(
    used, tmp_path, command, left, said
):
    """One that was copied in part: the model that rounds begin with would be evaluated."""
    whole, images, _ = used
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = run / "checkpoints" / "round_100002"
    last.rename(last.with_name(left)) if left else shutil.rmtree(last)
    with refusal(f"^{run}/checkpoints: holds {said}, and not that of the last round, 2; restore it"):
        evaluate(str(run)) if command == "evaluate" else predict(
            str(run), str(images), 0, str(tmp_path / "out")
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAMAGED))
def test_nothing_damaged_is_used_silently(used, expected, tmp_path, capsys, seed):
    """LIT_FEDAD_DAMAGED_RUNS sets how many: every file with every kind of damage in 63."""
    file, kind = FILES[seed % len(FILES)], DAMAGES[seed // len(FILES) % len(DAMAGES)]
    names = ["first", "second", "result"] + (["metrics"] if seed % 8 == 0 else [])
    _compare(used, expected, tmp_path, capsys, file, kind, seed, names)


def _commands(run):
    images = run.parent / "images"
    images.mkdir(exist_ok=True)
    (images / "0.png").touch()
    yield ["evaluate", f"run={run}"]
    yield ["predict", f"run={run}", f"images={images}"]
    yield ["export", f"run={run}"]
    yield ["privacy", "attack=dcor", f"run={run}"]
    root = yaml.safe_load((run / "config.yaml").read_text())["data"]["root"]
    next_run = [f"start={run}", f"out={run.parent / 'next'}", f"data.root={root}", "cache.enabled=false"]
    next_run.append("data=textures")
    yield ["train", "debug=seconds", "tracking=off", *next_run]


def _refused(run, command, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert "Traceback" not in error
    assert not (run.parent / "owned").exists()
    return " ".join(error.split())


@pytest.mark.parametrize("key", ["last", "config", "seconds_per_round"])
def test_a_complete_run_with_a_result_of_other_kinds_is_one_line(copied_run, capsys, key):
    result = json.loads((copied_run / "result.json").read_text())
    forge(copied_run, "result.json", json.dumps({**result, key: 3}))
    root = result["config"]["data"]["root"]
    settings = [
        "method=federated_bank",
        "debug=seconds",
        "tracking=off",
        "cache.enabled=false",
        "data=textures",
    ]
    said = _refused(copied_run, ["train", *settings, f"data.root={root}", f"out={copied_run}"], capsys)
    assert f"{copied_run}/result.json does not hold what a run writes" in said


@pytest.mark.parametrize("name", ["server.pt", "client_00000.pt", "client_00001.pt"])
def test_a_planted_checkpoint_runs_no_code(copied_run, capsys, name):
    (last,) = (copied_run / "checkpoints").glob("round_*")
    plant(last, name, f"touch {copied_run.parent}/owned")
    commands = [*_commands(copied_run)]
    # A start takes the server's weights alone, and predict the files of one client.
    chosen = {"server.pt": commands, "client_00000.pt": commands[:1], "client_00001.pt": commands[:1]}[name]
    for command in chosen:
        if command[0] != "privacy":  # refused before: FedDyMem shares no densities
            assert f"{name}: cannot be read" in _refused(copied_run, command, capsys)


@pytest.mark.parametrize("place", ["task", "backbone", "callbacks", "federation"])
def test_a_planted_configuration_runs_no_code(copied_run, capsys, place):
    config = yaml.safe_load((copied_run / "config.yaml").read_text())
    code = {"_target_": "os.system", "command": f"touch {copied_run.parent}/owned"}
    if place == "callbacks":
        config["callbacks"] = {"mine": code}
    elif place == "federation":
        config["federation"]["channel"]["up"] = code
    else:
        config[place] = {**code, "anything": config[place]}
    forge(copied_run, "config.yaml", yaml.safe_dump(config, sort_keys=False))
    for command in _commands(copied_run):
        assert "os.system" in _refused(copied_run, command, capsys)

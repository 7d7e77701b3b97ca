"""A run's folder from somebody else: opening it runs nothing that lies in it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from helpers.damage import Planted, forge

from lit_fedad.cli.main import main
from lit_fedad.core.files import sha256


@pytest.fixture
def planted(tiny_run, tmp_path):
    """A copy of a complete run, in which somebody may plant something."""
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


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


@pytest.mark.parametrize("name", ["server.pt", "client_00000.pt", "client_00001.pt"])
def test_a_planted_checkpoint_runs_no_code(planted, capsys, name):
    (last,) = (planted / "checkpoints").glob("round_*")
    (last / name).unlink()
    torch.save({"server": Planted(f"touch {planted.parent}/owned"), "history": []}, last / name)
    meta = json.loads((last / "meta.json").read_text())
    meta["files"][name] = sha256(last / name)
    (last / "meta.json").write_text(json.dumps(meta))
    commands = [*_commands(planted)]
    # A start takes the server's weights alone, and predict the files of one client.
    chosen = {"server.pt": commands, "client_00000.pt": commands[:1], "client_00001.pt": commands[:1]}[name]
    for command in chosen:
        if command[0] != "privacy":  # refused before: FedDyMem shares no densities
            assert f"{name}: cannot be read" in _refused(planted, command, capsys)


@pytest.mark.parametrize("place", ["task", "backbone", "callbacks", "federation"])
def test_a_planted_configuration_runs_no_code(planted, capsys, place):
    config = yaml.safe_load((planted / "config.yaml").read_text())
    code = {"_target_": "os.system", "command": f"touch {planted.parent}/owned"}
    if place == "callbacks":
        config["callbacks"] = {"mine": code}
    elif place == "federation":
        config["federation"]["channel"]["up"] = code
    else:
        config[place] = {**code, "anything": config[place]}
    forge(planted, "config.yaml", yaml.safe_dump(config, sort_keys=False))
    for command in _commands(planted):
        assert "os.system" in _refused(planted, command, capsys)

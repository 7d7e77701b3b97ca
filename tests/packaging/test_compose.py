"""A federation on one machine: what its file says, and its commands, run without containers in folders of their own.

With ``LIT_FEDAD_INSTALL=1`` they also run with what the image installs, and nothing else: pip takes it from its index.
"""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from helpers.ports import free_ports

ROOT = Path(__file__).parents[2]
SITES = ("north", "east", "south")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text())["services"]


def test_every_machine_has_its_own_volume_and_the_way_between_them_carries_public_files_alone(services):
    assert set(services) == {"enrol", "coordinator", *SITES}
    for name in ("coordinator", *SITES):
        own, enrol = (volume.split(":") for volume in services[name]["volumes"])
        assert own[0] == name
        assert enrol == ["enrol", services[name]["environment"]["ENROL"]]
        assert "user" not in services[name]
        copied = [line.split()[1] for line in services[name]["command"][0].splitlines() if "cp " in line]
        assert {Path(path.strip('"')).suffix for path in copied} <= {".pub", ".crt"}
    assert services["enrol"]["entrypoint"] == ["chmod", "1777", "/enrol"]
    assert len({services[name]["environment"]["SEED"] for name in SITES}) == 3


def test_images_are_built_from_a_file_that_is_there(services):
    for service in services.values():
        folder = ROOT / "containers" / service["build"]["context"]
        assert (folder / service["build"]["dockerfile"]).is_file()


def this_environment(folder):
    """Makes the program of this environment; returns its folder."""
    pytest.importorskip("flwr")
    program = folder / "lit-fedad"
    folder.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore -m lit_fedad "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def image_environment(folder):
    """Installs into an empty environment what the image does, and this torch; returns the folder of its programs."""
    if os.environ.get("LIT_FEDAD_INSTALL") != "1":
        pytest.skip("LIT_FEDAD_INSTALL=1 installs what the image does")
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    venv.create(folder, with_pip=True)
    (folder / "torch.txt").write_text(
        "".join(f"{name}=={version(name)}\n" for name in ("torch", "torchvision"))
    )
    text = (ROOT / "containers" / "Dockerfile.site").read_text()
    asked = re.findall(r"pip install --no-cache-dir (?:--index-url \S+ )?(.+?) *\\", text)
    assert len(asked) == 2
    for packages in asked:
        words = shlex.split(packages.replace("${wheel}", wheel))
        subprocess.run(
            [folder / "bin" / "pip", "install", "--quiet", "--constraint", folder / "torch.txt", *words],
            check=True,
        )
    return folder / "bin"


@pytest.fixture(params=[this_environment, image_environment])
def start(services, tmp_path, request):
    """Starts a service's command in a folder of its own, again and again until it succeeds, as compose does."""
    programs = request.param(tmp_path / "environment")
    (tmp_path / "enrol").mkdir()
    port, link = free_ports()
    here = {
        "ENROL": tmp_path / "enrol",
        "HOST": "127.0.0.1",
        "PORT": port,
        "LINK": link,
        "ADDRESS": f"127.0.0.1:{port}",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT) if request.param is this_environment else "",
        "OMP_NUM_THREADS": 1,
    }
    running = []

    def start(name):
        service = services[name]
        (tmp_path / name).mkdir()
        command = service["command"][0].replace("$$", "$")
        shell, options = service["entrypoint"]
        environment = {**os.environ, **service["environment"], **{key: str(one) for key, one in here.items()}}
        again = 'until "$0" "$1" "$2"; do sleep 1; done'
        process = subprocess.Popen(
            ["/bin/sh", "-c", again, shell, options, command],
            cwd=tmp_path / name, env=environment, start_new_session=True,
            stdout=(tmp_path / f"{name}.log").open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_its_commands_play_a_federation(start, tmp_path):
    coordinator = start("coordinator")
    for name in SITES:
        start(name)
    try:
        status = coordinator.wait(timeout=900)
    finally:
        said = {name: (tmp_path / f"{name}.log").read_text() for name in ("coordinator", *SITES)}
    assert status == 0, said
    result = json.loads((tmp_path / "coordinator" / "fed" / "run" / "result.json").read_text())
    assert sorted(result["status"]) == sorted(SITES)
    assert all(own["rounds"] >= 1 and own["troubles"] == [] for own in result["status"].values())
    drawn = {name: sorted((tmp_path / name / "images").rglob("*.png")) for name in SITES}
    assert all(drawn.values())
    assert len({drawn[name][0].read_bytes() for name in SITES}) == 3  # each its own

"""A SuperLink and three sites in processes of their own, with TLS and enrolled keys: the digits of one process.

``LIT_FEDAD_FLOWER=all`` plays every method that crosses, and not some of each kind.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import yaml
from helpers import class_sites, sites
from helpers.class_sites import (
    CLASSES,
    LEARN_CLASSES,
    PLACES,
    SEMANTIC,
    class_data,
    pack,
    semantic_data,
    words_of,
)
from helpers.ports import free_ports
from helpers.sites import DEBUG, NAMES, OF_FILES, OPEN, paint, told

pytest.importorskip("flwr")

from lit_fedad.contracts.state import state_of
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.site_folder import SiteFolder

pytestmark = pytest.mark.slow
CPU = ["fabric.accelerator=cpu"]
ALL = os.environ.get("LIT_FEDAD_FLOWER") == "all"
PLAYED = {
    "files": ["federated_bank", "fedavg", "federated_subspace"],
    "classes": ["fedvck"],
    "semantic": [("fadngs", "contrastive")],
}
if ALL:
    PLAYED = {"files": [*OF_FILES, "federated_patchcore"], "classes": LEARN_CLASSES, "semantic": SEMANTIC}


def command(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return {
        "args": [sys.executable, "-W", "ignore", "-m", "lit_fedad", *map(str, words)],
        "env": environment,
    }


def file_data(root):
    """What an operator says of anomalies in image files."""
    return ["data=mvtec_mixture", f"data.root={root / 'images'}"]


@contextmanager
def federation(folder, data, classes=()):
    """A coordinator's folder, with three enrolled sites that run."""
    port, link = free_ports()
    given = {"host": "127.0.0.1", "port": port, "link": link, "sites": list(NAMES), "timeout": 1800.0}
    given["classes"] = list(classes)
    words = ["method=fedavg", *DEBUG]
    fed = FederationFolder.create(folder / "fed", **given, overrides=words, own=[*CPU, "tracking=off"]).path
    processes = []
    for name in NAMES:
        address = f"127.0.0.1:{port}"
        SiteFolder.create(
            folder / name,
            fed / "ca.crt",
            name=name,
            address=address,
            data=[*data(folder / name)],
            own=[*CPU, f"cache.folder={folder / name / 'cache'}"],
            policy=OPEN.content,
        )
        (fed / "keys" / f"{name}.pub").write_bytes((folder / name / "key.pub").read_bytes())
        with (folder / f"{name}.log").open("wb") as log:
            start = command("site", "start", f"site={folder / name}")
            processes.append(subprocess.Popen(**start, stdout=log, stderr=log))
    yield
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(60)


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A federation of sites with anomalies in image files: its folder, and the products' names."""
    folder = tmp_path_factory.mktemp("files")
    products = paint(folder)
    with federation(folder, file_data):
        yield folder, products


@pytest.fixture(scope="module")
def of_classes(tmp_path_factory):
    """A federation of sites with labelled images of classes."""
    folder = tmp_path_factory.mktemp("classes")
    pack(folder, own_numbers=True)
    with federation(folder, class_data, CLASSES):
        yield folder


@pytest.fixture(scope="module")
def of_semantic_anomalies(tmp_path_factory):
    """A federation of sites whose anomalies are images of other classes."""
    folder = tmp_path_factory.mktemp("semantic")
    pack(folder, own_numbers=False)
    with federation(folder, semantic_data):
        yield folder


def runs(folder):
    """Names of the runs that the first site has taken part in."""
    return {path.name for path in (folder / NAMES[0] / "states").glob("*")}


def over_flower(folder, out, words, own):
    """Plays a run over the federation; returns the coordinator's state and, in order, the sites' own."""
    before = runs(folder)
    settings = folder / "fed" / "federation.yaml"
    content = yaml.safe_load(settings.read_text())
    changed = {"overrides": words, "own": [*CPU, "tracking=off", *own], "out": out}
    settings.write_text(yaml.safe_dump(content | changed))
    done = subprocess.run(
        **command("federation", "start", f"fed={folder / 'fed'}"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoints = Checkpoints(FederationFolder.open(folder / "fed").run / "checkpoints")
    _, state = checkpoints.load(checkpoints.latest())
    bases = torch.load(checkpoints.latest() / "sites.pt")["bases"]
    (name,) = runs(folder) - before
    states = [
        torch.load(folder / site / "states" / name / f"{bases[client]:012d}.pt")
        for client, site in enumerate(NAMES)
    ]
    return state, states


def check_alike(differences, state, states, one):
    """The run over Flower ended with the server, the history and the clients of the one process."""
    assert differences(state["server"], state_of(one.server)) == []
    assert told(state["history"]) == told(one.history)
    for client, own in enumerate(states):
        found = differences(own, one.pool.get(client))
        assert [line for line in found if not line.split(":")[0].endswith(PLACES)] == []


def check_labelled(folder, differences, method, task, data, *form):
    """A method over Flower and in one process, on labelled images."""
    own = folder / f"{method}_{task}"
    own.mkdir()
    for part in ("all", "parts.json"):
        (own / part).symlink_to(folder / part)
    words, public = words_of(method, task, own)
    state, states = over_flower(folder, own.name, [*words, *form], public)
    one = class_sites.in_one_process(own, words, data, *public).federation
    check_alike(differences, state, states, one)


@pytest.mark.parametrize("method", PLAYED["files"])
def test_sites_with_image_files(of_files, differences, method):
    folder, products = of_files
    words = [f"method={method}", *DEBUG]
    state, states = over_flower(folder, method, words, [])
    one = sites.in_one_process(folder / method, words, products, folder / "all").federation
    check_alike(differences, state, states, one)


@pytest.mark.parametrize("method", PLAYED["classes"])
def test_sites_that_learn_classes(of_classes, differences, method):
    check_labelled(of_classes, differences, method, "classifier", class_data)


@pytest.mark.parametrize(("method", "task"), PLAYED["semantic"])
def test_sites_with_semantic_anomalies(of_semantic_anomalies, differences, method, task):
    form = ("data.mean=0", "data.std=1")  # as sets of semantic anomalies have it
    check_labelled(of_semantic_anomalies, differences, method, task, semantic_data, *form)

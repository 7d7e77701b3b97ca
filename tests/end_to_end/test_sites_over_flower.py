"""A SuperLink and three sites in processes of their own, with TLS and enrolled keys: the digits of one process."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from helpers.sites import DEBUG, NAMES, in_one_process, paint, told

pytest.importorskip("flwr")

from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.flower.coordinator import FederationFolder
from lit_fedad.flower.site_folder import SiteFolder

pytestmark = pytest.mark.slow
METHODS = ("feddymem", "fedavg", "federated_subspace")


def command(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return {
        "args": [sys.executable, "-W", "ignore", "-m", "lit_fedad.cli", *map(str, words)],
        "env": environment,
    }


@pytest.fixture(scope="module")
def ports():
    import socket

    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    numbers = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return numbers


@pytest.fixture(scope="module")
def federation(tmp_path_factory, ports):
    """A coordinator's folder, with three enrolled sites that run."""
    folder = tmp_path_factory.mktemp("federation")
    products = paint(folder)
    port, link = ports
    cpu = ["fabric.accelerator=cpu"]
    words = ["method=feddymem", *DEBUG]
    given = {"host": "127.0.0.1", "port": port, "link": link, "sites": list(NAMES), "timeout": 1800.0}
    fed = FederationFolder.create(folder / "fed", **given, words=words, own=[*cpu, "tracking=off"]).path
    processes = []
    for name in NAMES:
        data = ["data=mvtec_mixture", f"data.root={folder / name / 'images'}"]
        address = f"127.0.0.1:{port}"
        SiteFolder.create(folder / name, fed / "ca.crt", name=name, address=address, data=data, own=cpu)
        (fed / "keys" / f"{name}.pub").write_bytes((folder / name / "key.pub").read_bytes())
        with (folder / f"{name}.log").open("wb") as log:
            start = command("site", "start", f"site={folder / name}")
            processes.append(subprocess.Popen(**start, stdout=log, stderr=log))
    yield folder, products
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(60)


def runs(folder):
    """Names of the runs that the first site has taken part in."""
    return {path.name for path in (folder / NAMES[0] / "states").glob("*")}


@pytest.mark.parametrize("method", METHODS)
def test_three_sites_and_one_process_end_alike(federation, differences, method):
    folder, products = federation
    before = runs(folder)
    settings = folder / "fed" / "federation.yaml"
    content = yaml.safe_load(settings.read_text())
    content["words"] = [f"method={method}", *DEBUG]
    settings.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        **command("federation", "start", f"fed={folder / 'fed'}"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = FederationFolder.open(folder / "fed").run
    checkpoints = Checkpoints(run / "checkpoints")
    _, state = checkpoints.load(checkpoints.latest())
    bases = torch.load(checkpoints.latest() / "sites.pt")["bases"]

    one = in_one_process(folder / method, [f"method={method}", *DEBUG], products, folder / "all").federation
    assert differences(state["server"], read_kept(one.server)) == []
    assert told(state["history"]) == told(one.history)
    (name,) = runs(folder) - before
    for client, site in enumerate(NAMES):
        own = torch.load(folder / site / "states" / name / f"{bases[client]:012d}.pt")
        assert differences(own, one.pool.get(client)) == []
    run.rename(folder / f"run_{method}")

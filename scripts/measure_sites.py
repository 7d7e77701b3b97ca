"""Measures a federation of three sites over Flower against the same federation in one process.

    python scripts/measure_sites.py --root DIR --weights FILE --methods federated_bank,federated_subspace --rounds 3

Coordinator and sites are processes of their own on this machine, each site with one product of `real_mixture`. Between
sites and coordinator stand relays, which count the bytes on the wire: with those of TLS, HTTP, Flower's polls and
heartbeats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch)

# The federation in one process lives beside the tests that compare the two.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.sites import NAMES, in_one_process

from lit_fedad.contracts.state import state_of
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.site_folder import SiteFolder
from lit_fedad.report.html import markdown_table
from lit_fedad.sites.states import digest_of

PRODUCTS = ("mvtec/bottle", "mvtec/screw", "other_ad/magnetic_tile")
METRICS = ("i_auroc", "p_auroc", "pro")
CPU = ("fabric.accelerator=cpu",)

say = partial(print, flush=True)


class Relay:
    """A port that passes everything on to another, and counts bytes."""

    def __init__(self, target: int) -> None:
        self.target, self.bytes = target, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while part := source.recv(1 << 16):
                self.bytes += len(part)
                sink.sendall(part)
        except OSError:
            pass
        for end in (source, sink):
            end.close()


def free_ports(count: int) -> list[int]:
    """Finds ports that nobody listens on."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return numbers


def start(log: Path, *words: str) -> subprocess.Popen:
    """Starts a command of this package."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "lit_fedad", *words]
        return subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603


def over_flower(folder: Path, words: list[str], root: Path, own: list[str]) -> dict:
    """Plays the federation over Flower; returns its result, the server's state and what crossed."""
    port, link = free_ports(2)
    relays = [Relay(port) for _ in NAMES]
    given = {"host": "127.0.0.1", "port": port, "link": link, "sites": list(NAMES), "overrides": words}
    fed = FederationFolder.create(folder / "fed", **given, own=[*own, "tracking=off"])
    sites = []
    for name, product, relay in zip(NAMES, PRODUCTS, relays, strict=True):
        data = ["data=mvtec_mixture", f"data.root={root}", f"data.products=[{product}]", *limits()]
        address = f"127.0.0.1:{relay.port}"
        SiteFolder.create(folder / name, fed.path / "ca.crt", name=name, address=address, data=data, own=own)
        (fed.path / "keys" / f"{name}.pub").write_bytes((folder / name / "key.pub").read_bytes())
    coordinator = start(folder / "fed.log", "federation", "start", f"fed={fed.path}")
    try:
        sites = [start(folder / f"{name}.log", "site", "start", f"site={folder / name}") for name in NAMES]
        began = time.monotonic()
        status = coordinator.wait()
        seconds = time.monotonic() - began
    finally:
        for process in sites:
            process.send_signal(signal.SIGTERM)
        for process in sites:
            process.wait(60)
    if status:
        raise SystemExit((folder / "fed.log").read_text()[-2000:])
    requests = re.findall(
        r"(\d+) bytes in, (\d+) bytes out", "".join((folder / f"{n}.log").read_text() for n in NAMES)
    )
    checkpoints = Checkpoints(fed.run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    _, state = checkpoints.load(latest)
    return {
        "result": json.loads((fed.run / "result.json").read_text()),
        "server": digest_of(state["server"]),
        "messages": sum(int(size) for request in requests for size in request),
        "wire": sum(relay.bytes for relay in relays),
        "seconds": seconds,
    }


def limits() -> list[str]:
    """The words of `real_mixture` that say how many images a product has."""
    return ["data.train_per_product=60", "data.test_per_product=60"]


def measured(folder: Path, method: str, rounds: int, root: Path, own: list[str]) -> list[list[str]]:
    """Plays a method both ways; returns two rows of the table."""
    words = [f"method={method}", "experiment=small", f"rounds={rounds}", "evaluation.pictures=0"]
    words.append(f"evaluation.every={rounds}")
    there = over_flower(folder / method, words, root, own)
    here = in_one_process(folder / f"{method}_one", words, PRODUCTS, root, [*own, *limits()]).federation
    result = there["result"]
    last = here.history[-1].metrics
    counted = sum(sum(r.bytes_up.values()) + sum(r.bytes_down.values()) for r in here.history)
    same = there["server"] == digest_of(state_of(here.server))
    trained = [report.seconds for report in here.history]

    def row(name: str, metrics: dict, seconds: list[float], *rest: str) -> list[str]:
        values = [f"{metrics[key]['mean']:.3f}" for key in METRICS]
        return [method, name, *values, f"{sum(seconds) / len(seconds):.1f}", *rest]

    megabytes = [f"{size / 1e6:.2f}" for size in (counted, there["messages"], there["wire"])]
    overhead = f"{100 * (there['wire'] / there['messages'] - 1):.1f} %"
    return [
        row("one process", last, trained, megabytes[0], "-", "-", "-", "-"),
        row(
            "sites",
            result["last"],
            result["seconds_per_round"],
            *megabytes,
            overhead,
            "yes" if same else "no",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of the data")
    parser.add_argument("--weights", type=Path, required=True, help="ImageNet weights of ResNet-18")
    parser.add_argument(
        "--methods", default="federated_bank,federated_subspace", help="names with commas between them"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods.split(","):
            rows += measured(
                Path(folder), method, given.rounds, given.root, [*CPU, f"backbone.weights={given.weights}"]
            )
            say(rows[-2:])
    head = ["method", "where", "I-AUROC", "P-AUROC", "PRO", "seconds a round", "MB counted", "MB of messages"]
    report = markdown_table([*head, "MB on the wire", "over the messages", "same digits"], rows)
    say(report)
    if given.out:
        given.out.write_text(report + "\n")

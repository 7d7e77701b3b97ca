"""Two processes give what one gives."""

from __future__ import annotations

import json
import os

import pytest
from helpers.small_tasks import CONDENSING

from lit_fedad.methods.feddymem import FedDyMemClient

pytestmark = pytest.mark.slow

FAILING = """
from lit_fedad.cli import main as cli
from lit_fedad.methods.feddymem import FedDyMemClient

send = FedDyMemClient.send

def fails(self, loader):
    if (self.context.round, self.context.client) == (1, 1):
        raise RuntimeError("the disk is full")
    return send(self, loader)

FedDyMemClient.send = fails
"""

FEDVCK = ("method=fedvck", *CONDENSING, "partition.clients=3")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("federation=partial", "partition.clients=3", "evaluation.alone=true"),
            id="an-odd-number-take-part-in-turn",
        ),
        pytest.param(("partition=by_product", "partition.clients=1"), id="fewer-clients-than-processes"),
    ],
)
def test_two_processes_equal_one_bit_for_bit(lab, tmp_path, differences, outcome, overrides):
    """With one thread each; more threads may add numbers up in another order."""
    results = [
        lab.train(tmp_path / str(devices), *overrides, f"fabric.devices={devices}", "evaluation.pictures=1")
        for devices in (1, 2)
    ]
    assert differences(*map(outcome, results)) == []
    assert differences(lab.state(tmp_path / "1"), lab.state(tmp_path / "2")) == []


def test_a_server_that_trains_differs_in_no_more_than_digits(lab, tmp_path, differences):
    """It uses all cores while others wait: what clients sent first is equal, what they made of its weights nearly."""
    one, two = (
        lab.train(tmp_path / str(devices), *FEDVCK, f"fabric.devices={devices}") for devices in (1, 2)
    )
    sent = [lab.state(tmp_path / devices)["server"]["knowledge"][1] for devices in "12"]
    assert differences(*sent) == []
    assert (one["bytes_up"], one["bytes_down"]) == (two["bytes_up"], two["bytes_down"])
    for ours, theirs in zip(one["scalars"], two["scalars"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_failing_client_is_left_out_in_any_process(lab, tmp_path, differences, outcome, monkeypatch, capsys):
    """A client that fails in one process neither stops nor hangs the other."""
    settings = ("partition.clients=3", "federation.sampler.on_failure=skip")
    with monkeypatch.context() as patch:
        patch.setattr(FedDyMemClient, "send", FedDyMemClient.send)  # put back afterwards
        exec(FAILING, {})
        one = lab.train(tmp_path / "1", *settings)
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    printed = lab.command(tmp_path / "2", *settings, "fabric.devices=2")
    two = json.loads((tmp_path / "2" / "result.json").read_text())
    for text in (capsys.readouterr().err, printed):
        assert "client 1 left out: RuntimeError: the disk is full" in text
    assert differences(outcome(one), outcome(two)) == []
    assert differences(lab.state(tmp_path / "1"), lab.state(tmp_path / "2")) == []
    assert one["elements_up"][-2] * 3 == one["elements_up"][-1] * 2


def test_run_refused_by_policy_ends_both_processes_in_one_line(lab, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = lab.start(tmp_path / "run", "fabric.devices=2")
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 2, text
    assert text.strip().splitlines()[-1].endswith("round 1, client 1: RuntimeError: the disk is full")
    assert "Traceback" not in text

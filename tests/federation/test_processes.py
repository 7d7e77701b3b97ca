"""Devices that runs take, and what a launched function leaves behind in its process."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.accelerators import MPSAccelerator
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader

from lit_fedad.core.errors import UserError
from lit_fedad.federation.processes import launched, make_fabric


@pytest.mark.parametrize("fails", [False, True], ids=["well", "with an error"])
@pytest.mark.filterwarnings("ignore")
def test_a_launched_function_leaves_loaders_as_they_were(fails):
    """A thousand trials of a sweep in one process, each of which patched them once more, would slow one another."""
    fabric = make_fabric(accelerator="cpu", devices=1, precision="32-true")
    before, seen = (DataLoader.__init__, BatchSampler.__init__), []

    def play(fabric, steps):
        trainer = Trainer(accelerator="cpu", max_steps=steps, barebones=True)
        trainer.fit(BoringModel())
        seen.append(trainer.global_step)
        if fails:
            raise UserError("as planned")

    if fails:
        with pytest.raises(UserError, match="as planned"):
            launched(fabric, play)(2)
    else:
        launched(fabric, play)(2)
    assert seen == [2]
    assert (DataLoader.__init__, BatchSampler.__init__) == before


@pytest.mark.skipif(sys.platform != "linux", reason="the port is kept on Linux alone")
def test_nobody_else_gets_the_port_of_the_processes_before_the_first_has_opened_it(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    ports = []

    def launch(function):
        ports.append(int(os.environ["MASTER_PORT"]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", ports[0]))
        torch.distributed.TCPStore("127.0.0.1", ports[0], 1, is_master=True)

    launched(SimpleNamespace(world_size=2, launch=launch), print)()
    assert ports
    assert "MASTER_PORT" not in os.environ


def test_apples_processor_has_no_double_precision_and_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_fabric("auto").device.type == "cpu"
    with pytest.raises(UserError, match="fabric.accelerator=mps: only cpu and cuda"):
        make_fabric("mps")

"""Whole experiments, small enough to run in a second or two."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fedad.config import Config, compose
from lit_fedad.experiment.train import train


@dataclass
class Lab:
    """Runs experiments on painted textures; images and frozen features are shared by all of them."""

    shared: Path
    _finished: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = field(default_factory=dict)

    def words(self, out: Path, *overrides: str) -> list[str]:
        return [
            "debug=seconds",
            f"out={out}",
            f"cache.folder={self.shared}",
            *([] if {"data=motifs", "data=motif_classes"} & {*overrides} else [f"data.root={self.shared}"]),
            *(["data.size=64"] if not any(o.startswith("data=") for o in overrides) else []),
            "tracking=off",
            "fabric.accelerator=cpu",
            *overrides,
        ]

    def config(self, out: Path, *overrides: str) -> Config:
        return compose(self.words(out, *overrides))

    def train(self, out: Path, *overrides: str) -> dict[str, Any]:
        return train(self.config(out, *overrides), quiet=True)

    def finished(self, *overrides: str) -> tuple[Path, dict[str, Any]]:
        """Folder and result of a run that tests share, and leave as it is."""
        if overrides not in self._finished:
            out = self.shared / "runs" / str(len(self._finished))
            self._finished[overrides] = out, self.train(out, *overrides)
        return self._finished[overrides]

    def start(self, out: Path, *overrides: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """The same as a command of its own, on one thread as in this process."""
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "lit_fedad.cli",
            "train",
            *self.words(out, *overrides),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def command(self, out: Path, *overrides: str, cwd: Path | None = None, timeout: float = 240) -> str:
        """Runs it to its end and returns what it printed; a hang is a failure."""
        process = self.start(out, *overrides, cwd=cwd)
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, text
        return text

    @staticmethod
    def state(out: Path) -> dict[str, Any]:
        """All that the last checkpoint holds of server and clients, by file."""
        (last,) = (out / "checkpoints").glob("round_*")
        state = {path.name: torch.load(path, weights_only=False) for path in sorted(last.glob("client_*.pt"))}
        return {
            **state,
            "round": last.name,
            "server": torch.load(last / "server.pt", weights_only=False)["server"],
        }


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("shared"))


def _differences(one: Any, other: Any, at: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [line for key in one for line in _differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in _differences(a, b, f"{at}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        if (
            same
            and torch.equal(one.nan_to_num(), other.nan_to_num())
            and torch.equal(one.isnan(), other.isnan())
        ):
            return []
        size = float((one.double() - other.double()).abs().max()) if same else torch.inf
        return [f"{at}: differ by {size:.1e}"]
    if is_dataclass(one) and type(one) is type(other):
        return _differences(vars(one), vars(other), at)
    return [] if one == other else [f"{at}: {one} and {other}"]


@pytest.fixture(scope="session")
def differences():
    """Where two nested states differ, down to the last bit; an empty list where they do not."""
    return _differences


@pytest.fixture(scope="session")
def outcome():
    """What a result says apart from times, memory and places."""

    def take(result: dict[str, Any]) -> dict[str, Any]:
        circumstances = ("seconds_per_round", "peak_rss_bytes", "tracking_run_id", "config")
        return {key: value for key, value in result.items() if key not in circumstances}

    return take

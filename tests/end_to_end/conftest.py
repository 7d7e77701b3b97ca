"""Whole experiments, small enough to run in a second or two."""

from __future__ import annotations

import copy
import csv
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pairs import IN_STAGES, OWN, STREAM, of_method
from helpers.small_tasks import small_tasks
from helpers.strict_json import strict_json
from PIL import Image

from lit_fedad.core.config import Config, compose
from lit_fedad.deployment.predict import predict
from lit_fedad.evaluation.predict import ImageScorer, predict_batch
from lit_fedad.experiment.train import train
from lit_fedad.federation.client_runner import ClientRunner
from lit_fedad.federation.loop import Federation


@dataclass
class Lab:
    """Runs experiments on painted textures; images and frozen features are shared by all of them."""

    shared: Path
    _finished: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = field(default_factory=dict)
    _composed: dict[tuple[str, ...], Config] = field(default_factory=dict)

    def overrides(self, *own: str) -> list[str]:
        return [
            "debug=seconds",
            f"cache.folder={self.shared}",
            *(
                []
                if {"data=motifs", "data=motif_classes"} & {*own}
                else [f"data.root={self.shared / 'data'}"]
            ),
            *(["data=textures", "data.size=64"] if not any(o.startswith("data=") for o in own) else []),
            "tracking=off",
            "fabric.accelerator=cpu",
            "evaluation.pictures=0",  # they take half of a run's time; tests of pictures ask for them
            *own,
        ]

    def config(self, out: Path, *overrides: str) -> Config:
        """Composed once for all runs that differ in their folder alone."""
        if overrides not in self._composed:
            self._composed[overrides] = compose(self.overrides(*overrides))
        return {**copy.deepcopy(self._composed[overrides]), "out": str(out)}

    def train(self, out: Path, *overrides: str) -> dict[str, Any]:
        return train(self.config(out, *overrides), quiet=True)

    def train_with(self, callbacks: list[object], out: Path, *overrides: str) -> dict[str, Any]:
        return train(self.config(out, *overrides), quiet=True, callbacks=callbacks)

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
            "lit_fedad",
            "train",
            *self.overrides(*overrides),
            f"out={out}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def command(self, out: Path, *overrides: str, cwd: Path | None = None, timeout: float = 600) -> str:
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
        state = {path.name: torch.load(path) for path in sorted(last.glob("client_*.pt"))}
        return {
            **state,
            "round": last.name,
            "server": torch.load(last / "server.pt")["server"],
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


@pytest.fixture(scope="session", name="small_tasks")
def small_tasks_of_this_session(tmp_path_factory):
    """Small forms of the tasks, with data that suit them."""
    return small_tasks(tmp_path_factory.mktemp("labelled"))


@pytest.fixture
def pair_overrides(small_tasks):
    """Overrides of a small run of a method on a task."""

    def make(method, task):
        clients = ["partition.clients=4"] if method not in ("centralised", "nearest_neighbour") else []
        rounds = ["rounds=2", "partition=pooled", "~partition.clients"] if not clients else ["rounds=2"]
        stream = STREAM if method in IN_STAGES else []
        own = [*stream, *OWN.get(method, [])]
        return [
            f"method={method}", *of_method(method, small_tasks[task]), *clients, *rounds, *own, "federation=partial",
            "federation.sampler.fraction=0.75", "federation.sampler.min_clients=1",
            "evaluation.pictures=0",
        ]  # fmt: skip

    return make


_evaluate = Federation.evaluate


def _evaluate_as_declared(federation, round):
    """The method says that all clients predict with one model where they score every image alike, and only there."""
    metrics = _evaluate(federation, round)
    states = federation.ask(round, federation.evaluator, federation.clients)
    predictions = [federation.evaluator.predicted(state) for state in states.values()]
    if round > 0 and len(predictions) > 1 and predictions[0] is not None:
        first, *others = [predicted.scores.nan_to_num() for predicted in predictions]
        alike = all(torch.equal(scores, first) for scores in others)
        assert federation.evaluator.alike(federation.client, round) == alike
    return metrics


@pytest.fixture
def play_pair(lab, pair_overrides, tmp_path, monkeypatch, differences, outcome):
    """Plays a method on a task: half of the clients a round, one that fails, an interruption, a use of the result."""

    def play_all(method, task):
        given = [*pair_overrides(method, task), "evaluation.every=2"]
        play = ClientRunner.play

        def play_but_for_one(runner, exchange, data, mask=None):
            if exchange.trains and (runner.client.context.round, runner.client.context.client) == (2, 1):
                raise RuntimeError("out of memory")
            return play(runner, exchange, data, mask)

        monkeypatch.setattr(ClientRunner, "play", play_but_for_one)

        batches = ImageScorer.batches

        def batches_as_alone(scorer, client):
            for batch, embedding, prediction in batches(scorer, client):
                alone = predict_batch(client, batch, scorer.fabric).image_score
                torch.testing.assert_close(prediction.image_score, alone, rtol=1e-4, atol=1e-5)
                yield batch, embedding, prediction

        monkeypatch.setattr(ImageScorer, "batches", batches_as_alone)
        monkeypatch.setattr(Federation, "evaluate", _evaluate_as_declared)
        save = Federation.save

        def save_and_copy(federation, round):
            """What lies on the disk after round 1 is what an interruption would leave there."""
            save(federation, round)
            if round == 1:
                shutil.copytree(tmp_path / "straight", tmp_path / "resumed")

        with monkeypatch.context() as patch:
            patch.setattr(Federation, "save", save_and_copy)
            straight = lab.train(tmp_path / "straight", *given)
        resumed = lab.train(tmp_path / "resumed", *given)
        assert differences(outcome(resumed), outcome(straight)) == []
        assert differences(lab.state(tmp_path / "resumed"), lab.state(tmp_path / "straight")) == []
        assert strict_json(tmp_path / "straight" / "result.json")["exchanges"][-2:] == [1, 2]

        (tmp_path / "new").mkdir()
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "new" / f"{number}.png")
        with predict(str(tmp_path / "straight"), str(tmp_path / "new")).open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2
        judged = {row["class"] for row in rows} if task == "classifier" else {row["decision"] for row in rows}
        assert judged <= ({"0", "1", "2"} if task == "classifier" else {"normal", "anomalous"})

    return play_all

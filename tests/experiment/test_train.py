"""What a run tells the person who waits for it, and which callbacks it takes."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refusal

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import compose
from lit_fedad.experiment.console import Console
from lit_fedad.experiment.run import RunCallback
from lit_fedad.experiment.run_files import read_settings
from lit_fedad.experiment.train import _play, summarise_run, train
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.console import Display


def print_round(report):
    console = Console()
    console._display, console._last = Display(quiet=True), 0.0
    console.on_round_end(SimpleNamespace(rounds=5, names=ClientNames({2: "south"})), report)


@pytest.mark.parametrize(("predicted", "warned"), [(1.0, True), (2.0, False)])
def test_a_constant_prediction_is_said_in_a_line_of_its_round(predicted, warned, capsys):
    values = {"mean": 0.5, "worst": 0.5, "pooled": 0.5, "per_client": {0: 0.25, 2: 0.75}}
    classes = {"mean": 2.0, "worst": 1.0, "pooled": 3.0, "per_client": {0: 3.0, 2: predicted}}
    report = RoundReport(3, "train", [0, 2], metrics={"accuracy": values, "predicted_classes": classes})
    report.failures[1] = "late"
    print_round(report)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "warning: round 3: client 1 left out: late"
    line = "site south predicts a single class for every test image; its accuracy is that class's share"
    assert others == ([f"warning: round 3: {line}"] if warned else [])


@pytest.mark.parametrize("value", [torch.ones(2), {"by client": [np.float32(0.5)]}, {0.5}], ids=repr)
def test_what_a_callback_adds_to_the_result_must_fit_into_json(value):
    with pytest.raises(
        TypeError, match=r"^run\.extras\['mine'\] does not fit .*; give numbers, texts, lists"
    ):
        summarise_run(SimpleNamespace(config={}, extras={"fine": [0.5, None], "mine": value}), 0)


def test_rounds_without_an_evaluation_say_nothing_of_it(capsys):
    print_round(RoundReport(3, "train", [0]))
    assert capsys.readouterr().err == ""


def test_callbacks_that_have_begun_hear_of_an_interruption_of_the_others(tmp_path):
    heard = []

    def call(hook, *_):
        heard.append(hook)
        if hook == "on_run_start":
            raise KeyboardInterrupt

    fabric = SimpleNamespace(is_global_zero=True, call=call)
    with pytest.raises(KeyboardInterrupt):
        _play(fabric, {"out": str(tmp_path)}, SimpleNamespace(build=lambda *_: None), quiet=True)
    assert heard == ["on_run_start", "on_exception"]


@pytest.mark.parametrize(
    "section",
    [
        {"_target_": "fractions.Fraction"},
        {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "loss"},
    ],
)
def test_a_callback_that_no_run_would_call_is_refused(tmp_path, section):
    config = compose(["debug=seconds", "tracking=off", f"out={tmp_path / 'run'}"])
    with refusal(f"^callbacks.mine._target_={section['_target_']}: .* give a subclass of .*RunCallback"):
        train({**config, "callbacks": {"mine": section}}, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_that_is_removed_while_the_run_is_at_work_is_a_runs_folder_at_its_end(tmp_path):
    folder = tmp_path / "run"

    class Removes(RunCallback):
        def on_checkpoint(self, federation, report):
            if report.round == 1:
                shutil.rmtree(folder)

    given = ["method=federated_subspace", "debug=seconds", "tracking=off", f"cache.folder={tmp_path}"]
    result = train(compose([*given, f"out={folder}"]), quiet=True, callbacks=[Removes()])
    assert read_settings(folder)["method"] == result["config"]["method"]
    assert (folder / "partition.json").exists()


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_while_it_is_at_work_continues_after_its_last_round(tmp_path):
    folder = tmp_path / "run"

    class Moves(RunCallback):
        def on_checkpoint(self, federation, report):
            if report.round == 1:
                folder.rename(tmp_path / "moved")
            if report.round == 2:
                raise KeyboardInterrupt

    given = ["method=fedavg", "debug=seconds", "tracking=off", "rounds=3", f"cache.folder={tmp_path}"]
    config = compose([*given, f"out={folder}"])
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet=True, callbacks=[Moves()])
    assert Checkpoints(folder / "checkpoints").latest_round() == 2
    assert train(config, quiet=True)["last"]["round"] == 3

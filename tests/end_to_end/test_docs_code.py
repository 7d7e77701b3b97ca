"""Code of README and docs runs as it stands on its page; a method is one file, one YAML, one test."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers.pairs import TASKS
from helpers.pairs import refusal as unfit
from torch import nn

from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
EXTEND = "docs/extend.md"
WITHOUT_WEIGHTS = {"subspace", "padim", "feature_neighbours", "feature_svm"}
"""Tasks that train no weights, which an averaging method has nothing to do with."""


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def block(page: str, kind: str, words: str) -> str:
    """The one block of a page that holds some words."""
    (found,) = (text for text in blocks(page, kind) if words in text)
    return found


@pytest.fixture
def added(tmp_path, monkeypatch, own_conf):
    """Puts code where Python finds it, and YAML where Hydra does; nothing else changes."""
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.syspath_prepend(str(code))
    names = []

    def add(module: str, text: str, group: str = "", settings: str = "") -> None:
        (code / f"{module}.py").write_text(text)
        names.append(module)
        monkeypatch.setenv("LIT_FEDAD_PACKAGES", ",".join(names))  # as of another package than this one
        if group:
            (own_conf / group / f"{module}.yaml").write_text(
                re.sub(r"lit_fedad\.\w+\." + module, module, settings)
            )

    yield add
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", PAGES)
def test_json_and_yaml_are_what_they_claim(page):
    for text in blocks(page, "json"):
        assert isinstance(json.loads(text), dict), text
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict), text


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "MyClient"),
        (EXTEND, "class MomentumServer"),
        (EXTEND, "class LinearAuto"),
    ],
)
def test_examples_pass_the_lint_that_the_page_asks_for(page, words):
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "lit_fedad/methods/example.py", "-"]
    text = block(page, "python", words)
    linted = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.slow
def test_the_readmes_method_is_fedavg_without_its_term(lab, added, tmp_path):
    text, settings = block("README.md", "python", "MyClient"), block("README.md", "yaml", "mymethod")
    assert text.count("0.005") == 1
    added("mymethod", text, "method", settings)
    _, fedavg = lab.finished("method=fedavg")
    held = lab.train(tmp_path / "held", "method=mymethod")
    assert held["method"] == "mymethod"
    assert held["scalars"] != fedavg["scalars"]

    sys.modules.pop("mymethod")
    added("mymethod", text.replace("0.005", "0.0"), "method", settings)
    free = lab.train(tmp_path / "free", "method=mymethod")
    assert free["metrics"] == fedavg["metrics"]


@pytest.mark.slow
def test_the_exchange_of_its_own_reports_a_distance(lab, added, tmp_path):
    settings = block(EXTEND, "yaml", "MomentumServer")
    for old, new in (
        ("fedavg.exchanges", "feature_spread.exchanges"),
        ("fedmomentum.MomentumServer", "feature_spread.SpreadServer"),
        ("fedmomentum", "feature_spread"),
    ):
        settings = settings.replace(old, new)
    settings = "\n".join(line for line in settings.splitlines() if "momentum:" not in line)
    added("feature_spread", block(EXTEND, "python", "class SpreadServer"), "method", settings)
    result = lab.train(tmp_path / "run", "method=feature_spread")
    distances = [scalars["feature_spread"] for scalars in result["scalars"] if "feature_spread" in scalars]
    assert distances
    assert distances[-1] > 0


class Layers(nn.Module):
    """Two layers of pyramids as a backbone gives them."""

    channels = (2, 1)

    def forward(self, images):
        return [images[:, :2, ::2, ::2], images[:, 2:, ::4, ::4]]


def test_errors_of_the_added_task_by_hand(added):
    added("linear_autoencoder", block(EXTEND, "python", "class LinearAutoencoder"))
    from linear_autoencoder import LinearAutoencoder

    torch.manual_seed(0)
    task = LinearAutoencoder(Layers(), grid=2, image_size=8, hidden=2)
    view = task.view({"image": torch.randn(3, 3, 8, 8)})
    row = view["rows"][1, 3]
    code = task.encoder.weight @ row + task.encoder.bias
    error = ((task.decoder.weight @ code + task.decoder.bias - row) ** 2).mean()
    assert torch.allclose(task.errors(task(view), view)[1, 3], error)
    assert task.objective(task(view), view)["loss"].ndim == 0


@pytest.mark.slow
def test_the_added_task_runs_under_moon(lab, added, tmp_path):
    settings = block(EXTEND, "yaml", "LinearAutoencoder")
    added(
        "linear_autoencoder",
        block(EXTEND, "python", "class LinearAutoencoder"),
        "task",
        settings,
    )
    result = lab.train(tmp_path / "run", "method=moon", "task=linear_autoencoder")
    assert result["task"] == "LinearAutoencoder"
    assert 0 <= result["last"]["p_auroc"]["mean"] <= 1


@pytest.mark.slow
def test_the_callback_writes_a_line_for_every_upload(lab, added, tmp_path):
    added("upload_norms", block(EXTEND, "python", "class UploadNorms"))
    named = "+callbacks.norms._target_=upload_norms.UploadNorms"
    lab.train(tmp_path / "run", "method=fedavg", named)
    lines = [line.split(",") for line in (tmp_path / "run" / "upload_norms.csv").read_text().splitlines()]
    trained = {(int(round), int(client)): float(norm) for round, client, norm in lines if int(round) > 0}
    assert sorted(trained) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert min(trained.values()) > 0


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package with a method in its folder `conf`, whose callback is the metric that the page describes."""
    folder = tmp_path / "own_metrics"
    (folder / "conf" / "method").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from lit_fedad.experiment.run import RunCallback\n\n\n"
        "class FirstIsHighest(RunCallback):\n"
        "    def on_rounds_end(self, run):\n"
        "        labels = [sample.label for sample in run.local.images.test]\n"
        "        scores = {client: one.scores.tolist() for client, one in run.predictions.items()}\n"
        "        run.extras['my_metric'] = [[labels[s.index(max(s))], len(s)] for s in scores.values()]\n"
    )
    (folder / "conf" / "method" / "own_prox.yaml").write_text(
        "# @package _global_\n"
        "defaults: [fedprox]\n"
        "method: {name: own_prox}\n"
        "callbacks: {mine: {_target_: own_metrics.FirstIsHighest}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_metrics")
    yield
    sys.modules.pop("own_metrics", None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_package")
def test_a_method_of_an_own_package_runs_with_an_own_metric(lab, tmp_path):
    result = lab.train(tmp_path / "run", "method=own_prox")
    assert result["method"] == "own_prox"
    assert len(result["my_metric"]) == 2
    assert {images for _, images in result["my_metric"]} == {20}
    assert {label for label, _ in result["my_metric"]} <= {0, 1}


@pytest.mark.slow
def test_the_readmes_script_trains_and_loads_a_detector(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(block("README.md", "python", "import lit_fedad as lf"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = runpy.run_path(str(script), run_name="__main__")
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    assert made["detector"](image).decision in ("normal", "anomalous")


@pytest.fixture
def momentum(added, tmp_path):
    """Adds the method of the page; returns the folder of its code."""
    code = block(EXTEND, "python", "class MomentumServer")
    added("fedmomentum", code, "method", block(EXTEND, "yaml", "MomentumServer"))
    return tmp_path / "code"


def test_the_test_of_the_added_method_passes(momentum):
    test = block(EXTEND, "python", "def test_three_rounds_by_hand")
    (momentum / "test_fedmomentum.py").write_text(
        test.replace("lit_fedad.methods.fedmomentum", "fedmomentum")
    )
    assert pytest.main([str(momentum / "test_fedmomentum.py"), "-q", "-p", "no:cacheprovider"]) == 0


@pytest.mark.usefixtures("momentum")
def test_the_added_method_is_offered_refuses_tasks_without_weights_and_names_its_nearest():
    assert {task for task in TASKS if unfit("fedmomentum", task)} == WITHOUT_WEIGHTS
    assert "fedmomentum" in choices("method")
    with pytest.raises(UserError, match="did you mean 'fedmomentum'"):
        compose(["method=fedmomentumm"])


@pytest.mark.usefixtures("momentum")
@pytest.mark.parametrize(
    "task",
    ["classifier", *(pytest.param(task, marks=pytest.mark.slow) for task in ("memory_bank", "contrastive"))],
)
def test_the_added_method_plays_tasks_of_each_kind(play_pair, task):
    """Half of the clients a round, one that fails, an interruption, and new images, as every method is tested."""
    play_pair("fedmomentum", task)

"""What a base installation imports, and what each extra adds."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lit_fedad
from lit_fedad.cli import main as cli
from lit_fedad.core import extras
from lit_fedad.core.errors import UserError
from lit_fedad.models.lite import LITE

ROOT = Path(lit_fedad.__file__).parent
SCORING = [
    "cli.main",
    "deployment.predict",
    "deployment.watch",
    "deployment.export",
    "experiment.finished_run",
    "sites.site",
    "sites.coordinator",
    "flower.site_folder",
    "flower.coordinator",
    # Drawn data: sites of `containers/compose.yaml` have them.
    "data.textures",
    "data.motifs",
]
# By what a site's predictor is built from the configuration of a run.
BUILT = ["methods", "tasks", "models", "memory", "metrics", "federation", "evaluation", "condensation"]
TRAINING = {*extras.EXTRAS["train"], "faiss"}

GUARD = f"""
import builtins, json, sys
real = builtins.__import__
def guarded(name, globals=None, *rest, **more):
    if name.partition(".")[0] in {TRAINING!r} and (globals or {{}}).get("__name__", "").startswith("lit_fedad"):
        raise ModuleNotFoundError("No module named " + repr(name), name=name)
    return real(name, globals, *rest, **more)
builtins.__import__ = guarded
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {TRAINING!r} else found(name, *a)
from lit_fedad.cli.main import main
for command in json.loads(sys.argv[1]):
    print("begin", command[0], file=sys.stderr)
    print("status", main(command))
"""


def modules() -> dict[str, Path]:
    """Files of the package by the names of their modules."""
    names = {
        ".".join(["lit_fedad", *p.relative_to(ROOT).with_suffix("").parts]): p for p in ROOT.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def loaded(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module imports as soon as it is imported: not within functions, nor for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                yield from loaded(node.body)
            yield from loaded(getattr(node, "orelse", []))


def reached(starts: list[str], files: dict[str, Path]) -> dict[str, str]:
    """Packages outside that importing modules imports, each with the module of this package that does so."""
    outside, seen, waiting = {}, set(), list(starts)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        parents = [".".join(parts[:i]) for i in range(1, len(parts))]
        for found in [*parents, *loaded(ast.parse(files[name].read_text()).body)]:
            if found in files:
                waiting.append(found)
            elif not found.startswith("lit_fedad"):
                outside.setdefault(found.partition(".")[0], name)
    return outside


def test_scoring_and_sites_import_nothing_of_training():
    files = modules()
    built = [name for name in files if name.split(".")[1:2] and name.split(".")[1] in BUILT]
    assert len(built) > 60
    found = reached([*(f"lit_fedad.{name}" for name in SCORING), *built], files)
    assert "torch" in found
    assert {package: found[package] for package in TRAINING & found.keys()} == {}
    # The walk does find what is there.
    assert {"matplotlib", "scipy"} <= reached(["lit_fedad.experiment.figures.predictions"], files).keys()


def test_every_extra_holds_what_its_modules_need():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    distribution = {
        "sklearn": "scikit-learn",
        "skimage": "scikit-image",
        **{weights.package.replace("-", "_"): weights.package for weights in LITE.values()},
    }
    for extra, needed in extras.EXTRAS.items():
        text = " ".join(project["optional-dependencies"][extra])
        assert all(distribution.get(module, module) in text for module in needed), extra
    base = " ".join(project["dependencies"])
    assert not [module for module in TRAINING if distribution.get(module, module) in base]


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "optuna" else name)
    with pytest.raises(UserError, match=r"^here needs optuna: pip install 'lit-fedad\[train\]'$"):
        extras.require("train", "here")
    assert cli.main(["sweep", "study=feddymem_th"]) == 2
    assert capsys.readouterr().err == "error: lit-fedad sweep needs optuna: pip install 'lit-fedad[train]'\n"

    def fails(run: str) -> None:
        raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow")

    monkeypatch.setattr("lit_fedad.cli.train.sync", fails)
    assert cli.main(["sync", "run=x"]) == 2
    assert capsys.readouterr().err == "error: this needs mlflow: pip install 'lit-fedad[train]'\n"


@pytest.mark.slow
def test_a_run_is_used_without_the_packages_of_training(tiny_run, tmp_path):
    images = tiny_run.parent / "data"
    commands = [
        ["predict", f"run={tiny_run}", f"images={images}", f"out={tmp_path / 'scores'}"],
        ["watch", f"run={tiny_run}", f"images={images}", f"out={tmp_path / 'watch'}", "once=true"],
        ["train"],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GUARD, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r"^status (\d+)$", done.stdout, re.M) == ["0", "0", "2"], done.stderr
    assert (tmp_path / "scores/scores.csv").is_file()
    assert next((tmp_path / "scores/heatmaps").rglob("*.png"))
    assert (tmp_path / "watch/summary.json").is_file()
    assert not (tmp_path / "watch/drift.png").exists()
    refused = done.stderr.partition("begin train\n")[2]
    assert refused.count("\n") == 1
    assert "pip install 'lit-fedad[train]'" in refused

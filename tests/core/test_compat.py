import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lit_fedad
from lit_fedad import _compat

_SCRIPT = """
import sys
assert "torchvision" not in sys.modules
import lit_fedad
assert "torch" not in sys.modules
import torch, torchvision
from torchvision.transforms.v2 import functional
assert hasattr(torch.ops.torchvision, "nms")
image = functional.resize(torch.zeros(3, 8, 8), [4, 4])
assert image.shape == (3, 4, 4)
"""
_IMPORTS = """
import lit_fedad.deployment.predict
import lit_fedad.experiment.train
import lit_fedad.experiment.figures.predictions
import lit_fedad.methods.feddymem
services = {"fastapi", "flwr", "gradio", "ray", "starlette", "uvicorn"}
heavy = {"mlflow", "onnx", "onnxruntime", "opacus", "openvino", "optuna", "pandas", "skimage", "sklearn", *services}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
"""


@pytest.mark.slow
def test_the_script_that_trains_a_backbone_starts_beside_any_torch():
    script = Path(lit_fedad.__file__).parents[1] / "scripts" / "pretrain_backbone.py"
    subprocess.run([sys.executable, script, "--help"], check=True, capture_output=True)


@pytest.mark.slow
def test_torchvision_and_what_commands_need_alone_are_imported():
    scripts = [sys.executable, "-c", _SCRIPT + _IMPORTS]
    outcome = subprocess.run(scripts, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_where_operators_are_there_nothing_is_declared(monkeypatch):
    monkeypatch.setattr(_compat, "_library", None)
    monkeypatch.setattr(_compat, "_operators_load", lambda: True)
    monkeypatch.setattr(torch.library, "Library", lambda *arguments: pytest.fail("declared"))
    assert not _compat.declare_missing_torchvision_operators()


def test_missing_operators_are_declared_once(monkeypatch):
    declared = []

    class Library:
        def __init__(self, namespace, kind):
            declared.append((namespace, kind))

        def define(self, schema):
            torch._C.parse_schema(f"torchvision::{schema}")  # refuses what torch could not register
            declared.append(schema.partition("(")[0])

    monkeypatch.setattr(_compat, "_library", None)
    monkeypatch.setattr(_compat, "_operators_load", lambda: False)
    monkeypatch.setattr(torch.library, "Library", Library)
    assert _compat.declare_missing_torchvision_operators()
    assert declared == [("torchvision", "DEF"), "nms", "qnms"]
    assert not _compat.declare_missing_torchvision_operators()
    assert len(declared) == 3


@pytest.mark.parametrize("name", ["_C.so", "_C.pyd"])
def test_a_library_that_does_not_load_counts_as_missing(monkeypatch, tmp_path, name):
    (tmp_path / name).write_bytes(b"compiled for another torch")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_compat.importlib.util, "find_spec", lambda package: spec)
    assert not _compat._operators_load()


def test_without_torchvision_its_own_import_error_speaks(monkeypatch):
    monkeypatch.setattr(_compat.importlib.util, "find_spec", lambda package: None)
    assert _compat._operators_load()


def test_a_build_without_a_library_is_judged_by_the_operators(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_compat.importlib.util, "find_spec", lambda package: spec)
    assert lit_fedad.__version__
    assert _compat._operators_load() is hasattr(torch.ops.torchvision, "nms")


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by default", "count given", "policy given"],
)
def test_how_long_threads_spin_is_the_users_to_say(given, spins):
    kept = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = "import lit_fedad, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == spins


def test_onnxruntime_collects_nothing_for_its_makers(tmp_path):
    set_here = ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in set_here}
    code = "import lit_fedad, onnxruntime"
    subprocess.run([sys.executable, "-c", code], env={**env, "HOME": str(tmp_path)}, check=True)
    assert not list(tmp_path.iterdir())

"""A method is one file, one YAML, one test: the example of docs/extend.md, added from a folder of its own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.pairs import TASKS, refusal

from lit_fedad.core import config
from lit_fedad.core.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "extend.md"
WITHOUT_WEIGHTS = {"subspace", "padim", "feature_neighbours", "feature_svm"}
"""Tasks that train no weights, which an averaging method has nothing to do with."""


def block(kind: str, beginning: str) -> str:
    """The code block of the docs that holds some words."""
    found = [
        text for text in re.findall(rf"```{kind}\n(.*?)```", DOCS.read_text(), re.DOTALL) if beginning in text
    ]
    assert found, f"docs/extend.md has no {kind} block with {beginning!r}"
    return found[0].replace("lit_fedad.methods.fedmomentum", "fedmomentum")


@pytest.fixture
def added(tmp_path, monkeypatch):
    """The file and the YAML, in place; nothing else changes."""
    code, conf = tmp_path / "code", tmp_path / "conf"
    code.mkdir()
    (code / "fedmomentum.py").write_text(block("python", "class MomentumServer"))
    shutil.copytree(config.conf_folder(), conf)
    (conf / "method" / "fedmomentum.yaml").write_text(block("yaml", "fedmomentum"))
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "fedmomentum")  # it lies outside of lit_fedad.methods here
    monkeypatch.setattr(config, "conf_folder", lambda: conf)
    yield code
    sys.modules.pop("fedmomentum", None)


def test_its_test_passes(added):
    """As it stands in the docs."""
    (added / "test_fedmomentum.py").write_text(block("python", "def test_three_rounds_by_hand"))
    assert pytest.main([str(added / "test_fedmomentum.py"), "-q", "-p", "no:cacheprovider"]) == 0


def test_only_tasks_without_weights_are_refused(added):
    assert {task for task in TASKS if refusal("fedmomentum", task)} == WITHOUT_WEIGHTS


def test_it_is_offered_and_names_its_nearest(added):
    assert "fedmomentum" in config.choices("method")
    with pytest.raises(UserError, match="did you mean 'fedmomentum'"):
        config.compose(["method=fedmomentumm"])


@pytest.mark.parametrize(
    "task",
    ["classifier", *(pytest.param(task, marks=pytest.mark.slow) for task in ("memory_bank", "contrastive"))],
)
def test_it_plays_tasks_of_each_kind(added, play_pair, task):
    """Half of the clients a round, one that fails, an interruption, and new images, as every method is tested."""
    play_pair("fedmomentum", task)

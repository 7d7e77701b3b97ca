"""Exported detectors in MLflow's model registry: a database and files on this machine."""

import json
import shutil

import pytest
from helpers.refusals import refusal

pytest.importorskip("onnx")
from helpers.tiny_detector import tiny_detector

from lit_fedad.cli import main as cli
from lit_fedad.deployment.exported import find_exported
from lit_fedad.tracking import registry
from lit_fedad.tracking.registry import fetch_version, register_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_FEDAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "registered"


def rename(folder, name):
    """Gives a detector another name, by which its sheet is told."""
    sheet = json.loads((folder / "detector.json").read_text())
    (folder / "detector.json").write_text(json.dumps({**sheet, "name": name}))
    return folder


def refused(address):
    with refusal() as caught:
        find_exported(address)
    return str(caught.value)


def test_an_alias_names_what_was_registered_last_under_it(tmp_path, capsys):
    for name in ("first", "second"):
        folder = rename(tiny_detector(tmp_path / name), name)
        (folder / "model_card.md").write_text(f"card of the {name}")
        (folder / "notes.txt").write_text("stays at home")
        assert cli.main(["register", f"run={folder}", "name=screws", "alias=production"]) == 0
        shutil.rmtree(folder)
    assert "lit-fedad serve run=models:/screws@production" in capsys.readouterr().out

    fetched = {key: find_exported(f"models:/screws{key}") for key in ("@production", "/1", "/2")}
    names = {
        key: json.loads((folder / "detector.json").read_text())["name"] for key, folder in fetched.items()
    }
    assert names == {"@production": "second", "/1": "first", "/2": "second"}
    assert sorted(path.name for path in fetched["/1"].iterdir()) == [
        "detector.json",
        "detector.onnx",
        "model_card.md",
        "preprocessing.json",
    ]


def test_what_was_fetched_is_served_and_not_fetched_again(tmp_path, monkeypatch, cache):
    pytest.importorskip("onnxruntime")
    from lit_fedad.deployment.served_detector import ServedDetector

    folder = tiny_detector(tmp_path / "export")
    version = register_files(list(folder.iterdir()), "bottles")
    fetched = find_exported(f"models:/bottles/{version}")
    assert fetched.parent == cache
    assert ServedDetector(fetched).sheet.name == "tiny"
    assert (fetched / "detector.onnx").read_bytes() == (folder / "detector.onnx").read_bytes()

    monkeypatch.setattr(registry, "fetch_file", lambda *_: pytest.fail("fetched again"))
    assert find_exported(f"models:/bottles/{version}") == fetched


def test_a_changed_detector_is_not_registered(tmp_path, capsys):
    folder = tiny_detector(tmp_path / "export")
    (folder / "detector.onnx").write_bytes(b"other")
    assert cli.main(["register", f"run={folder}", "name=changed"]) == 2
    assert "changed since it was exported" in capsys.readouterr().err
    assert cli.main(["register", "run=models:/x/1", "name=changed"]) == 2
    assert "is registered already" in capsys.readouterr().err


def test_what_the_registry_does_not_have_is_one_line(tmp_path, monkeypatch, cache):
    folder = tiny_detector(tmp_path / "export")
    register_files([folder / "detector.onnx"], "caps", "old")
    assert "models:/caps@new: the model registry at sqlite" in refused("models:/caps@new")
    assert "models:/caps/7: the model registry" in refused("models:/caps/7")
    assert "models:/none/1: the model registry" in refused("models:/none/1")
    for address in ("models:/caps", "models:/caps@a@b", "models:/a/b/1", "models:/../1/x"):
        assert refused(address) == f"run={address}: give models:/NAME@ALIAS or models:/NAME/VERSION"
    stray = tmp_path / "notes.txt"
    stray.write_text("no detector")
    register_files([stray], "notes", "latest_one")
    assert "holds no detector; register one" in refused("models:/notes@latest_one")
    monkeypatch.setattr(registry, "LARGEST_FILE", 10)
    assert "detector.onnx has" in refused("models:/caps@old")
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "words",
    [
        "name=a@b", "name=a/b", "name=a:b", "name=O'Brien", 'name=a"b', "name=a\nb", "name=..", f"name={'a' * 251}",
        "name=a alias=v1", "name=a alias=Latest", "name=a alias=a/b", "name=a alias=a@b",
    ],
)  # fmt: skip
def test_what_no_address_names_leaves_nothing_at_the_server(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")
    folder = tiny_detector(tmp_path / "export")
    assert cli.main(["register", f"run={folder}", *words.split(" ")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words.split(' ')[-1].partition('=')[0]}=")
    assert not (tmp_path / "own.db").exists()


def test_a_name_with_spaces_is_served_as_it_is_printed(tmp_path, capsys):
    folder = tiny_detector(tmp_path / "export")
    assert cli.main(["register", f"run={folder}", "name=two words"]) == 0
    assert 'lit-fedad serve "run=models:/two words/1"' in capsys.readouterr().out
    assert (find_exported("models:/two words/1") / "detector.onnx").is_file()


def test_only_the_files_that_are_named_are_fetched(tmp_path):
    folder = tiny_detector(tmp_path / "export")
    (folder / "run.py").write_text("raise SystemExit")
    version = register_files(list(folder.iterdir()), "plain")
    fetched = fetch_version(f"models:/plain/{version}", {"detector.json"}, tmp_path / "into")
    assert [path.name for path in fetched.iterdir()] == ["detector.json"]

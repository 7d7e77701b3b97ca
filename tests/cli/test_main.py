"""The command line: what each command prints, and its exit status."""

import errno
import functools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

import lit_fedad
from lit_fedad.audits.inversion_attack import InversionOptions
from lit_fedad.audits.membership import LiraOptions
from lit_fedad.cli import main as cli
from lit_fedad.cli import privacy
from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices, conf_folder
from lit_fedad.deployment import export as exporting
from lit_fedad.deployment import predict as prediction
from lit_fedad.experiment import train as experiment
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.tracking import sender
from lit_fedad.tracking.sender import Delivery


@pytest.mark.parametrize("arguments", [(), ("help",), ("-h",), ("--help",)])
def test_help_names_every_command(say, arguments):
    status, out, err = say(*arguments)
    assert (status, err) == (0, [])
    commands = {line.split()[0] for line in out if line.startswith("  ") and line[2] != " "}
    assert commands == set(cli.COMMANDS)
    assert max(map(len, out)) <= 120


def test_version(say):
    assert say("--version") == (0, [f"lit-fedad {lit_fedad.__version__}"], [])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_tells_its_keys_and_an_example_that_reads(say, command):
    if command in ("serve", "ui"):
        pytest.importorskip({"serve": "fastapi", "ui": "gradio"}[command])
    status, out, err = say(command, "--help")
    assert (status, err) == (0, [])
    assert max(len(line) for line in out if not line.startswith("example: ")) <= 120
    for word, form in cli.COMMANDS[command].forms.items():
        assert f"example: lit-fedad {command} {form.example}".rstrip() in out
        assert form.example.startswith(word.partition("=")[0])
        listed = form.keys
        given = {option.partition("=")[0] for option in form.example.split() if "=" in option}
        assert {key.name for key in listed if key.default is None} <= given
        if listed and not form.words:
            assert given - {word.partition("=")[0]} <= {key.name for key in listed} | {"data.root"}
        for key in listed:
            assert key.meaning, key.name
            assert (
                any(line.startswith(f"  {key.name}=") for line in out) or key.name == word.partition("=")[0]
            )


def test_help_of_one_form(say):
    out = say("privacy", "attack=lira", "-h")[1]
    assert out[0] == "usage: lit-fedad privacy attack=lira run=RUN [key=value ...]"
    assert any(line.startswith("  share=0.5 ") for line in out)
    assert not any("attack=inversion" in line for line in out)


def test_help_of_train_tells_groups_and_defaults(say):
    out, composed = say("train", "--help")[1], compose()
    root = yaml.safe_load((conf_folder() / "config.yaml").read_text())
    for group in ("data", "backbone", "partition"):
        assert any(line.startswith(f"  {group}=") for line in out)
    for key in [key for key, value in root.items() if not isinstance(value, (dict, list)) and key != "grid"]:
        text = yaml.safe_dump(composed[key]).split("\n")[0]
        assert any(f"{line} ".startswith(f"  {key}={text} ") for line in out), key


def test_help_imports_what_prints_it_alone():
    code = "import sys; from lit_fedad.cli.main import main; main(['help']); print('', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    imported = {name.partition(".")[0] for name in output.splitlines()[-1].split()}
    assert {"lit_fedad", "rich"} <= imported
    assert not imported & {
        "hydra",
        "lightning",
        "matplotlib",
        "mlflow",
        "numpy",
        "pandas",
        "scipy",
        "sklearn",
        "torch",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("trian",),
            "no command 'trian'; one of train, evaluate, predict, watch, update, export, register, serve",
        ),
        (("train", "rounds"), "'rounds' is not of the form key=value"),
        (("train", "rouds=3"), "did you mean 'rounds'"),
        (("train", "method=fedymem"), "did you mean 'feddymem'"),
        (("evaluate",), "evaluate needs 'run'"),
        (("evaluate", "run="), "evaluate needs 'run'"),
        (("evaluate", "run=x", "rounds=3"), "evaluate has no key 'rounds'; did you mean 'run'?"),
        (
            ("predict", "run=x"),
            "predict needs 'images': lit-fedad predict run=RUN images=IMAGES [key=value ...]",
        ),
        (("train", "data.root=photos"), "data.root is given without data="),
        (("predict", "folder"), "'folder' is not of the form key=value"),
        (("predict", "run=x", "images=y", "version=first"), "predict.version='first' must be int or null"),
        (("export", "run=x", "formats=pt2"), "export has no key 'formats'; did you mean 'format'?"),
        (("watch", "run=x", "images=y", "once=maybe"), "watch.once='maybe' must be bool"),
        (("watch", "run=x", "images=y", "run_length=0"), "watch.run_length=0.0 must be at least 1"),
        (("privacy", "run=x"), "the privacy command is: privacy attack=lira, privacy attack=inversion"),
        (("privacy", "run=x", "attack=lire"), "attack=lire must be one of lira, inversion, dcor, report"),
        (("privacy", "run=x", "attack=lira", "shadows=3"), "shadows=3: give an even number, at least 6"),
        (
            ("privacy", "run=x", "attack=lira", "shadow=4"),
            "privacy attack=lira has no key 'shadow'; did you mean 'shadows'?",
        ),
        (
            ("privacy", "run=x", "attack=lira", "share=all"),
            "privacy attack=lira.share='all' must be float",
        ),
        (
            ("privacy", "run=x", "attack=inversion", "steps=0"),
            "images=4 steps=0 restarts=1 must be at least 1",
        ),
        (
            ("privacy", "run=x", "attack=inversion", "images=many"),
            "privacy attack=inversion.images='many' must be int",
        ),
        (
            ("privacy", "run=x", "attack=inversion", "knowledge=all"),
            "knowledge='all' must be one of ['shared', 'own']",
        ),
        (("sweep",), "sweep needs 'study'"),
        (("sync", "run=x", "client=1"), "sync has no key 'client'; valid keys: run"),
        (("sync", "run=x", "data.root=y"), "sync has no key 'data.root'; valid keys: run"),
        (("options", "methods"), "no group 'methods'"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(say, arguments, message):
    status, out, err = say(*arguments)
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert message in err[0]


@pytest.mark.parametrize("command", ["evaluate", "sync", "predict"])
def test_an_unknown_run_is_one_line(say, command, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    status, _, err = say(command, "run=typo", *(["images=."] if command == "predict" else []))
    assert status == 2
    assert len(err) == 1
    assert "run=typo: no such folder" in err[0]


def test_cfg_prints_the_configuration_that_would_run(say):
    status, out, _ = say("train", "debug=seconds", "--cfg", "seed=3")
    assert status == 0
    assert yaml.safe_load("\n".join(out)) == compose(["debug=seconds", "seed=3"])


def test_options_lists_groups_and_choices(say):
    status, out, _ = say("options")
    listed = {line.split()[0]: line.split()[1:] for line in out}
    assert status == 0
    assert listed["method"] == choices("method")
    assert {"data", "backbone", "experiment"} <= set(listed)
    assert say("options", "method")[1] == [line for line in out if line.startswith("method ")]


def test_training_and_showing_it_again(say, tmp_path):
    arguments = [
        "train",
        "method=federated_bank",
        "debug=seconds",
        "tracking=off",
        "rounds=1",
        "evaluation.pictures=0",
        "cache.enabled=false",
    ]
    arguments += ["data=textures", f"data.root={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
    dealt = tmp_path / "dealt.json"
    dealt.write_text(json.dumps([[*range(10)], [*range(10, 20)]]))
    arguments += ["partition=file", f"partition.path={dealt}"]
    status, out, err = say(*arguments)
    assert status == 0
    assert err == [
        "warning: backbone 'test_resnet' has RANDOM weights (seed 0): its scores mean nothing",
    ]
    assert ("evaluation.alpha=auto promises 0.05: what 20 calibration images allow; 0.01 needs 99") in out
    result = RunFolder(tmp_path / "run").result()
    judged = result["decisions"]["auto"]["clients"].values()
    assert [(own["promised"], own["without_promise"]) for own in judged] == [(0.05, []), (0.05, [])]
    assert any(line.startswith("round  1/1") for line in out)
    status, out, err = say(*arguments)
    assert (status, err) == (0, [])
    assert out[0].startswith("complete already")
    right = dealt.read_text()
    dealt.write_text(json.dumps([[*range(9)], [*range(9, 20)]]))
    status, _, err = say(*arguments)
    assert status == 2
    assert "or with another partition of them" in err[-1]
    dealt.write_text(right)
    first, second, *_ = sorted((tmp_path / "data").rglob("train/good/*.png"))
    first.write_bytes(second.read_bytes())
    status, _, err = say(*arguments)
    assert status == 2
    assert "begun with other images" in err[-1]
    shutil.rmtree(tmp_path / "data" / first.relative_to(tmp_path / "data").parts[0])
    (tmp_path / "data" / "mine.png").touch()  # nothing is painted there anew
    status, out, _ = say(*arguments)
    assert status == 0
    assert "were not compared" in out[0]


def test_predicting_tells_unreadable_images_by_its_status(say, tiny_run, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    data = tiny_run.parent / "data"
    good = next(data.rglob("test/good/*.png"))
    (tmp_path / "good.png").write_bytes(good.read_bytes())
    out = tmp_path / "out"
    status, _, err = say("predict", f"run={tiny_run}", f"images={tmp_path}", f"out={out}", "client=1")
    assert status == 2
    assert [line.split(":")[0] for line in err] == ["warning", "warning", "error"]
    assert "RANDOM" in err[0]
    assert "bad.png" in err[1]
    assert len((out / "scores.csv").read_text().splitlines()) == 3
    (tmp_path / "bad.png").unlink()
    status, lines, _ = say("predict", f"run={tiny_run}", f"images={tmp_path}", f"out={out}")
    assert status == 0
    assert any(line.endswith(str(out / "scores.csv")) for line in lines)


def test_options_reach_evaluate_predict_and_export(say, monkeypatch):
    called = []
    for module, name in ((prediction, "evaluate"), (prediction, "predict"), (exporting, "export")):
        spy = functools.wraps(getattr(module, name))(lambda **given: called.append(given))
        monkeypatch.setattr(module, name, spy)
    say("evaluate", "run=r", "data.root=/a=b")
    say("predict", "images=i", "run=r", "client=2", "backbone.weights=w")
    say("predict", "images=i", "run=r", "alpha=.05", "product=screw", "version=3")
    say("export", "run=r", "format=pt2", "out=", "product=screw", "version=0")
    assert called == [
        {"run": "r", "overrides": {"data.root": "/a=b"}},
        {"run": "r", "images": "i", "client": 2, "overrides": {"backbone.weights": "w"}},
        {"run": "r", "images": "i", "alpha": 0.05, "product": "screw", "version": 3, "overrides": {}},
        {"run": "r", "format": ("pt2",), "out": None, "product": "screw", "version": 0, "overrides": {}},
    ]


class Reopened(tuple):
    """What a run is opened with, in its place."""

    federation = SimpleNamespace(plan=None, summing=None)


def test_options_of_an_attack_reach_it_and_the_run_is_opened_here(say, monkeypatch, tmp_path):
    called, pages = [], []
    monkeypatch.setattr(RunFolder, "find", lambda run: RunFolder(tmp_path))
    monkeypatch.setattr(privacy, "reopen", lambda *given: Reopened(given))
    for function in ("infer", "invert", "correlate"):
        monkeypatch.setattr(privacy, function, lambda *given, name=function: called.append(given) or name)
    monkeypatch.setattr(privacy, "write_page", lambda run, outcome: pages.append(outcome))
    say("privacy", "run=r", "attack=lira", "seed=3", "data.root=x")
    say("privacy", "run=r", "attack=inversion", "steps=9")
    say("privacy", "data.root=x", "attack=dcor", "run=r")
    say("privacy", "run=r", "attack=report")
    assert pages == ["infer", "invert", "correlate", None]
    assert called == [
        (("r", {"data.root": "x"}), LiraOptions(seed=3)),
        (("r", {}), InversionOptions(steps=9)),
        (("r", {"data.root": "x"}),),
    ]


@pytest.mark.parametrize(
    ("delivery", "status", "line"),
    [
        (Delivery("ab12", 0, None), 0, "everything is delivered: MLflow run ab12"),
        (Delivery(None, 4, "http://x: refused"), 2, "error: 4 records still wait: http://x: refused"),
        (Delivery("ab12", 0, "http://x refused records"), 2, "error: http://x refused records"),
    ],
)
def test_sync_tells_what_became_of_the_records(say, monkeypatch, tiny_run, delivery, status, line):
    monkeypatch.setattr(sender, "deliver", lambda folder: delivery)
    found, out, err = say("sync", f"run={tiny_run}")
    assert (found, out + err) == (status, [line])


def test_sync_of_a_run_that_was_not_tracked(say, tiny_run):
    status, _, err = say("sync", f"run={tiny_run}")
    assert status == 2
    assert "tracking/journal.jsonl" in err[0]


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, cli.UserError, None])
def test_memory_that_is_not_enough_is_one_line_and_status_2(say, monkeypatch, kind):
    def larger_than_the_memory(*_, **given):
        if kind is not None:
            raise kind("out of memory")
        torch.empty(2**52)

    monkeypatch.setattr(experiment, "train", larger_than_the_memory)
    status, _, err = say("train", "task.slots=10000000", "rounds=20", "seed=20261130")
    assert (status, len(err)) == (2, 1)
    assert "memory" in err[0]
    assert "give a smaller task.slots, image.size, grid, batch_size or evaluation.batch_size" in err[0]


def test_a_file_where_a_folder_belongs_is_one_line(say, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setattr(experiment, "train", lambda config, place=place: place.mkdir())
        status, _, (line,) = say("train")
        assert status == 2
        assert line.startswith(f"error: {place}: cannot be read or written (")


def test_a_folder_that_may_not_be_written_is_one_line(say, monkeypatch):
    def refused(*_, **given):
        raise OSError(errno.EROFS, "Read-only file system", "reports")

    monkeypatch.setattr(experiment, "train", refused)
    assert say("train")[::2] == (2, ["error: reports: cannot be read or written (Read-only file system)"])
    status, _, (line,) = say("evaluate", f"run={500 * 'x'}")
    assert status == 2
    assert "File name too long" in line


def test_a_full_disk_names_the_copy_and_not_what_is_copied(say, monkeypatch):
    def full(*_, **given):
        raise OSError(errno.ENOSPC, "No space left on device", "old.pt", None, "new.pt")

    monkeypatch.setattr(experiment, "train", full)
    assert "is allowed (quota, ulimit -f), for new.pt: make room" in say("train")[2][0]


def test_settings_that_a_later_one_replaces_or_nothing_of_the_run_reads_are_told(say, monkeypatch):
    monkeypatch.setattr(experiment, "train", lambda config: None)
    replaced = "warning: grid=14 has no effect: grid=28 is given after it"
    said = "warning: encoder=resnet18 has no effect: nothing of this run reads it"
    assert say("train", "method=feddymem", "grid=14", "encoder=resnet18", "grid=28")[2] == [replaced, said]


def test_the_home_folder_is_known_behind_a_key(say, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    status, _, (line,) = say("data", "init", "root=~/images")
    assert status == 2
    assert line.startswith(f"error: {tmp_path / 'images'}: no such folder")

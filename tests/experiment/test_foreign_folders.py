"""A run's folder may come from anybody: what is no file of it is refused in one line; it names no other file."""

import json
import os
from pathlib import Path

import pytest
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, open_to_append, stored_bytes, within
from lit_fedad.deployment.watch_log import WatchLog
from lit_fedad.experiment.claim import begun
from lit_fedad.experiment.finished_run import built_of
from lit_fedad.experiment.run_files import _FORMAT, read_manifest, write
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.checkpoint import read_meta, read_state
from lit_fedad.sweep.plan import read_plan
from lit_fedad.tracking.journal import Journal
from lit_fedad.tracking.sender import deliver
from lit_fedad.tracking.server import ServerRun
from lit_fedad.tracking.tracker import amend


def pipe(path):
    os.mkfifo(path)


def link_to_zeros(path):
    path.symlink_to("/dev/zero")


def link_to_a_file(path):
    other = path.parent / "elsewhere"
    other.write_text("{}")
    path.symlink_to(other)


def link_to_nothing(path):
    path.symlink_to(path.parent / "nowhere")


KINDS = (pipe, link_to_zeros, link_to_a_file, link_to_nothing, Path.mkdir)
READERS = {
    "config.yaml": lambda path: RunFolder(path.parent).config(),
    "result.json": lambda path: RunFolder(path.parent).result(),
    "calibration.json": lambda path: RunFolder(path.parent).calibration(),
    "additions.json": lambda path: RunFolder(path.parent).additions(),
    "manifest.json": lambda path: read_manifest(path.parent),
    "meta.json": lambda path: read_meta(path.parent),
    "server.pt": lambda path: read_state(path, "0" * 64),
    "tracking/journal.jsonl": lambda path: Journal(path.parents[1]),
    "tracking/rejected.jsonl": lambda path: Journal(path.parents[1]),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_in_one_line(tmp_path, name, kind):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    kind(path)
    with refusal(rf"{path.name}: is a (link|folder, pipe, socket or device) and no file"):
        READERS[name](path)


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_written_goes_where_no_link_leads(tmp_path, durable):
    (tmp_path / "own").write_text("kept")
    writer = "" if durable else f".{os.getpid()}"
    (tmp_path / f".result.json{writer}.partial").symlink_to(tmp_path / "own")
    with atomic(tmp_path / "result.json", durable) as partial:
        partial.write_text("of a run")
    (tmp_path / "table").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "table")
    assert [(tmp_path / name).read_text() for name in ("own", "result.json")] == ["kept", "of a run"]


def test_a_file_of_any_size_is_not_read(tmp_path):
    with (tmp_path / "result.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="more than any file of its kind"):
        stored_bytes(tmp_path / "result.json")


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 19, "-" + "9" * 5000, "[" * 100_000])
@pytest.mark.parametrize(
    "name", ["result.json", "calibration.json", "manifest.json", "meta.json", "watch.json"]
)
def test_a_number_that_no_run_writes_is_one_line(tmp_path, name, value):
    readers = {**READERS, "watch.json": lambda path: WatchLog.open(path.parent, {})}
    (tmp_path / name).write_text(f'{{"tracked": {value}}}')
    with pytest.raises(UserError, match=rf"{name}: cannot be read") as told:
        readers[name](tmp_path / name)
    assert len(str(told.value)) < 500


class Server:
    """What a server receives."""

    def __init__(self):
        self.files = []

    def log_artifact(self, run_id, path, place):
        self.files.append(path)

    log_artifacts = log_artifact


@pytest.mark.parametrize(
    "name", ["{secret}", "../secret", "folder/../../secret", "link", "folder", "pipe", "."]
)
def test_a_journal_names_no_file_of_others(tmp_path, name):
    (tmp_path / "secret").write_text("-----BEGIN PRIVATE KEY-----")
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (run / "own").write_text("{}")
    for link in (run / "link", run / "folder" / "link"):
        link.symlink_to(tmp_path / "secret")
    os.mkfifo(run / "pipe")
    server, values = Server(), {name.format(secret=tmp_path / "secret"): "1", "own": "1"}
    with pytest.raises(UserError):
        ServerRun(server, "id", "0").send({"kind": "artifact", "scope": "", "values": values, "time": 0}, run)
    assert not server.files
    values = {"own": "1", "gone": "1"}
    ServerRun(server, "id", "0").send({"kind": "artifact", "scope": "", "values": values, "time": 0}, run)
    assert server.files == [str(run / "own")]


@pytest.mark.parametrize("send", [deliver, lambda folder: amend(folder, {"auroc": 1.0}, 1, [], "")])
def test_a_folder_names_no_server(tmp_path, monkeypatch, send):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_fedad.tracking.sender.open_run", lambda *_: pytest.fail("a server was asked"))
    files = tmp_path / "run" / "tracking"
    files.mkdir(parents=True)
    (files / "journal.jsonl").write_text('{"kind": "start", "scope": null, "values": {}, "time": 0}\n')
    (files / "sent.json").write_text(json.dumps({"uri": "http://127.0.0.1:9", "run_id": "x", "delivered": 0}))
    delivery = send(tmp_path / "run")
    assert delivery.pending
    assert "set MLFLOW_TRACKING_URI" in delivery.error


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd"])
def test_within_a_folder(tmp_path, name):
    with pytest.raises(UserError, match="which is not in it"):
        within(tmp_path, name)


@pytest.mark.parametrize(
    "line",
    [
        "sampler: {_target_: os.system, command: touch x}",
        "sampler: {_target_: optuna.samplers.PartialFixedSampler, base_sampler: {_target_: os.system, command: x}}",
        "sampler: {_target_: optuna.samplers._base.os.system, command: x}",
        "pruner: {_target_: subprocess.run, args: x}",
        "base: [method=fedavg, +callbacks.x._target_=os.system]",
    ],
)
def test_a_study_names_optunas_classes_alone(tmp_path, line):
    lines = {"base": "base: [method=fedavg]", "sampler": "sampler: {_target_: optuna.samplers.RandomSampler}"}
    lines |= {line.partition(":")[0]: line}
    space = "space: {task.learning_rate: {low: 0.1, high: 1.0}}\nobjectives: {i_auroc: maximize}\ntrials: 1"
    (tmp_path / "study.yaml").write_text("\n".join([*lines.values(), space]))
    with pytest.raises(UserError, match="a study names Optuna's samplers and pruners"):
        read_plan(str(tmp_path / "study.yaml"))


@pytest.mark.parametrize("name", ["predictions", "watch", "checkpoints"])
def test_a_folder_that_is_a_link_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{name}: is a link, and no folder of this run"):
        RunFolder.find(str(tmp_path / "run"))
    with pytest.raises(UserError, match=f"{name}: is a link"), begun(tmp_path / "run", {}):
        pass


def test_a_version_that_is_a_link_is_refused_in_one_line(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "result.json").write_text("{}")
    (tmp_path / "run" / "versions").mkdir(parents=True)
    (tmp_path / "run" / "versions" / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="versions/1: is a link"):
        RunFolder(tmp_path / "run").version(1)


CONFIGURATIONS = {
    "a tag that holds something else": 'method: !!bool "q"',
    "a date": "method: {name: 2020-01-01}",
    "a key that is no text": "method: {1: 2}",
    "a number without end": "method: {}\nseed: " + "9" * 5000,
    "a list for a section": "method: {}\nimage: [1]",
    "a text for a section": "method: {}\nfederation: x",
    "another key": "method: {}\n" + "x" * 10_000 + ": 1",
    "a text for a size": "method: {}\ndata: {size: large}",
    "a section for a version": "method: {}\nformat: {a: 1}",
}


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_that_no_run_has_is_one_line(tmp_path, text):
    write(tmp_path, "config.yaml", f"format: {_FORMAT}\n{text}\n")
    with refusal(r"config\.yaml: |another version") as told:
        RunFolder(tmp_path).config()
    assert len(str(told.value)) < 1000


def test_of_a_configuration_that_lacks_parts_nothing_is_built(tmp_path):
    said = r"config\.yaml: no detector can be built of it \(KeyError: 'task'\)"
    with pytest.raises(UserError, match=said), built_of(RunFolder(tmp_path)):
        {}["task"]
    with pytest.raises(RuntimeError, match="out of memory"), built_of(RunFolder(tmp_path)):
        raise RuntimeError("CUDA out of memory")

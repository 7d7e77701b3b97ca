"""Run folders: found by path or MLflow id, claimed by one configuration, cleared of nothing foreign."""

import json
import shutil

import pytest
import torch
import yaml
from helpers.refusals import refusal

from lit_fedad.cli.main import main
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity
from lit_fedad.experiment import run_files as runs
from lit_fedad.experiment.claim import LOCK, begun, claim, clear
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train
from lit_fedad.federation.checkpoint import read_state
from lit_fedad.metrics.conformal import Calibration, ScoreCounts


@pytest.fixture(scope="module")
def config():
    return compose(["debug=seconds", "tracking=off"])


@pytest.mark.slow
def test_the_same_configuration_gets_the_same_folder_and_another_one_another(config):
    folder = RunFolder.of(config).path
    assert folder.parts[0] == "outputs"
    assert folder.name == f"feddymem-textures-s0-{identity(config)[:8]}"
    assert RunFolder.of({**config, "fresh": True, "cache": {}}).path == folder
    assert RunFolder.of({**config, "rounds": 3}).path != folder
    assert RunFolder.of({**config, "out": "here"}).path.name == "here"


def test_a_claimed_folder_gives_the_configuration_back(tmp_path, config):
    run = RunFolder(tmp_path / "new" / "run")
    claim(run.path, config)
    assert run.config() == config
    assert identity(run.config()) == identity(config)
    claim(run.path, {**config, "fresh": True})  # circumstances may change
    assert run.config()["fresh"] is True
    assert {path.name for path in run.path.iterdir()} == {"config.yaml", "manifest.json"}


@pytest.mark.parametrize("start", [".", "versions/1", "nothing"])
def test_a_run_is_not_deleted_for_one_that_begins_with_its_weights(tmp_path, config, start):
    run = tmp_path / "run"
    for folder in (run, run / "versions" / "1"):
        claim(folder, config)
    before = sorted(tmp_path.rglob("*"))
    again = {**config, "out": str(run), "start": str(run / start), "fresh": True}
    with refusal("start=.*(this run would be deleted|no such folder)"):
        train(again, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_not_deleted_for_one_that_cannot_be_built(tmp_path, config):
    claim(tmp_path, config)
    save_json(tmp_path, "result.json", {"config": config})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    task = {"_target_": "lit_fedad.tasks.classifier.Classifier"}
    with refusal("works with task MemoryBank, not with Classifier"):
        train({**config, "task": task, "out": str(tmp_path), "fresh": True}, quiet=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != LOCK} == before


@pytest.mark.parametrize("there", [False, True])
def test_a_command_that_is_refused_leaves_nothing_and_one_that_computed_all_of_it(tmp_path, config, there):
    run = RunFolder(tmp_path / "outputs" / "run")
    if there:
        run.path.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="refused"), begun(run.path, config):
        raise UserError("refused")
    assert sorted(tmp_path.rglob("*")) == before
    with begun(run.path, config):
        save_json(run.path, "partition.json", {})
    with pytest.raises(KeyboardInterrupt), begun(run.path, config):
        raise KeyboardInterrupt
    assert {"config.yaml", "partition.json"} <= {path.name for path in run.path.iterdir()}


def test_a_half_drawn_figure_of_a_killed_run_goes_when_it_continues(tmp_path, config):
    with begun(tmp_path, config):
        (tmp_path / "figures").mkdir()
        (tmp_path / "figures" / ".aupr.png.4711.partial").touch()
    with begun(tmp_path, config):
        assert not [*(tmp_path / "figures").iterdir()]


def test_a_folder_of_another_configuration_is_refused(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    (tmp_path / "checkpoints" / "round_100000").mkdir(parents=True)
    with pytest.raises(UserError, match="another configuration") as caught:
        claim(run.path, {**config, "seed": 1})
    assert str(tmp_path) in str(caught.value)
    assert run.config()["seed"] == 0


def test_a_command_that_came_to_nothing_may_be_corrected(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    claim(run.path, {**config, "seed": 1})
    assert run.config()["seed"] == 1


@pytest.fixture
def of_0_1(tmp_path, config):
    """A complete run's folder as version 0.1 wrote it: no format, and keys that are no longer there."""
    old = {**config, "schedule": "stage_major", "queue": 65536}
    del old["callbacks"], old["distillation"]
    folder = tmp_path / "old"
    (folder / "checkpoints" / "round_100002").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(old, sort_keys=False))
    (folder / "result.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "use",
    [
        lambda folder, config: RunFolder.find(str(folder)),
        lambda folder, config: RunFolder(folder).config(),
        lambda folder, config: claim(folder, config),
    ],
    ids=["find", "config", "claim"],
)
@pytest.mark.parametrize(
    ("number", "maker"), [(None, r"lit_fedad 0\.1,"), (2, r"another version of lit_fedad \(format 2\),")]
)
def test_a_run_of_another_version_is_refused_in_one_line(of_0_1, config, use, number, maker):
    if number:
        written = yaml.safe_load((of_0_1 / "config.yaml").read_text())
        (of_0_1 / "config.yaml").write_text(yaml.safe_dump({"format": number, **written}))
    with refusal(f"^{of_0_1}: a run of {maker} .* train again .*out=DIR"):
        use(of_0_1, config)


@pytest.mark.parametrize(
    "command",
    ["evaluate run={}", "predict images=. run={}", "export run={}", "sync run={}", "privacy attack=lira run={}",
     "train debug=seconds tracking=off out={}"],
)  # fmt: skip
def test_every_command_refuses_a_run_of_0_1(of_0_1, capsys, command):
    assert main([word.format(of_0_1) for word in command.split()]) == 2
    assert f"{of_0_1}: a run of lit_fedad 0.1" in capsys.readouterr().err
    assert (of_0_1 / "result.json").exists()


def test_a_run_of_0_1_may_be_replaced(of_0_1, config):
    run = RunFolder(of_0_1)
    clear(run.path)  # fresh=true
    claim(run.path, config)
    assert run.config() == config


def test_clearing_leaves_what_no_run_wrote(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    save_json(run.path, "result.json", {})
    (tmp_path / "checkpoints" / "round_100001").mkdir(parents=True)
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "photos").mkdir()
    clear(run.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "thesis.tex"]


@pytest.mark.parametrize("name", ["figures", "checkpoints", "config.yaml", "result.json"])
def test_a_folder_that_never_held_a_run_is_neither_cleared_nor_claimed(tmp_path, config, name):
    if "." in name:
        (tmp_path / name).write_text("services: {}")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.png").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{tmp_path}.*{name}"):
        clear(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}.*{name}"):
        claim(tmp_path, config)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_was_cleared_halfway_is_still_a_run(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    (tmp_path / "figures").mkdir()
    (tmp_path / "config.yaml").unlink()
    clear(run.path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["../../x", "a/b", "", ".hidden", "..", "-x", "a b"])
@pytest.mark.parametrize("key", ["method", "data"])
def test_no_name_leaves_the_folder_of_all_runs(config, key, part):
    other = {**config, key: {**config[key], "name": part}}
    if key == "data" and not part:
        assert RunFolder.of(other).path.parts[0] == "outputs"
        return
    with pytest.raises(UserError, match=rf"{key}\.name="):
        RunFolder.of(other)


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "calibration.json"])
def test_a_file_that_was_changed_is_named(tmp_path, config, name):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    save_json(run.path, "result.json", {"config": config, "last": 1})
    save_json(run.path, "calibration.json", {0: 1.5})
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("1", "2"))
    read = {"config.yaml": run.config, "result.json": run.result, "calibration.json": run.calibration}[name]
    with refusal(f"^{tmp_path / name}: changed since the run wrote it"):
        read()


@pytest.mark.parametrize("text", ["", "[1, 2]", "nonsense", "[" * 100_000, "\0"])
@pytest.mark.parametrize("name", ["manifest.json", "result.json", "calibration.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, config, name, text):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    (tmp_path / name).write_text(text)
    read = {"manifest.json": run.config, "result.json": run.result, "calibration.json": run.calibration}[name]
    with refusal(f"^{tmp_path / name}: "):
        read()


NINE = ", ".join
BOMBS = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{NINE([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "merged": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{NINE([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_configuration_that_unfolds_without_end_is_refused(tmp_path, config, bomb):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text() + bomb)
    with pytest.raises(UserError, match=r"config.yaml: cannot be read \((its parts refer|merge keys)"):
        run.config()


def test_a_state_that_unfolds_without_end_is_refused(tmp_path):
    state = ["x"]
    for _ in range(12):
        state = [state] * 9
    torch.save({"server": state}, tmp_path / "server.pt")
    with pytest.raises(UserError, match="its parts refer to each other"):
        read_state(tmp_path / "server.pt")


def test_a_kill_between_manifest_and_file_leaves_both_readable(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    with monkeypatch.context() as patch:
        patch.setattr(runs.Path, "write_text", _only_the_manifest)
        with pytest.raises(KeyboardInterrupt):
            claim(run.path, {**config, "fresh": True})
    assert run.config() == config
    claim(run.path, {**config, "fresh": True})
    assert run.config()["fresh"] is True


def _only_the_manifest(path, text):
    if "manifest" not in path.name:
        raise KeyboardInterrupt
    path.write_bytes(text.encode())


def test_a_complete_run_without_checkpoints_is_not_judged_by_other_keys(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    save_json(run.path, "result.json", {"config": config})
    other = {**config, "evaluation": {**config["evaluation"], "alpha": 0.5}}
    with refusal(f"^{tmp_path / 'checkpoints'}: holds no checkpoint"):
        claim(run.path, other)
    assert run.config() == config
    (tmp_path / "checkpoints" / "round_100000").mkdir(parents=True)
    claim(run.path, other)
    assert run.config() == other


def test_a_result_of_another_configuration_is_refused(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    save_json(run.path, "result.json", {"config": {**config, "seed": 1}})
    with pytest.raises(UserError, match="another configuration"):
        claim(run.path, config)


@pytest.mark.slow
def test_clearing_knows_every_file_of_a_real_run(tiny_run):
    assert {path.name for path in tiny_run.iterdir()} <= {*runs.FOLDERS, *runs.FILES, LOCK}


def test_a_run_is_found_by_path(tiny_run):
    assert RunFolder.find(str(tiny_run)).path == tiny_run


def test_a_run_is_found_by_its_mlflow_id(monkeypatch, tiny_run):
    monkeypatch.setattr("lit_fedad.experiment.run_folder.find_run_folder", {"0a1b": tiny_run}.__getitem__)
    assert RunFolder.find("0a1b").path == tiny_run


def test_a_missing_run_is_one_line_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'no.db'}")
    with refusal(r"run=outputs/typo: no such folder"):
        RunFolder.find("outputs/typo")


def test_a_default_version_that_is_gone_is_named_with_what_chooses_another(tmp_path, config):
    run = RunFolder(tmp_path)
    claim(run.path, config)
    claim(run.path / "versions" / "1", config)
    save_json(run.path / "versions" / "1", "result.json", {"config": config})
    run.choose_version(1)
    shutil.rmtree(run.path / "versions" / "1")
    with refusal(rf"^{tmp_path} has no version 1, only 0; .*: lit-fedad update run={tmp_path} default=N$"):
        run.version(None)
    run.choose_version(0)
    assert run.version(None) == run


def test_a_folder_without_configuration_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        RunFolder.find(str(tmp_path))


@pytest.mark.parametrize("text", ["version: '3'\nservices: {}\n", "- a\n- list\n", "a: [unclosed\n"])
def test_a_foreign_configuration_is_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with refusal(r"config\.yaml"):
        RunFolder.find(str(tmp_path)).config()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        claim(tmp_path / "file" / "run", config)


def test_undefined_numbers_become_null_and_client_numbers_text(tmp_path):
    value = {0: float("nan"), "nested": [1, (float("inf"), 2.5)], "text": "NaN", "flag": True}
    path = save_json(tmp_path, "result.json", value)
    expected = {"0": None, "nested": [1, [None, 2.5]], "text": "NaN", "flag": True}
    assert json.loads(path.read_text()) == expected
    assert RunFolder(tmp_path).result() == expected


def test_an_incomplete_run_has_no_result(tmp_path):
    assert RunFolder(tmp_path).result() is None


def test_calibration_is_read_by_client(tmp_path):
    calibration = Calibration({0: {"nut": ScoreCounts.of(torch.tensor([1.5]))}, 3: {}}, shared=True)
    save_json(tmp_path, "calibration.json", calibration.to_json())
    assert RunFolder(tmp_path).calibration().to_json() == calibration.to_json()


def test_calibration_of_another_form_is_named(tmp_path):
    save_json(tmp_path, "calibration.json", {0: 1.5})
    with pytest.raises(UserError, match=f"^{tmp_path / 'calibration.json'}: calibration: needs counts"):
        RunFolder(tmp_path).calibration()

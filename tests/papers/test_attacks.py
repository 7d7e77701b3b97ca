"""Tables of attacks: complete runs are attacked once, and what the attack found stands beside the paper's."""

import json
from pathlib import Path

import pandas as pd
import pytest

from lit_fedad.cli import main as cli
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers import table as module
from lit_fedad.papers.paper import with_attack

RESULT = {
    "data": "organsmnist",
    "partition": {"strategy": "LabelSkew", "sizes": [5, 5]},
    "backbone": {"name": "none", "taken": "none"},
    "rounds": 1,
    **{moment: {"round": 1, "accuracy": {"mean": 0.75}} for moment in ("first", "last", "best")},
    "metrics": {"1": {"accuracy": 0.75}},
    "constants": {"largest_class": {"1": {"accuracy": 0.5}}},
    "exchanges": [1],
    "bytes_up": [4],
    "bytes_down": [4],
    "seconds_per_round": [1.0],
    "scalars": [{"loss": 1.0}],
    "tracking_run_id": None,
}
FOUND = {
    "attack": "lira",
    "shadows": 16,
    **{f"sent_{name}": value for name, value in (("largest_auc", 0.625), ("mean_auc", 0.5625))},
    **{f"sent_{name}_chance": 0.53125 for name in ("largest_auc", "mean_auc", "defence_rate")},
    "sent_defence_rate": 0.25,
}
TOLD = ["report", "table=fedvck_6", "root.organsmnist=DIR", "seeds=0", "rows=FedAvg,FedVCK", "tracking=off"]


@pytest.fixture
def steps(monkeypatch):
    """Writes what trainings and attacks would have written, and lists them; attacks on rows of `fails` fail."""
    done, fails = [], set()

    def launch(runs, jobs, logs, display, finished, command=None, verb=""):
        for run in runs:
            done.append((verb or "runs", run.row))
            run.folder.path.mkdir(parents=True, exist_ok=True)
            if command is None:
                (run.folder.path / "result.json").write_text(json.dumps({**RESULT, "config": run.config}))
            elif run.row not in fails:
                assert command(run)[-4:] == [
                    "privacy",
                    f"run={run.folder.path}",
                    "attack=lira",
                    "shadows=16",
                ]
                (run.folder.path / "privacy").mkdir()
                (run.folder.path / "privacy" / "lira.json").write_text(json.dumps(FOUND))
            finished(run, "no message" if command and run.row in fails else None)

    monkeypatch.setattr(module, "launch", launch)
    return done, fails


@pytest.mark.slow
def test_what_is_missing_is_run_then_attacked(steps, capsys):
    done, fails = steps
    fails.add("FedVCK")
    assert cli.main(TOLD) == 2
    assert done == [("runs", "FedAvg"), ("runs", "FedVCK"), ("attacks", "FedAvg"), ("attacks", "FedVCK")]
    assert "1 of 2 runs failed" in capsys.readouterr().err
    done.clear()
    fails.clear()
    assert cli.main(TOLD) == 0
    assert done == [("attacks", "FedVCK")]
    done.clear()
    assert cli.main(TOLD) == 0
    assert done == []
    frame = pd.read_csv(Path("reports/fedvck_6/fedvck_6.csv"))
    assert frame["sent_largest_auc_last"].tolist() == [0.625, 0.625]
    assert frame["sent_defence_rate_chance_last"].tolist() == [0.53125, 0.53125]
    text = " ".join(Path("reports/fedvck_6/fedvck_6.md").read_text().split())
    assert "OrganS largest AUC, chance" in text
    assert "| FedVCK | **62.50** | 54.40 | **56.25** | 51.40 | **25.00** | 50.00 |" in text


@pytest.mark.slow
def test_a_damaged_file_is_one_line(steps, capsys):
    assert cli.main(TOLD) == 0
    file = next(Path("outputs").glob("fedavg-*/privacy/lira.json"))
    file.write_text("[")
    capsys.readouterr()
    assert cli.main(TOLD) == 2
    assert "1 of 2 runs failed" in capsys.readouterr().err
    assert "lira.json: cannot be read" in Path("reports/fedvck_6/fedvck_6.csv").read_text()


def test_the_page_of_all_runs_reads_the_attack_too(make_run):
    run = make_run("a", "fedavg", [0.5, 0.7])
    folder = RunFolder(run.files)
    assert with_attack(run.result, folder)["last"] == run.result["last"]
    (run.files / "privacy").mkdir()
    (run.files / "privacy" / "lira.json").write_text(json.dumps(FOUND))
    last = with_attack(run.result, folder)["last"]
    assert (last["sent_mean_auc"]["mean"], last["i_auroc"]["mean"]) == (0.5625, run.mean("i_auroc"))


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"shadows": 16, "non_members": "train", "share": 0.5, "seed": 0, "out": "DIR"}, True),
        ({"shadows": 6}, False),
        ({"non_members": "test"}, False),
        ({"seed": 1}, False),
    ],
)
def test_an_attack_with_other_options_than_the_table_s_does_not_count(make_run, options, counts):
    run = make_run("a", "fedavg", [0.5, 0.7])
    (run.files / "privacy").mkdir()
    (run.files / "privacy" / "lira.json").write_text(json.dumps({**FOUND, **options}))
    last = with_attack(run.result, RunFolder(run.files), attack=["attack=lira", "shadows=16"])["last"]
    assert ("sent_mean_auc" in last) == counts

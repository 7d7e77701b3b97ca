"""Tables from the command line to their files: which runs there are, which are run, and what is kept."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from lit_fedad.cli import main as cli
from lit_fedad.core.config import compose
from lit_fedad.core.options import bind
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers import table as module
from lit_fedad.papers.paper import TableResults
from lit_fedad.papers.plan import Column, plan_runs, read_table
from lit_fedad.papers.table import launch, report_table
from lit_fedad.report.console import Display

RESULT = {
    "data": "textures",
    "partition": {"strategy": "IID", "sizes": [5, 5]},
    "backbone": {"name": "resnet18", "taken": "random"},
    "rounds": 1,
    **{
        s: {
            "round": 1,
            **{m: {"mean": 0.75} for m in ("i_auroc", "p_auroc", "pro")},
            **{f"global_accuracy{e}": {"mean": v} for e, v in (("", 0.5), ("_masked", 0.6), ("_lp", 0.7))},
        }
        for s in ("first", "last", "best")
    },
    "milestones": [1, 2],
    "metrics": {
        round: {"global_accuracy": 0.9, "global_accuracy_lp": 0.8, "selection_accuracy": 0.4}
        for round in "12"
    },
    "exchanges": [0, 1],
    "bytes_up": [2, 4],
    "bytes_down": [2, 4],
    "seconds_per_round": [1.0, 1.0],
    "scalars": [{}, {"loss": 1.0}],
    "tracking_run_id": None,
}


@pytest.fixture
def quick_runs(monkeypatch):
    """Quick processes instead of trainings: each writes a result, or fails.

    Gives the titles of those that were run, and a set of rows that are to fail.
    """
    titles = []
    fails = set()
    real = launch

    def quick(runs, jobs, logs, display, finished):
        def command(run):
            titles.append(run.title)
            if run.row in fails:
                return [
                    sys.executable,
                    "-c",
                    "print('chatter'); print('error: no images'); raise SystemExit(2)",
                ]
            content = json.dumps({**RESULT, "config": run.config})
            code = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(parents=True, exist_ok=True);"
            code += "(p / 'result.json').write_text(sys.argv[2])"
            return [sys.executable, "-c", code, str(run.folder.path), content]

        real(runs, jobs, logs, display, finished, command)

    monkeypatch.setattr(module, "launch", quick)
    return titles, fails


def options(*more):
    return ["table=feddymem_1", "data=textures", "tracking=off", "seeds=0", "rows=Local,FedDyMem", *more]


def make(words, display):
    """Makes a table as the command does."""
    bind(report_table, words, "report", display=display)()


def frame(name="feddymem_1", out="reports/feddymem_1-textures"):
    return pd.read_csv(Path(out) / f"{name}.csv")


def test_other_metrics_than_the_tables(quick_runs):
    make([*options("rows=Local"), "metrics=aupr"], Display())
    assert {"aupr_last", "aupr_best"} <= set(frame())
    assert "i_auroc_last" not in set(frame())


def test_a_metric_that_no_run_has_is_said(quick_runs, capsys):
    make([*options("rows=Local"), "metrics=pro,i_aurco"], Display())
    assert "warning: metrics=i_aurco: no run has measured it" in capsys.readouterr().err
    make([*options("rows=Local"), "metrics=pro,i_auroc"], Display())
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["table="], "table=: give one of detection, fadngs_1, fadngs_2"),
        (["data=textures"], "report without table= has no key 'data'"),
        (["tabel=feddymem_1"], "report has no key 'tabel'; did you mean 'table'?"),
        (["table=fedymem_1"], "table=fedymem_1: give one of detection, fadngs_1"),
        (options("rows=FedAgv"), "rows=fedagv: feddymem_1 has no such row; did you mean 'FedAvg'?"),
        (options("rouds=3"), "row Local, column textures: unknown key 'rouds'; did you mean 'rounds'?"),
        (options("rounds"), "'rounds' is not of the form key=value"),
        (options("seed=1"), "report has no key 'seed'; did you mean 'seeds'?"),
        (options("seeds=0,x"), "seeds=0,x must be whole numbers"),
        (options("seeds="), "seeds= must be whole numbers"),
        (options("jobs=0"), "jobs=0 must be at least 1"),
        (options("jobs=two"), "report.jobs='two' must be int"),
        (options("root=x"), "report: give root.NAME=..., not root=..."),
        (options("root.wafr=x"), "root.wafr: no such column; one of textures"),
        (["table=feddymem_1"], "no data given: root.NAME=DIR"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(given, message, quick_runs, workdir, capsys):
    assert cli.main(["report", *given]) == 2
    # A word that `given` replaces is warned of.
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is given after it" not in line]
    assert message in line
    assert quick_runs[0] == []
    assert not list(workdir.iterdir())


def test_papers_columns_without_data_are_left_out_in_a_line_each(quick_runs, capsys):
    make(["table=feddymem_1", "root.mpdd=/images", "seeds=0", "rows=fedavg", "tracking=off"], Display())
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("left out")] == [
        f"left out: {label}; to take it in, give root.{name}=DIR"
        for label, name in [
            ("Wafer", "wafer"), ("PCB", "pcb"), ("MVTec", "mvtec_textures"), ("Brain", "brain"), ("X-ray", "xray"),
        ]
    ]  # fmt: skip
    assert quick_runs[0] == ["FedAvg on MPDD, seed 0"]
    assert frame(out="reports/feddymem_1")["column"].tolist() == ["MPDD"]
    assert any("75.00 [75.00]" in line and "61.87 ± 0.76" in line for line in out)


def test_only_what_is_missing_runs(quick_runs):
    titles, _ = quick_runs
    make(options(), Display())
    assert titles == ["Local on textures, seed 0", "FedDyMem on textures, seed 0"]
    titles.clear()
    make(options("seeds=0,1", "rows=feddymem,LOCAL"), Display())
    assert titles == ["Local on textures, seed 1", "FedDyMem on textures, seed 1"]
    titles.clear()
    make(options("fresh=true"), Display())
    assert len(titles) == 2
    assert frame()["i_auroc_last"].tolist() == [0.75, 0.75]
    assert r"| Local | **75.00 \[75.00\]** |" in Path("reports/feddymem_1-textures/feddymem_1.md").read_text()


def test_a_result_of_other_kinds_is_the_runs_failure_and_it_is_run_again(quick_runs):
    make(options("rows=Local"), Display())
    file = next(Path("outputs").glob("local-*/result.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "bytes_up": {}}))
    make(options("rows=Local"), Display())
    assert len(quick_runs[0]) == 2
    assert frame()["i_auroc_last"].tolist() == [0.75]


def test_a_run_that_was_begun_is_resumed(quick_runs, capsys):
    begun = RunFolder.of(compose(["data=textures", "tracking=off", "method=feddymem", "seed=0"])).path
    (begun / "checkpoints/round_100001").mkdir(parents=True)
    make(options(), Display())
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert "runs: Local on textures, seed 0" in lines
    assert "resumes: FedDyMem on textures, seed 0" in lines
    assert frame().set_index("row").loc["FedDyMem", "folder"] == str(begun)


@pytest.mark.slow
def test_a_failure_costs_no_other_run(quick_runs, capsys):
    titles, fails = quick_runs
    fails.add("Local")
    assert cli.main(["report", *options("jobs=2")]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "warning: failed: Local on textures, seed 0: no images",
        "error: 1 of 2 runs failed; the same command tries them again",
    ]
    assert "Local      failed" in out
    assert frame()["state"].tolist() == ["failed", "complete"]
    assert frame()["cause"].tolist()[0] == "no images"
    titles.clear()
    fails.clear()
    assert cli.main(["report", *options()]) == 0
    assert titles == ["Local on textures, seed 0"]


def test_a_table_of_our_own_names_no_paper_and_needs_no_folder_for_drawn_images(quick_runs, capsys):
    make(["table=detection", "seeds=0", "rows=federated_bank", "tracking=off"], Display())
    out = capsys.readouterr().out.splitlines()
    assert [line.split("; ")[0] for line in out if line.startswith("left out")] == [
        "left out: real_mixture",
        "left out: medical",
    ]
    assert quick_runs[0] == ["federated_bank on textures, seed 0"]
    assert not [line for line in out if "paper" in line]


GLDP = ["tracking=off", "seeds=0", "rows=fedavg (known classes),fedavg,gldp-lp,gldp-gp"]


@pytest.mark.slow
def test_columns_of_the_same_data_share_its_root(quick_runs, capsys):
    titles, _ = quick_runs
    make(["table=gldp_2", "root.cifar10=/images", *GLDP], Display())
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("left out")] == [
        f"left out: {label}; to take it in, give root.{data}=DIR"
        for label, data in [
            ("CIFAR-100 [20, 20, 5], IF 50", "cifar100"),
            ("CIFAR-100 [20, 20, 5], IF 100", "cifar100"),
            ("Tiny-ImageNet [20, 20, 5], IF 50", "tiny_imagenet"),
        ]
    ]
    # GLDP-LP and known classes are read from the runs of GLDP-GP and FedAvg.
    columns = [f"CIFAR-10 [20, 4, 5], IF {factor}" for factor in (50, 100)]
    assert titles == [f"{row} on {column}, seed 0" for row in ("FedAvg", "GLDP-GP") for column in columns]
    runs = frame("gldp_2", "reports/gldp_2")
    assert runs["folder"].nunique() == 4
    accuracy = runs.groupby("row")["global_accuracy_last"].unique().map(list).to_dict()
    assert accuracy == {"FedAvg": [0.5], "FedAvg (known classes)": [0.6], "GLDP-GP": [0.5], "GLDP-LP": [0.7]}
    text = Path("reports/gldp_2/gldp_2.md").read_text()
    assert re.search(
        r"\| FedAvg \| 50\.00 \\\[90\.00\\\] \| 59\.94 \| 50\.00 \\\[90\.00\\\] \| 64\.33 \|", text
    )
    assert re.search(r"\| GLDP-LP \| \*\*70\.00 \\\[80\.00\\\]\*\* \| 65\.36 \|", text)


@pytest.mark.slow
def test_own_experiment_in_place_of_the_papers_settings(quick_runs):
    make(["table=gldp_fig4", "experiment=gldp_small", *GLDP], Display(quiet=True))
    runs = frame("gldp_fig4", "reports/gldp_fig4-gldp_small")
    assert runs["column"].unique().tolist() == ["gldp_small"]
    config = json.loads((Path(runs["folder"][0]) / "result.json").read_text())["config"]
    assert (config["partition"]["clients"], config["method"]["client"]["local_epochs"]) == (5, 30)
    assert "paper |" not in Path("reports/gldp_fig4-gldp_small/gldp_fig4.md").read_text()
    assert Path("reports/gldp_fig4-gldp_small/gldp_fig4.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_rows_that_are_the_same_run_are_run_once(quick_runs):
    make(
        ["table=feddymem_fig8", "data=textures", "tracking=off", "seeds=0,1", "rows=1,2"], Display(quiet=True)
    )
    assert len(quick_runs[0]) == 4
    quick_runs[0].clear()
    rows = read_table("feddymem_fig8").rows[:1] * 2
    runs = plan_runs(rows, [Column("t", ("textures",), ("data=textures",))], ["tracking=off"], [0, 1])
    results = TableResults("x", read_table("feddymem_fig8"), runs, Path("x"))
    assert (len(runs), len(results.runs), len(results.missing())) == (4, 2, 0)
    assert (Path("reports/feddymem_fig8-textures") / "feddymem_fig8.png").read_bytes()[1:4] == b"PNG"


def test_table_so_far_is_there_after_each_run(quick_runs, monkeypatch):
    add = TableResults.add

    def interrupted(self, run, cause):
        add(self, run, cause)
        raise KeyboardInterrupt

    monkeypatch.setattr(TableResults, "add", interrupted)
    assert cli.main(["report", *options()]) == 130
    assert frame()["state"].tolist() == ["complete", "open"]


@pytest.mark.slow
def test_files_become_the_artifacts_of_one_mlflow_run(workdir, capsys):
    mlflow = pytest.importorskip("mlflow")
    file = workdir / "reports/t/t.md"
    file.parent.mkdir(parents=True)
    uri = f"sqlite:///{workdir}/mlflow.db"
    config = {"tracking": {"uri": uri, "enabled": True}}
    for text in ("half", "whole"):
        file.write_text(text)
        module.log_table("t", [file, file.with_suffix(".png")], config, file.parent, Display())
    assert not capsys.readouterr().err
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("reports").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["table"]) == ("t", "FINISHED", "t")
    assert Path(client.download_artifacts(run.info.run_id, "t.md", str(workdir))).read_text() == "whole"


@pytest.mark.slow
def test_two_rows_from_training_to_table(workdir, capsys):
    """One run is there already, made by `train`; the other is a process of its own."""
    common = [
        "debug=seconds",
        "data=textures",
        f"data.root={workdir}/data",
        "data.size=64",
        "cache.enabled=false",
    ]
    common += ["tracking=off", "evaluation.pictures=0", "rounds=1", "fabric.accelerator=cpu"]
    assert cli.main(["train", *common, "method=local", "task.learning_rate=3e-4", "seed=0"]) == 0
    capsys.readouterr()
    told = ["report", "table=feddymem_2", "seeds=0", "rows=Local,FedDyMem", *common]
    assert cli.main(told) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "2 runs, 1 of them complete: reports/feddymem_2-textures"
    assert [line.split(" (")[0] for line in out if line.startswith("runs:")] == [
        "runs: FedDyMem on textures, seed 0"
    ]
    runs = frame("feddymem_2", "reports/feddymem_2-textures")
    for _, run in runs.iterrows():
        result = json.loads((Path(run["folder"]) / "result.json").read_text())
        assert run["pro_last"] == pytest.approx(result["last"]["pro"]["mean"])
        assert run["bytes_up"] == result["bytes_up"][-1] / 2
        assert any(f"{100 * run['pro_last']:.2f} [" in line for line in out)
    assert runs["bytes_up"].tolist()[0] == 0 < runs["bytes_up"].tolist()[1]
    assert cli.main(told) == 0
    assert capsys.readouterr().out.startswith("2 runs, 2 of them complete")

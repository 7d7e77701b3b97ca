"""Tables from the command line to their files: which runs there are, which are run, and what is kept."""

import itertools
import json
import os
import re
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from lit_fedad.cli import main as cli
from lit_fedad.comparison import table as comparison
from lit_fedad.comparison.table import Column, plan, play, read_table, report
from lit_fedad.config import choices, compose
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.report.tables import Setting
from lit_fedad.tracking.tracker import log_files

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


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """A working directory of its own: runs go to its outputs, tables to its reports."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """Quick processes instead of trainings: each writes a result, or fails.

    Gives the titles of those that were run, and a set of rows that are to fail.
    """
    titles = []
    fails = set()
    real = play

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

    monkeypatch.setattr(comparison, "play", quick)
    return titles, fails


def words(*more):
    return ["table=feddymem_1", "data=textures", "tracking=off", "seeds=0", "rows=Local,FedDyMem", *more]


def frame(name="feddymem_1", out="reports/feddymem_1-textures"):
    return pd.read_csv(Path(out) / f"{name}.csv")


ROWS = sorted(
    {tuple(r.overrides) for n in choices("table") for t in [read_table(n)[1]] for r in (*t.rows, *t.beyond)}
)


@pytest.mark.parametrize("overrides", ROWS, ids=" ".join)
@pytest.mark.slow
def test_every_row_composes(overrides):
    assert compose(overrides)["method"]["name"]


def columns_of(kind, of=""):
    """Protocol, label and column of all tables, or of a paper's, each once."""
    return {
        (tuple(table.protocol), label): column
        for table in (read_table(name)[1] for name in choices("table") if name.startswith(of))
        for label, column in table.columns.items()
        if isinstance(column, kind)
    }


def test_every_column_composes():
    found = columns_of(str)
    detection, semantic = (
        {"Wafer", "PCB", "MVTec", "MPDD", "Brain", "X-ray"},
        {"CIFAR-100", "SVHN", "Places365"},
    )
    assert {label for _, label in found} == detection | semantic
    for (protocol, _), name in found.items():
        config = compose([*protocol, f"data={name}", "data.root=images"])
        assert config["data"]["name"] == name  # by which the paper's numbers are found


@pytest.mark.slow
def test_every_column_of_settings_is_what_its_label_says():
    found = columns_of(Setting, "gldp")
    assert len(found) == 13 + 9 + 4
    for (protocol, label), column in found.items():
        config = compose([*protocol, f"data={column.data}", *column.overrides, "data.root=images"])
        partition = config["partition"]
        numbers = [partition[key] for key in ("clients", "classes", "stages")]
        name = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny_imagenet": "Tiny-ImageNet"}[column.data]
        assert label == f"{name} {numbers}, IF {partition['imbalance']}"
        assert config["data"]["_target_"].endswith(f".{column.data}")
        picked = config["federation"]["sampler"]["fraction"] * partition["clients"]
        assert (config["rounds"], picked) == (50, 10)
        tiny = name == "Tiny-ImageNet"
        assert (config["batch_size"], config["image"]["size"]) == ((128, 64) if tiny else (32, 32))


FEDVCK = {  # data set, side, channels, synthetic images over real ones (FedVCK, appendix)
    "Path": ("pathmnist", 28, 3, 0.01),
    "OCT": ("octmnist", 28, 1, 0.01),
    "OrganS": ("organsmnist", 28, 1, 0.05),
    "OrganC": ("organcmnist", 224, 1, 0.05),
    "Pneumonia": ("pneumoniamnist", 224, 1, 0.05),
    "CIFAR-10": ("cifar10", 32, 3, 0.02),
    "STL-10": ("stl10", 32, 3, 0.05),
    "ImageNette": ("imagenette", 64, 3, 0.01),
}
FEDVCK_TABLES = [name for name in choices("table") if name.startswith("fedvck")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDVCK_TABLES)
def test_every_column_of_fedvck_is_what_its_label_says(name):
    """Each row in some column, each column in some row."""
    table = read_table(name)[1]
    rows, columns = [*table.rows, *table.beyond], comparison._columns(table, {})
    number = max(len(rows), len(columns))
    for row, column in itertools.islice(zip(itertools.cycle(rows), itertools.cycle(columns)), number):
        (run,) = plan([row], [column], ["data.root=x"], [0])
        config, (short, _, setting) = run.config, column.label.partition(", ")
        data, side, channels, share = FEDVCK[short]
        limited = name in ("fedvck_3", "fedvck_11", "fedvck_k") or setting == "10 rounds"
        assert (config["rounds"], config["partition"]["clients"]) == (10 if limited else 100, 10)
        assert config["partition"]["alpha"] == (0.02 if setting == "Dir 0.02" else 0.05)
        assert data in (config["data"].get("name"), config["data"]["_target_"].rpartition(".")[2])
        sides = {config["image"]["size"], config["data"].get("size", side)}
        assert (sides, config["image"]["channels"]) == ({side}, channels)
        network = config["task"]["encoder"]["_target_"].rpartition(".")[2]
        assert network == ("ResNetCifar" if side == 224 else "ConvNet")
        assert config["condensation"]["share"] == share
        client = config["method"]["client"]
        if config["method"]["name"] in ("feddm", "fedvck"):
            assert (client["share"], client["minimum"]) == (share, 5)
            assert (client["init"] == "real") == (row.label == "FedDM (real start)")
        else:
            assert client["local_epochs"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in choices("table") if name.startswith("gldp")])
def test_every_row_trains_the_papers_epochs(name):
    table = read_table(name)[1]
    column = next(iter(table.columns.values()))
    for row in (*table.rows, *table.beyond):
        config = compose(
            [*table.protocol, f"data={column.data}", *column.overrides, "data.root=x", *row.overrides]
        )
        client = config["method"]["client"]
        assert sum(client.get(key, 0) for key in ("local_epochs", "base_epochs", "head_epochs")) == 30
        # A method's own example does not take the place of the table's protocol.
        assert (config["rounds"], config["data"]["_target_"]) == (50, "lit_fedad.data.cifar.cifar")
        assert config["partition"]["imbalance"] == int(next(iter(table.columns)).rpartition(" ")[2])


@pytest.mark.parametrize("name", choices("table"))
def test_paper_numbers_have_the_tables_form(name):
    table = read_table(name)[1]
    labels = [row.label.casefold() for row in (*table.rows, *table.beyond)]
    assert len(labels) == len(set(labels))
    assert not any("," in label for label in labels)  # they separate rows on the command line
    for row in table.rows:
        known = {label if isinstance(c, Setting) else c for label, c in table.columns.items()}
        assert row.paper.keys() <= known
        for numbers in row.paper.values():
            assert len(numbers) == len(table.metrics)
            assert all(
                0 < part < 100
                for n in numbers
                if n is not None
                for part in (n if isinstance(n, list) else [n])
            )


def test_the_papers_tables_agree_with_each_other():
    """FedDyMem with all its parts stands in three tables, with one local epoch in a fourth place."""
    detection, localisation, ablation, epochs = (
        read_table(name)[1] for name in ("feddymem_1", "feddymem_2", "feddymem_3", "fig8")
    )
    assert [row.label for row in detection.rows] == [row.label for row in localisation.rows]
    full, whole = detection.rows[-1].paper, ablation.rows[-1].paper
    assert {data: numbers[0][0] for data, numbers in full.items()} == {
        data: n[0] for data, n in whole.items()
    }
    located = localisation.rows[-1].paper
    assert {data: n[0][0] for data, n in located.items()} == {data: n[1] for data, n in whole.items() if n[1]}
    assert all(numbers[0] == full[data][0][0] for data, numbers in epochs.rows[0].paper.items())


def test_fadngs_tables_agree_with_each_other():
    """FADngs without distillation stands in three tables, with it in three."""
    tables = {number: read_table(f"fadngs_{number}")[1] for number in (1, 3, 4, 5, 6)}
    without, full = (row.paper["semantic_cifar10"] for row in tables[1].rows)
    assert tables[3].rows[-1].paper["semantic_cifar10"] == without
    assert tables[4].rows[-1].paper["semantic_cifar10"] == without
    in_other_order = [*full[2:], *full[:2]]
    assert tables[5].rows[0].paper["semantic_cifar10"] == in_other_order
    assert tables[6].rows[-1].paper["semantic_cifar10"] == in_other_order


def test_gldp_tables_agree_with_each_other():
    """The paper prints GLDP's numbers in Tables 2 and 3 alike, and A_glo of Table 2 in Table 4."""
    server, personal, ablation = (
        {row.label: row.paper for row in read_table(f"gldp_{number}")[1].rows} for number in (2, 3, 4)
    )
    for label in ("GLDP-GP", "GLDP-LP"):
        assert server[label] == {column: personal[label][column] for column in server[label]}
    ten, hundred = ablation["full"]
    assert ablation["full"][ten][0] == server["GLDP-GP"][ten][0]
    assert ablation["full"][hundred][0] == server["GLDP-LP"][hundred][0]
    for column in (ten, hundred):
        assert ablation["neither"][column][0] == server["FedRep"][column][0]


def test_fedvck_tables_agree_with_each_other():
    """FedVCK and FedDM stand in the tables of all methods, in the ablation, and FedVCK with K = 5 once more."""
    long, short, ablation, negatives = (
        {row.label: row.paper for row in read_table(f"fedvck_{number}")[1].rows} for number in (2, 3, 4, "k")
    )
    for label, part in (("FedDM", "without all"), ("FedVCK", "full")):
        for data in ("Path", "OrganS"):
            assert ablation[part][f"{data}, 10 rounds"] == short[label][f"{data}, Dir 0.05"]
            assert ablation[part][f"{data}, 100 rounds"] == long[label][f"{data}, Dir 0.05"]
    assert all(negatives["5"][data] == short["FedVCK"][f"{data}, Dir 0.05"] for data in ("Path", "OrganS"))


@pytest.mark.real_data
@pytest.mark.parametrize("name", FEDVCK_TABLES)
def test_fedvck_s_numbers_are_those_of_the_paper_s_text(name):
    """Each row's numbers end one of the lines above the caption, in the order of the columns."""
    text = Path(os.environ.get("LIT_FEDAD_DATA", "missing")).parent / "papers" / "fedvck.txt"
    if not text.is_file():
        pytest.skip("the paper's text is not at hand")
    table = read_table(name)[1]
    lines = text.read_text().splitlines()
    caption = f"{table.source.rpartition(', ')[2]}: "
    (end,) = [number for number, line in enumerate(lines) if line.startswith(caption)]
    printed = [line.split() for line in lines[end - 14 : end]]
    if name == "fedvck_k":  # the paper has its rows in columns
        rows = {column: [row.paper[column] for row in table.rows] for column in table.columns}
    else:
        rows = {row.label: [row.paper[column] for column in table.columns] for row in table.rows}
    for label, numbers in rows.items():
        texts = [f"{number[0]:.2f}" for number in numbers]
        (line,) = [words for words in printed if words[-len(texts) :] == texts]
        assert line[0] == label or name == "fedvck_4"  # whose labels are formulas


def test_other_metrics_than_the_tables(ran):
    report([*words("rows=Local"), "metrics=aupr"], Display())
    assert {"aupr_last", "aupr_best"} <= set(frame())
    assert "i_auroc_last" not in set(frame())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["table="], "table=: give one of fadngs_1, fadngs_2"),
        (["data=textures"], "report without table= has no key 'data'"),
        (["table=fedymem_1"], "table=fedymem_1: give one of fadngs_1"),
        (words("rows=FedAgv"), "rows=fedagv: feddymem_1 has no such row; did you mean 'FedAvg'?"),
        (words("rouds=3"), "row Local, column textures: unknown key 'rouds'; did you mean 'rounds'?"),
        (words("rounds"), "'rounds' is not of the form key=value"),
        (words("seed=1"), "give seeds=0,1,2"),
        (words("seeds=0,x"), "seeds=0,x must be whole numbers"),
        (words("jobs=0"), "jobs=0 must be one number"),
        (words("root.wafr=x"), "root.wafr: no such column; one of textures"),
        (["table=feddymem_1"], "no data given: root.NAME=DIR"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(given, message, ran, desk, capsys):
    assert cli.main(["report", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert ran[0] == []
    assert not list(desk.iterdir())


def test_papers_columns_without_data_are_left_out_in_a_line_each(ran, capsys):
    report(["table=feddymem_1", "root.mpdd=/images", "seeds=0", "rows=fedavg", "tracking=off"], Display())
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("left out")] == [
        f"left out: {label}; to take it in, give root.{name}=DIR"
        for label, name in [
            ("Wafer", "wafer"), ("PCB", "pcb"), ("MVTec", "mvtec_textures"), ("Brain", "brain"), ("X-ray", "xray"),
        ]
    ]  # fmt: skip
    assert ran[0] == ["FedAvg on MPDD, seed 0"]
    assert frame(out="reports/feddymem_1")["column"].tolist() == ["MPDD"]
    assert any("75.00 [75.00]" in line and "61.87 ± 0.76" in line for line in out)


def test_columns_of_several_experiments_and_data():
    table = read_table("feddymem_1")[1]
    given = {"experiment": "small,paper", "data": "mpdd,textures", "root.mpdd": "/m"}
    found = comparison._columns(table, given)
    assert [column.label for column in found] == [
        "small, mpdd",
        "small, textures",
        "paper, mpdd",
        "paper, textures",
    ]
    assert found[2].names == ("paper", "mpdd")
    assert found[2].overrides == ("experiment=paper", "data=mpdd", "data.root=/m")
    assert found[3].overrides == ("experiment=paper", "data=textures")
    (one,) = comparison._columns(table, {"experiment": "paper", "data": "mpdd"})
    assert (one.label, one.overrides) == ("mpdd", ("experiment=paper", "data=mpdd"))


def test_root_of_a_column_wins_over_that_of_all():
    found = comparison._columns(
        read_table("feddymem_1")[1], {"data": "mpdd,mvtec_textures", "root.mpdd": "/m"}
    )
    runs = plan(read_table("feddymem_1")[1].rows[:1], found, ["data.root=/all"], [0])
    assert [run.config["data"]["root"] for run in runs] == ["/m", "/all"]


def test_row_wins_over_what_is_given_to_every_run():
    rows = [row for row in read_table("feddymem_1")[1].beyond if row.label.startswith("Nearest")]
    (run,) = plan(rows, [Column("t", ("textures",), ("data=textures",))], ["rounds=9", "batch_size=3"], [4])
    assert (run.config["rounds"], run.config["batch_size"], run.config["seed"]) == (0, 3, 4)
    assert run.folder == RunFolder.of(run.config)


def test_only_what_is_missing_runs(ran, desk, capsys):
    titles, _ = ran
    report(words(), Display())
    assert titles == ["Local on textures, seed 0", "FedDyMem on textures, seed 0"]
    titles.clear()
    report(words("seeds=0,1", "rows=feddymem,LOCAL"), Display())
    assert titles == ["Local on textures, seed 1", "FedDyMem on textures, seed 1"]
    titles.clear()
    report(words("fresh=true"), Display())
    assert len(titles) == 2
    assert frame()["i_auroc_last"].tolist() == [0.75, 0.75]
    assert "| Local    | **75.00 [75.00]** |" in Path("reports/feddymem_1-textures/feddymem_1.md").read_text()


def test_a_run_that_was_begun_is_resumed(ran, capsys):
    begun = RunFolder.of(compose(["data=textures", "tracking=off", "method=feddymem", "seed=0"])).path
    (begun / "checkpoints/round_100001").mkdir(parents=True)
    report(words(), Display())
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert "runs: Local on textures, seed 0" in lines
    assert "resumes: FedDyMem on textures, seed 0" in lines
    assert frame().set_index("row").loc["FedDyMem", "folder"] == str(begun)


def test_a_failure_costs_no_other_run(ran, capsys):
    titles, fails = ran
    fails.add("Local")
    assert cli.main(["report", *words("jobs=2")]) == 2
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
    assert cli.main(["report", *words()]) == 0
    assert titles == ["Local on textures, seed 0"]


GLDP = ["tracking=off", "seeds=0", "rows=fedavg (known classes),fedavg,gldp-lp,gldp-gp"]


def test_columns_of_the_same_data_share_its_root(ran, capsys):
    titles, _ = ran
    report(["table=gldp_2", "root.cifar10=/images", *GLDP], Display())
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
    assert re.search(r"\| FedAvg +\| 50\.00 \[90\.00\] +\| 59\.94 +\| 50\.00 \[90\.00\] +\| 64\.33 +\|", text)
    assert re.search(r"\| GLDP-LP +\| \*\*70\.00 \[80\.00\]\*\* +\| 65\.36 +\|", text)


def test_own_experiment_in_place_of_the_papers_settings(ran):
    report(["table=gldp_fig4", "experiment=gldp_small", *GLDP], Display(quiet=True))
    runs = frame("gldp_fig4", "reports/gldp_fig4-gldp_small")
    assert runs["column"].unique().tolist() == ["gldp_small"]
    config = json.loads((Path(runs["folder"][0]) / "result.json").read_text())["config"]
    assert (config["partition"]["clients"], config["method"]["client"]["local_epochs"]) == (5, 30)
    assert "paper |" not in Path("reports/gldp_fig4-gldp_small/gldp_fig4.md").read_text()
    assert Path("reports/gldp_fig4-gldp_small/gldp_fig4.png").read_bytes()[1:4] == b"PNG"


def test_rows_that_are_the_same_run_are_run_once(ran):
    report(["table=fig8", "data=textures", "tracking=off", "seeds=0,1", "rows=1,2"], Display(quiet=True))
    assert len(ran[0]) == 4
    ran[0].clear()
    rows = read_table("fig8")[1].rows[:1] * 2
    runs = plan(rows, [Column("t", ("textures",), ("data=textures",))], ["tracking=off"], [0, 1])
    table = comparison.Comparison("x", read_table("fig8")[1], runs, Path("x"))
    assert (len(runs), len(table.folders), len(table.waiting())) == (4, 2, 0)
    assert (Path("reports/feddymem_fig8-textures") / "feddymem_fig8.png").read_bytes()[1:4] == b"PNG"


def test_table_so_far_is_there_after_each_run(ran, monkeypatch):
    take = comparison.Comparison.take

    def interrupted(self, run, cause):
        take(self, run, cause)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.Comparison, "take", interrupted)
    assert cli.main(["report", *words()]) == 130
    assert frame()["state"].tolist() == ["complete", "open"]


def a_run(seed):
    words = ("data=textures", f"seed={seed}", "tracking=off")
    return comparison.Run("Local", "textures", seed, words, compose(words))


def test_an_interruption_ends_the_processes_that_play(tmp_path):
    slow = (
        "import time, pathlib; pathlib.Path('began').touch(); time.sleep(60); pathlib.Path('slept').touch()"
    )

    def command(run):
        wait = "import pathlib, time\nwhile not pathlib.Path('began').exists(): time.sleep(0.01)"
        return [sys.executable, "-c", wait if run.seed == 0 else slow]

    def finished(run, cause):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play([a_run(0), a_run(1)], 2, tmp_path / "logs", Display(quiet=True), finished, command)
    assert time.monotonic() - start < 20
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "KeyboardInterrupt" in logs


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise SystemExit(0)", None),
        ("print('error: one'); print('error: two'); print('x'); raise SystemExit(2)", "two"),
        ("raise ValueError('odd')", "ValueError: odd, see "),
        ("raise SystemExit(7)", "status 7, see "),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, see "),
    ],
)
def test_cause_of_a_failure_is_one_line(code, cause, tmp_path):
    causes = []
    play(
        [a_run(0)],
        1,
        tmp_path,
        Display(quiet=True),
        lambda run, c: causes.append(c),
        lambda run: [sys.executable, "-c", code],
    )
    (log,) = tmp_path.glob("*.log")
    assert causes == [cause + str(log) if cause and cause.endswith("see ") else cause]


def test_processes_share_the_cores_and_no_more_play_than_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    code = "import os, pathlib, time; p = pathlib.Path(str(os.getpid())); p.touch(); time.sleep(0.3);"
    code += "print(os.environ['OMP_NUM_THREADS'], len(list(pathlib.Path().glob('[0-9]*')))); p.unlink()"
    play(
        [a_run(seed) for seed in range(5)], 2, tmp_path / "logs", Display(quiet=True), lambda run, c: None,
        lambda run: [sys.executable, "-c", code],
    )  # fmt: skip
    told = [path.read_text().split() for path in (tmp_path / "logs").iterdir()]
    assert [threads for threads, _ in told] == ["4"] * 5
    assert max(int(count) for _, count in told) == 2


@pytest.mark.slow
def test_files_become_the_artifacts_of_one_mlflow_run(desk):
    mlflow = pytest.importorskip("mlflow")
    file = desk / "reports/t/t.md"
    file.parent.mkdir(parents=True)
    uri = f"sqlite:///{desk}/mlflow.db"
    for text in ("half", "whole"):
        file.write_text(text)
        delivery = log_files([file], file.parent, "reports", {"table": "t"}, uri, True)
    assert (delivery.pending, delivery.error) == (0, None)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("reports").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["table"]) == ("t", "FINISHED", "t")
    assert Path(client.download_artifacts(run.info.run_id, "t.md", str(desk))).read_text() == "whole"


@pytest.mark.slow
def test_two_rows_from_training_to_table(desk, capsys):
    """One run is there already, made by `train`; the other is a process of its own."""
    common = [
        "debug=seconds",
        "data=textures",
        f"data.root={desk}/data",
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

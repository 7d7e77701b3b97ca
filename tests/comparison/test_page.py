"""From tracked runs to a page: every number linked, seeds grouped, the papers' tables, what is missing."""

import copy
import json
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from lit_fedad.comparison import page as run_report
from lit_fedad.comparison.page import Links, build_page, report_runs, write_page
from lit_fedad.comparison.paper import fill, missing
from lit_fedad.comparison.runs import CompleteRun, differences, groups_by_data
from lit_fedad.comparison.table import read_table
from lit_fedad.config import compose
from lit_fedad.errors import UserError
from lit_fedad.report.console import Display
from lit_fedad.report.html import Commands, Gallery, Grid
from lit_fedad.tracking.reading import TrackedRun, metric_history, tracked_runs

UI = "http://127.0.0.1:5000"
METRICS = ("i_auroc", "p_auroc", "pro", "aupr")


@pytest.fixture(scope="module")
def configs():
    """Of FedDyMem and FedAvg on textures, and of FedDyMem as its paper's table asks for it."""
    paper = ["experiment=paper", "data=mpdd", "data.root=somewhere", "method=feddymem"]
    return {
        "feddymem": compose(["method=feddymem", "rounds=2"]),
        "fedavg": compose(["method=fedavg", "rounds=2"]),
        "paper": compose(paper),
    }


@pytest.fixture
def make_run(configs, tmp_path):
    """A complete run of two clients: their I-AUROC after the last round is what is given."""

    def make(name, kind, clients, seed=0, parent=None, privacy=None, **changes):
        config = {**copy.deepcopy(configs[kind]), "seed": seed, **changes}
        data = config["data"].get("name", "textures")
        folder = tmp_path / "outputs" / name
        (folder / "figures").mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(folder / "figures" / "partition.png")
        values = {
            "mean": float(np.mean(clients)),
            "worst": min(clients),
            "pooled": 0.5,
            "per_client": {str(number): value for number, value in enumerate(clients)},
        }
        stage = {"round": 2, **dict.fromkeys(METRICS, values)}
        result = {
            "method": config["method"]["name"],
            "task": "MemoryBank",
            "data": data,
            "partition": {
                "strategy": "Dirichlet",
                "sizes": [3, 4],
                "counts": [[3, 0], [0, 4]],
                "products": ["a", "b"],
                "stage_sizes": [],
            },
            "backbone": {"name": "resnet18", "taken": "random"},
            "seed": seed,
            "rounds": config["rounds"],
            **dict.fromkeys(("first", "last", "best"), stage),
            "milestones": [],
            "exchanges": [0, 1, 2],
            "bytes_up": [1000, 2_000_000, 2_000_000],
            "bytes_down": [0, 0, 0],
            "seconds_per_round": [1.0, 2.0, 3.0],
            "scalars": [{}, {"loss": 1.0}, {"loss": 0.5}],
            "metrics": {"1": {"i_auroc": 0.5}, "2": {"i_auroc": values["mean"]}},
            "tracking_run_id": name,
            "privacy": privacy,
            "config": config,
        }
        tags = {"method": result["method"], "data": data, "seed": str(seed), "lit_fedad.out": str(folder)}
        tags |= {"mlflow.parentRunId": parent} if parent else {}
        metrics = {"i_auroc/client_0": 1.0, "i_auroc/client_1": 1.0, "i_auroc/mean": 1.0}
        tracked = TrackedRun(name, "7", data, name, "FINISHED", 0, tags, {"rounds": "2"}, metrics)
        return CompleteRun(tracked, folder, result)

    return make


@pytest.fixture
def page_of(monkeypatch, tmp_path):
    """The report of runs, with few tables and without MLflow."""

    def page(runs, more=(), tables=("feddymem_1",)):
        monkeypatch.setattr(run_report, "options", lambda group: list(tables))
        monkeypatch.setattr(run_report, "metric_history", lambda *_: [(1, 0.25), (2, 0.5)])
        tracked = [*(run.tracked for run in runs), *more]
        return build_page(tracked, runs, Links(UI, tmp_path / "reports"), None)

    return page


def section(page, title):
    return next(section for section in page.sections if section.title == title)


def grids(page, title):
    return [block for block in section(page, title).blocks if isinstance(block, Grid)]


def texts(grid):
    return [[cell.text for cell in line.cells] for line in grid.lines]


def test_seeds_are_one_line_that_links_to_their_comparison(make_run, page_of):
    runs = [
        make_run("a", "feddymem", [0.5, 0.7], seed=0),
        make_run("b", "feddymem", [0.6, 0.8], seed=1),
        make_run("c", "fedavg", [0.4, 0.2]),
    ]
    (grid,) = grids(page_of(runs), "Runs")
    fedavg, both, first, second = grid.lines
    column = list(grid.heads).index("I-AUROC")
    # 0.6 and 0.7: mean 0.65, deviation 0.1 / sqrt(2)
    assert [line.cells[column].text for line in grid.lines] == [
        "0.3000 [0.3000]",
        "0.6500 ± 0.0707 [0.6500]",
        "0.6000 [0.6000]",
        "0.7000 [0.7000]",
    ]
    assert [line.part for line in grid.lines] == [False, False, True, True]
    assert fedavg.cells[column].url == f"{UI}/#/experiments/7/runs/c"
    assert second.cells[column].url == f"{UI}/#/experiments/7/runs/b"
    assert both.cells[column].url == f'{UI}/#/compare-runs?runs=["a","b"]&experiments=["7"]'.replace(
        '["', "%5B%22"
    ).replace('"]', "%22%5D").replace('","', "%22%2C%22")
    worst = list(grid.heads).index("worst client, I-AUROC")
    assert [line.cells[worst].text for line in grid.lines] == [
        "client 1: 0.2000",
        "client 0, seed 0: 0.5000",
        "client 0: 0.5000",
        "client 0: 0.6000",
    ]
    assert [line.cells[-3].text for line in grid.lines] == ["4.00 MB"] * 4
    assert [line.cells[-2].text for line in grid.lines] == ["6.0 s"] * 4
    assert (first.cells[-1].text, first.cells[-1].url) == ("a", "../outputs/a")


def test_every_number_of_every_table_has_a_link(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "fedavg", [0.4, 0.2])])
    for part in page.sections:
        for grid in (block for block in part.blocks if isinstance(block, Grid)):
            for line in grid.lines:
                for head, cell in zip(grid.heads, line.cells, strict=True):
                    measured = re.search(r"\d\.\d", cell.text) and not head.endswith("paper")
                    assert cell.url or not measured, (part.title, head, cell)


def test_configurations_of_one_method_are_told_apart(make_run):
    runs = [make_run("a", "feddymem", [0.5, 0.5]), make_run("b", "feddymem", [0.6, 0.6], batch_size=3)]
    groups = groups_by_data(runs)["textures"]
    assert {group.label for group in groups} == {"feddymem (batch_size=10)", "feddymem (batch_size=3)"}


def test_of_runs_alike_the_last_counts(make_run):
    runs = [make_run("old", "feddymem", [0.5, 0.5]), make_run("new", "feddymem", [0.6, 0.6])]
    (group,) = groups_by_data(runs)["textures"]
    assert [run.tracked.run_id for run in group.runs] == ["new"]


def test_curves_spread_and_partitions(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7])])
    galleries = [b for b in section(page, "Over the rounds").blocks if isinstance(b, Gallery)]
    captions = [picture.caption for gallery in galleries for picture in gallery.pictures]
    assert captions == ["Mean over clients, one line a run.", "feddymem, seed 0: I-AUROC of each client"]
    (spread,) = grids(page, "Clients apart")
    mean, deviation, worst, best, between = texts(spread)[0][2:]
    assert (mean, worst, best, between) == ("0.6000", "client 0: 0.5000", "client 1: 0.7000", "0.2000")
    assert deviation == "0.1414"
    (partitions,) = section(page, "Partitions").blocks
    assert [picture.url for picture in partitions.pictures] == [f"{UI}/#/experiments/7/runs/a"]
    assert not [part for part in page.sections if part.title == "Privacy"]


def test_attacks_are_shown_where_there_are_some(make_run, page_of):
    run = make_run("a", "feddymem", [0.5, 0.7], privacy={"dcor": 0.25})
    (run.files / "privacy").mkdir()
    (run.files / "privacy" / "lira.json").write_text(json.dumps({"max_auc": 0.625, "per_client": {"0": 1}}))
    shutil.copy(run.files / "figures" / "partition.png", run.files / "figures" / "lira.png")
    page = page_of([run])
    (grid,) = grids(page, "Privacy")
    assert [line[1:] for line in texts(grid)] == [
        ["while training", "dcor", "0.25"],
        ["lira", "max_auc", "0.625"],
    ]
    gallery = section(page, "Privacy").blocks[1]
    assert [picture.caption for picture in gallery.pictures] == [
        "Membership inference (LiRA): feddymem on textures, seed 0"
    ]


def test_trials_stand_under_their_study_and_nowhere_else(make_run, page_of, tmp_path):
    figures = tmp_path / "study" / "figures"
    figures.mkdir(parents=True)
    tags = {"study": "th", "method": "feddymem", "lit_fedad.out": str(figures.parent)}
    objectives = {"objectives.i_auroc": "maximize", "objectives.bytes": "minimize", "base": "method=feddymem"}
    study = TrackedRun("s", "7", "sweep_th", "th", "FINISHED", 0, tags, objectives, {})
    trial = make_run("t", "feddymem", [0.5, 0.7], parent="s")
    plain = make_run("a", "fedavg", [0.4, 0.4])
    shutil.copy(plain.files / "figures" / "partition.png", figures / "importance.png")
    page = page_of([trial, plain], [study])
    assert [line[0] for line in texts(grids(page, "Runs")[0])] == ["fedavg"]
    grid, gallery = section(page, "Sweeps").blocks
    assert texts(grid) == [["t", "finished", "0.6000", "2,000,500"]]
    assert grid.heads == ["trial", "state", "i_auroc", "bytes"]
    assert [picture.caption for picture in gallery.pictures] == ["importance: th"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("0.0013525517894", "0.001353"),
        ("2.66e-05", "2.66e-05"),
        ("0.01", "0.01"),
        ("median", "median"),
        ("12", "12"),
    ],
)
def test_drawn_numbers_are_short(given, shown):
    assert run_report._short(given) == shown


def test_runs_that_are_not_complete_are_named(make_run, page_of):
    tags = {"method": "moon", "data": "textures", "seed": "4", "lit_fedad.out": "/gone/x"}
    failed = TrackedRun("f", "7", "textures", "moon-4", "FAILED", 0, tags, {}, {})
    _, grid = grids(page_of([make_run("a", "feddymem", [0.5, 0.7])], [failed]), "Runs")
    assert texts(grid) == [["moon-4", "moon", "textures", "4", "failed", "x"]]
    assert grid.lines[0].cells[-1].url is None


def test_a_paper_table_shows_ours_beside_the_papers(make_run):
    filled = fill(
        "feddymem_1", [make_run("a", "paper", [0.7, 0.8]), make_run("b", "paper", [0.6, 0.7], seed=1)]
    )
    assert filled.columns == {"MPDD": "mpdd"}
    assert [run.tracked.run_id for run in filled.runs["FedDyMem", "MPDD"]] == ["a", "b"]
    assert filled.exact == {("FedDyMem", "MPDD", 0), ("FedDyMem", "MPDD", 1)}
    assert filled.notes == []
    assert len(filled.table.rows) == len(read_table("feddymem_1")[1].rows)  # the paper's, ours or not


def test_what_differs_from_the_paper_is_said(make_run):
    filled = fill("feddymem_1", [make_run("a", "paper", [0.7, 0.8], rounds=5)])
    assert filled.columns == {"MPDD (a)": "mpdd"}
    assert filled.notes == ["(a) MPDD with rounds=5."]
    assert filled.exact == frozenset()


def test_data_that_no_paper_has_is_shown_where_methods_compare(make_run):
    runs = [make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "fedavg", [0.4, 0.2])]
    assert fill("feddymem_1", runs[:1]) is None
    filled = fill("feddymem_1", runs)
    assert [label.partition(" ")[0] for label in filled.columns] == ["textures"]
    ((_, command),) = filled.beside
    words = shlex.split(command)
    assert words[:3] == ["lit-fedad", "report", "table=feddymem_1"]
    assert {"rounds=2", "data=textures", "seeds=0"} <= set(words)
    assert "FedDyMem" not in next(word for word in words if word.startswith("rows=")).split("=")[1].split(",")


def test_the_command_of_what_is_missing_makes_just_that():
    rows = [row.label for row in read_table("feddymem_1")[1].rows]
    everything = missing("feddymem_1", [])
    assert [command for _, command in everything] == [
        "lit-fedad report table=feddymem_1 root.wafer=DIR root.pcb=DIR root.mvtec_textures=DIR root.mpdd=DIR"
        " root.brain=DIR root.xray=DIR"
    ]
    there = [(row, "MPDD", seed) for row in rows for seed in (0, 1, 2) if (row, seed) != ("FedAvg", 2)]
    assert [command for _, command in missing("feddymem_1", there)][1:] == [
        "lit-fedad report table=feddymem_1 root.mpdd=DIR rows=FedAvg seeds=2"
    ]


def test_missing_runs_are_listed_with_commands(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7])], tables=("gldp_4",))
    commands = next(block for block in section(page, "Missing runs").blocks if isinstance(block, Commands))
    assert [command for _, command in commands.pairs] == [
        "lit-fedad report table=gldp_4 root.cifar10=DIR root.cifar100=DIR"
    ]


def test_differences_are_overrides(configs):
    told = differences(configs["feddymem"], configs["fedavg"]).values()
    again = compose(["method=fedavg", "rounds=2", *told])
    assert differences(again, configs["feddymem"]) == {}


def test_pages_are_written_whole_and_old_pictures_go(make_run, page_of, tmp_path):
    out = tmp_path / "reports"
    (out / "pictures").mkdir(parents=True)
    (out / "pictures" / "old.svg").write_text("")
    page = page_of([make_run("<i>a</i>", "feddymem", [0.5, 0.7])])
    assert write_page(page, out) == out / "report.html"
    text = (out / "report.md").read_text()
    assert not (out / "pictures" / "old.svg").exists()
    for name in re.findall(r"\]\((pictures/[^)]+)\)", text):
        assert (out / name).is_file()
    assert "<i>" not in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rows=A"], "has no key 'rows'"),
        (["experiment"], "not of the form"),
        (["ui=javascript:x"], "must begin with http"),
    ],
)
def test_bad_input_is_refused(words, says):
    with pytest.raises(UserError, match=re.escape(says)):
        report_runs(words, Display(quiet=True))


@pytest.mark.slow
def test_the_page_of_real_runs_in_a_browser(tmp_path, monkeypatch, capfd):
    """Tiny tracked runs; one whose folder is gone comes from MLflow."""
    from lit_fedad.experiment.train import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    common = ["debug=seconds", "rounds=1", f"data.root={tmp_path / 'data'}"]
    for word in ("feddymem", "local"):
        train(compose([*common, f"method={word}"]), quiet=True)
    runs = tracked_runs(["textures"])
    assert [run.tags["method"] for run in runs] == ["feddymem", "local"]
    assert [step for step, _ in metric_history(runs[0].run_id, "i_auroc/mean")] == [0, 1]
    shutil.rmtree(runs[1].folder)
    with pytest.raises(UserError, match="none of this name"):
        tracked_runs(["elsewhere"])
    page = report_runs(["experiment=textures", "out=page"], Display(quiet=True))
    text = page.read_text()
    for run in runs:
        assert f"{UI}/#/experiments/{run.experiment_id}/runs/{run.run_id}" in text
    assert not re.search(r"<(script|link|iframe|object)\b", text)
    assert set(re.findall(r'src="([a-z]+:)', text)) == {"data:"}
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium or Chrome: the page was not opened")
    picture = tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", f"--screenshot={picture}", "--window-size=1280,1600"]
    subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50

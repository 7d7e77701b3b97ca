"""The report of tracked runs: every number linked, seeds grouped, the papers' tables, what is missing."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind
from lit_fedad.experiment.run_files import save_json
from lit_fedad.papers import page as module
from lit_fedad.papers import sections
from lit_fedad.papers.page import build_page, report_runs, write_page
from lit_fedad.papers.runs import Links, complete_runs
from lit_fedad.report.console import Display
from lit_fedad.report.html import Gallery, Grid
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.tracking import reading
from lit_fedad.tracking.reading import TrackedRun, metric_history, tracked_runs

UI = "http://127.0.0.1:5000"


@pytest.fixture
def page_of(monkeypatch, tmp_path):
    """The report of runs, with few tables, without MLflow and with figures that are not rendered."""

    def page(runs, more=(), tables=("feddymem_1",)):
        monkeypatch.setattr(sections, "svg", lambda figure: b"<svg/>")
        monkeypatch.setattr(module, "page_tables", lambda: list(tables))
        monkeypatch.setattr(sections, "metric_history", lambda *_: [(1, 0.25), (2, 0.5)])
        tracked = [*(run.tracked for run in runs), *more]
        return build_page(tracked, runs, Links(UI, tmp_path / "reports"), None)

    return page


def section(page, title):
    return next(section for section in page.sections if section.title == title)


def grids(page, title):
    return [block for block in section(page, title).blocks if isinstance(block, Grid)]


def texts(grid):
    return [[cell.text for cell in line.cells] for line in grid.lines]


@pytest.mark.slow
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
    sent, time = (
        next(place for place, head in enumerate(grid.heads) if head.startswith(name))
        for name in ("bytes u", "time")
    )
    assert [line.cells[sent].text for line in grid.lines] == ["4.00 MB"] * 4
    assert [line.cells[time].text for line in grid.lines] == ["6.0 s"] * 4
    assert (first.cells[-1].text, first.cells[-1].url) == ("a", "../outputs/a")


def test_runs_that_a_later_one_repeats_are_counted_apart(make_run, page_of):
    runs = [make_run(name, "feddymem", [0.5, 0.7]) for name in "abc"]
    assert page_of(runs).summary.startswith("Complete runs: 1, and 2 that later ones repeat.")
    assert page_of(runs[:1]).summary.startswith("Complete runs: 1.")


def test_a_mean_over_some_seeds_says_of_how_many(make_run, page_of):
    runs = [with_products(make_run(name, "feddymem", [0.5], seed=int(name)), 0.01) for name in "012"]
    runs[1].result["last"]["p_auroc"] = {"mean": None, "worst": None, "per_client": {"0": None}}
    runs[1].result["last"]["pro"] = {"per_product": {"nut": None, "cap": 0.5}, "product_mean": 0.5}
    page = page_of(runs)
    (table,), (products,) = grids(page, "Runs"), grids(page, "Products")
    assert (
        table.lines[0].cells[table.heads.index("P-AUROC")].text == "0.5000 ± 0.0000 [0.5000] (2 of 3 seeds)"
    )
    assert texts(products)[0][3:] == ["0.5000 (2 of 3 seeds)", "0.6667"]


def test_every_number_of_every_table_has_a_link(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "fedavg", [0.4, 0.2])])
    for part in page.sections:
        for grid in (block for block in part.blocks if isinstance(block, Grid)):
            for line in grid.lines:
                for head, cell in zip(grid.heads, line.cells, strict=True):
                    measured = re.search(r"\d\.\d", cell.text) and not head.endswith("paper")
                    assert cell.url or not measured, (part.title, head, cell)


def test_curves_and_partitions(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7])])
    galleries = [b for b in section(page, "Over the rounds").blocks if isinstance(b, Gallery)]
    captions = [picture.caption for gallery in galleries for picture in gallery.pictures]
    assert captions == ["Mean over clients, one line a run.", "feddymem, seed 0: I-AUROC of each client"]
    (partitions,) = section(page, "Partitions").blocks
    assert [picture.url for picture in partitions.pictures] == [f"{UI}/#/experiments/7/runs/a"]
    assert not [part for part in page.sections if part.title == "Privacy"]


def test_runs_of_other_first_metrics_are_not_compared_by_one(make_run, page_of):
    """The same data learned in stages: A_sel is no accuracy."""
    whole, stages = make_run("a", "fedavg", [0.5, 0.7]), make_run("b", "feddymem", [0.25, 0.5])
    for moment in ("first", "last", "best"):
        values = stages.result[moment]["i_auroc"]
        stages.result[moment] = {"round": 2, "selection_accuracy": values}
    stages.result["metrics"] = {"1": {"selection_accuracy": 0.25}, "2": {"selection_accuracy": 0.375}}
    page = page_of([whole, stages])
    (grid,) = grids(page, "Runs")
    worst = grid.heads.index("worst client, I-AUROC")
    assert [line.cells[worst].text for line in grid.lines] == ["client 0: 0.5000", UNKNOWN]
    drawn = [picture.alt for block in section(page, "Over the rounds").blocks for picture in block.pictures]
    assert [alt for alt in drawn if "one line a run" in alt] == [
        "I-AUROC over the rounds on textures, one line a run: fedavg",
        "A_sel over the rounds on textures, one line a run: feddymem",
    ]
    assert "feddymem, seed 0: I-AUROC of each client" not in drawn


def test_without_defects_to_test_on_no_empty_axes_are_drawn(make_run, page_of):
    run = make_run("a", "feddymem", [0.5, 0.7])
    run.result["metrics"] = {key: {"i_auroc": None} for key in run.result["metrics"]}
    page = page_of([run])
    galleries = [block for part in page.sections for block in part.blocks if isinstance(block, Gallery)]
    assert not [p for gallery in galleries for p in gallery.pictures if "one line a run" in p.caption]


def with_products(run, false_alarms):
    own = {"nut": 0.5, "bolt": None, "cap": 0.75}
    run.result["last"] = {
        **run.result["last"],
        "pro": {"mean": 0.9, "per_product": own, "product_mean": 0.625},
    }
    rate = {"false_alarm_rate": false_alarms, "interval": [0.0018, 0.0545], "miss_rate": None}
    rate["miss_interval"] = [None, None]
    rates = {"false_alarm_rate": {"mean": false_alarms}, "miss_rate": {"mean": 0.5}}
    products = {"own": {"nut": rate}, "foreign": {"nut": {}}}
    run.result["decisions"] = {
        "auto": {**rates, "products": products, "promised": {"mean": 0.03, "lowest": 0.01, "highest": 0.05}},
        "0.1": {**rates, "products": products, "promised": {"mean": 0.1, "lowest": 0.1, "highest": 0.1}},
    }
    return run


def test_products_stand_beside_their_mean(make_run, page_of):
    runs = [make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "feddymem", [0.5, 0.7], seed=1)]
    runs = [with_products(run, 0.01) for run in runs]
    runs[1].result["last"]["pro"] = {"per_product": {"nut": 0.25, "cap": 0.25}, "product_mean": 0.25}
    runs[0].result["last"]["miss_rate"] = {"mean": 0.5}
    page = page_of(runs)
    (table,), (grid,) = grids(page, "Runs"), grids(page, "Products")
    assert table.heads[:4] == ["method", "seed", "I-AUROC", "misses"]  # what a narrow screen shows
    assert grid.heads == ["run", "metric", "mean of products", "nut", "cap"]
    assert texts(grid) == [["feddymem", "PRO", "0.4375", "0.3750", "0.5000"]]


def test_seen_rates_stand_beside_the_promised_one(make_run, page_of):
    run = with_products(make_run("a", "feddymem", [0.5, 0.7]), 0.01)
    shutil.copy(run.files / "figures" / "partition.png", run.files / "figures" / "scores.png")
    grid, gallery = section(page_of([run]), "Decisions").blocks
    assert grid.heads[:3] == ["run, product", "promised", "false alarms"]
    assert texts(grid) == [
        ["feddymem, seed 0", "0.01 to 0.05 by client", "0.0100", "0.5000", UNKNOWN, UNKNOWN],
        ["nut", "0.01 to 0.05 by client", "0.0100 (0.0018 to 0.0545)", *[UNKNOWN] * 3],
        ["feddymem, seed 0", "0.1", "0.0100", "0.5000", UNKNOWN, UNKNOWN],
    ]
    assert [picture.caption for picture in gallery.pictures] == [
        "Scores of each client beside its threshold: feddymem on textures, seed 0"
    ]


def test_runs_without_products_and_decisions_have_no_such_sections(make_run, page_of):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7])])
    assert not {part.title for part in page.sections} & {"Products", "Decisions"}


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


@pytest.mark.parametrize("content", ["{", "[]", "{}"], ids=["cut", "no object", "of nothing"])
def test_a_damaged_attack_of_one_run_is_named_and_the_others_are_drawn(make_run, page_of, content):
    runs = [make_run(name, "fedavg", [0.5, 0.7], seed=seed) for seed, name in enumerate("ab")]
    for run, text in zip(runs, (content, json.dumps({"max_auc": 0.625})), strict=True):
        (run.files / "privacy").mkdir()
        (run.files / "privacy" / "lira.json").write_text(text)
    privacy = section(page_of(runs), "Privacy").blocks
    assert [line[1:] for line in texts(privacy[0])] == [["lira", "max_auc", "0.625"]]
    told = [line for block in privacy[1:] for line in block.lines]
    damaged = [f"{runs[0].files}/privacy/lira.json: "] * (content != "{}")
    assert [line.partition("lira.json: ")[0] + "lira.json: " for line in told] == damaged


def test_runs_that_are_not_complete_are_named(make_run, page_of):
    tags = {"method": "moon", "data": "textures", "seed": "4", "lit_fedad.out": "/gone/x"}
    failed = TrackedRun("f", "7", "textures", "moon-4", "FAILED", 0, tags, {}, {})
    _, grid = grids(page_of([make_run("a", "feddymem", [0.5, 0.7])], [failed]), "Runs")
    assert texts(grid) == [["moon-4", "moon", "textures", "4", "failed", "x"]]
    assert grid.lines[0].cells[-1].url is None


def test_pages_are_written_whole_and_old_pictures_go(make_run, page_of, tmp_path):
    out = tmp_path / "reports"
    (out / "pictures").mkdir(parents=True)
    (out / "pictures" / "old.svg").write_text("")
    (out / "pictures" / ".written").write_text("old.svg\n../report.md")
    (out / "pictures" / "holiday.jpg").write_text("mine")
    page = page_of([make_run("<i>a</i>", "feddymem", [0.5, 0.7])])
    assert write_page(page, out) == out / "report.html"
    text = (out / "report.md").read_text()
    assert not (out / "pictures" / "old.svg").exists()
    assert (out / "pictures" / "holiday.jpg").read_text() == "mine"
    for name in re.findall(r"\]\((pictures/[^)]+)\)", text):
        assert (out / name).is_file()
    assert "<i>" not in (out / "report.html").read_text()
    again = {path.name for path in (out / "pictures").iterdir()}
    write_page(page, out)
    assert {path.name for path in (out / "pictures").iterdir()} == again


def test_a_picture_that_no_report_wrote_is_not_replaced(make_run, page_of, tmp_path):
    page = page_of([make_run("a", "feddymem", [0.5, 0.7])])
    write_page(page, tmp_path / "other")
    (name,) = (tmp_path / "other" / "pictures" / ".written").read_text().splitlines()[:1]
    (tmp_path / "reports" / "pictures").mkdir(parents=True)
    (tmp_path / "reports" / "pictures" / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name}: no report wrote it"):
        write_page(page, tmp_path / "reports")
    assert (tmp_path / "reports" / "pictures" / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ("format: 4\nmethod: {name: feddymem}\n", "a run of lit_fedad 0.2, which this version cannot open"),
        ("method: {name: feddymem}\n", "a run of lit_fedad 0.1, which this version cannot open"),
        (None, "config.yaml: cannot be read"),
    ],
)
def test_a_run_of_another_version_is_left_out_with_a_warning(make_run, tmp_path, capsys, written, cause):
    own, other = make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "feddymem", [0.5, 0.7], seed=1)
    for run in (own, other):
        save_json(run.files, "result.json", run.result)
    settings = other.files / "config.yaml"
    settings.unlink()
    if written is not None:
        settings.write_text(written)
    found = complete_runs([own.tracked, other.tracked], tmp_path / "fetched", None, Display())
    assert [run.tracked.run_id for run in found] == ["a"]
    assert cause in capsys.readouterr().err


def test_a_run_with_a_damaged_result_is_left_out_with_a_warning(make_run, tmp_path, capsys):
    whole, broken = make_run("a", "feddymem", [0.5, 0.7]), make_run("b", "feddymem", [0.5, 0.7], seed=1)
    for run in (whole, broken):
        run.files.mkdir(parents=True, exist_ok=True)
    save_json(whole.files, "result.json", whole.result)
    (broken.files / "result.json").write_text(json.dumps(broken.result)[:-20])
    found = complete_runs([whole.tracked, broken.tracked], tmp_path / "fetched", None, Display())
    assert [run.tracked.run_id for run in found] == ["a"]
    said = capsys.readouterr()
    assert f"b is left out: {broken.files / 'result.json'}: cannot be read" in " ".join(
        (said.out + said.err).split()
    )


def test_a_run_that_failed_is_not_the_one_that_its_folder_holds_by_now(make_run, tmp_path):
    later = make_run("b", "feddymem", [0.5, 0.7])
    save_json(later.files, "result.json", later.result)
    failed = replace(later.tracked, run_id="a", status="FAILED")
    found = complete_runs([failed, later.tracked], tmp_path / "fetched", None, Display())
    assert [run.tracked.run_id for run in found] == ["b"]


def test_a_run_whose_files_nobody_has_is_left_out_with_a_warning(make_run, tmp_path, monkeypatch, capsys):
    def no_store(uri):
        raise OSError("no such bucket")

    monkeypatch.setattr(reading, "connect", no_store)
    gone = make_run("a", "feddymem", [0.5, 0.7])
    assert complete_runs([gone.tracked], tmp_path / "fetched", "http://127.0.0.1:9", Display()) == []
    assert "a is left out: http://127.0.0.1:9: its files cannot be fetched: no such bucket" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["rows=A"], "has no key 'rows'"),
        (["experiment"], "not of the form"),
        (["ui=javascript:x"], "must begin with http"),
    ],
)
def test_bad_input_is_refused(options, says):
    with pytest.raises(UserError, match=re.escape(says)):
        bind(report_runs, options, "report", display=Display(quiet=True))()


@pytest.mark.slow
def test_the_page_of_real_runs_in_a_browser(tmp_path, monkeypatch):
    """Tiny tracked runs; one whose folder is gone comes from MLflow."""
    from lit_fedad.experiment.train import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    common = ["debug=seconds", "rounds=1", f"data.root={tmp_path / 'data'}"]
    for method in ("feddymem", "local"):
        train(compose([*common, f"method={method}"]), quiet=True)
    runs = tracked_runs(["textures"])
    assert [run.tags["method"] for run in runs] == ["feddymem", "local"]
    assert [step for step, _ in metric_history(runs[0].run_id, "i_auroc/mean")] == [0, 1]
    shutil.rmtree(runs[1].folder)
    with pytest.raises(UserError, match="none of this name"):
        tracked_runs(["elsewhere"])
    page = report_runs(Display(quiet=True), ("textures",), "page")
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


def test_how_many_runs_were_tried_is_told_where_one_cannot_be_read(make_run, tmp_path, monkeypatch, capsys):
    """Each is then tried alone, a second each, of hundreds perhaps."""
    monkeypatch.setattr(sections, "svg", lambda figure: b"<svg/>")
    monkeypatch.setattr(sections, "metric_history", lambda *_: [])
    runs, told = [make_run(name, "fedavg", [0.5], seed=seed) for seed, name in enumerate("abc")], []
    runs[1].result["bytes_up"] = "many"
    tracked = [run.tracked for run in runs]
    _, whole = module._readable_page(
        tracked, runs, Links(UI, tmp_path), None, Display(), lambda *counts: told.append(counts)
    )
    assert told == [(0, 3), (1, 3), (2, 3)]
    assert [run.tracked.name for run in whole] == ["a", "c"]
    assert "b is left out" in " ".join(capsys.readouterr().err.split())

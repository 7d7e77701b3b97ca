"""Figures that are made like tables: from the command line to the picture, with runs that are made up."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from lit_fedad.cli import main as cli
from lit_fedad.papers import table as module
from lit_fedad.papers.plan import page_tables, paper_columns, plan_runs, read_table, table_names

TABLES = {name: read_table(name) for name in table_names()}
DRAWN = {name: table for name, table in TABLES.items() if table.figure in ("rounds", "clients", "sheets")}
PICTURES = {"partition", "heatmaps", "representations", "capacities", "distance_correlation"}


@pytest.fixture
def made_up(monkeypatch):
    """Writes results and pictures in the place of runs; gives the titles of these."""
    titles = []

    def launch(runs, jobs, logs, display, finished, command=None, verb=""):
        for run in runs:
            titles.append(run.title)
            moment = {"round": 2, "accuracy": {"mean": 0.5}, "auroc": {"mean": 0.5}, "i_auroc": {"mean": 0.5}}
            result = {
                "data": run.config["data"].get("name", "x"),
                "partition": {"strategy": "Dirichlet", "sizes": [5, 5]},
                "backbone": {"name": "none", "taken": "none"},
                "rounds": 2,
                **dict.fromkeys(("first", "last", "best"), moment),
                "metrics": {"1": {"accuracy": 0.25}, "2": {"accuracy": 0.5}},
                "exchanges": [1, 2],
                "bytes_up": [4, 4],
                "bytes_down": [4, 4],
                "seconds_per_round": [1.0, 1.0],
                "scalars": [{"loss": 1.0}, {"loss": 0.5, "knowledge_mmd": 0.125}],
                "client_losses": [{"0": 1.0}, {"0": 0.5}],
                "tracking_run_id": None,
                "config": run.config,
            }
            (run.folder.path / "figures").mkdir(parents=True)
            (run.folder.path / "result.json").write_text(json.dumps(result))
            picture = Image.fromarray(np.full((4, 8, 3), 7, np.uint8))
            picture.save(run.folder.path / "figures" / "representations.png")
            finished(run, None)

    monkeypatch.setattr(module, "launch", launch)
    return titles


def report(name, *options):
    assert cli.main(["report", f"table={name}", "seeds=0", "tracking=off", *options]) == 0
    folder = Path(f"reports/{name}")
    assert (folder / f"{name}.png").read_bytes()[1:4] == b"PNG"
    return folder


def test_knowledge_over_the_rounds_with_and_without_selection(made_up, capsys):
    folder = report("fedvck_fig1b", "root.pathmnist=DIR")
    assert made_up == [
        "model-guided selection on Path, seed 0",
        "vanilla selection on Path, seed 0",
    ]
    values = pd.read_csv(folder / "fedvck_fig1b-rounds.csv", keep_default_na=False)
    assert values[["row", "quantity", "round", "value"]].to_numpy().tolist() == [
        ["model-guided selection", "knowledge_mmd", 2, 0.125],
        ["vanilla selection", "knowledge_mmd", 2, 0.125],
    ]
    assert "fedvck_fig1b-rounds.csv" in capsys.readouterr().out


@pytest.mark.slow
def test_representations_of_two_runs_side_by_side(made_up):
    report("fadngs_fig7", "root.semantic_cifar10=DIR")
    assert made_up == ["FADngs on CIFAR-100, seed 0", "CSI on CIFAR-100, seed 0"]


def test_the_page_of_all_runs_does_not_repeat_them():
    assert not DRAWN.keys() & set(page_tables())


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_named(name):
    table = DRAWN[name]
    if table.figure == "sheets":
        assert table.sheet in PICTURES
    else:
        assert table.quantities
    assert "a picture without numbers" in table.source
    assert not any(row.paper for row in table.rows)


@pytest.mark.parametrize(
    ("figure", "row", "column", "table", "same_row", "same_column"),
    [
        ("feddymem_fig7", "SCAFFOLD", "MPDD", "feddymem_1", "SCAFFOLD", "MPDD"),
        ("fedvck_fig3", "model-guided selection", "OrganC", "fedvck_2", "FedVCK", "OrganC, Dir 0.05"),
        ("fadngs_fig7", "CSI", "CIFAR-100", "fadngs_4", "CSI", "CIFAR-100"),
    ],
)
def test_its_runs_are_those_of_a_table(figure, row, column, table, same_row, same_column):
    """One run fills both."""
    folders = []
    for name, label, heading in ((figure, row, column), (table, same_row, same_column)):
        rows = [one for one in TABLES[name].rows if one.label == label]
        columns = [one for one in paper_columns(TABLES[name]) if one.label == heading]
        (run,) = plan_runs(rows, columns, ["data.root=x"], [0])
        folders.append(run.folder.path)
    assert folders[0] == folders[1]

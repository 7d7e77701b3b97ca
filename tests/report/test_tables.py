"""Tables against numbers worked out by hand."""

import io
import math
from dataclasses import replace

import pandas as pd
import pytest

from lit_fedad.papers.paper import FilledTable
from lit_fedad.report.table_figures import rows_figure, tasks_figure
from lit_fedad.report.tables import (
    Outcome,
    Row,
    Table,
    caption,
    costs_grid,
    results_grid,
    runs_frame,
)

TABLE = Table(
    title="A table",
    source="a paper, Table IX",
    metrics=["i_auroc", "pro"],
    rows_are="method",
    columns={"Wafer": "wafer", "Brain": "brain"},
    protocol=[],
    rows=[
        Row("FedAvg", ["method=fedavg"], {"wafer": [[63.9, 0.36], [67.0, 0.3]], "brain": [50.16, None]}),
        Row("FedDyMem", ["method=federated_bank"], {"wafer": [71.96, 74.91]}),
    ],
    beyond=[Row("Ours", ["method=ours"])],
    note="Mind\nthe gap.",
)
BOTH = {"Wafer": "wafer", "Brain": "brain"}


def result(
    last, pro=None, best=None, seed=0, rate=1e-3, client_rate=None, exchanges=(-1, 0, 1, 2, 3), loss=0.5
):
    """A run of two clients; its training rounds took 1, 5 and 2 seconds."""

    def stage(number, value):
        return {"round": number, "i_auroc": {"mean": value, "worst": 0.1}, "pro": {"mean": pro}}

    size = len(exchanges)
    return {
        "data": "wafer",
        "partition": {"strategy": "Dirichlet", "sizes": [30, 12]},
        "backbone": {"name": "resnet18", "taken": "imagenet"},
        "seed": seed,
        "rounds": max(exchanges),
        "first": stage(0, 0.4),
        "last": stage(max(exchanges), last),
        "best": stage(2, last if best is None else best),
        "exchanges": list(exchanges),
        "bytes_up": [10, 20, 3000, 3000, 4000][:size],
        "bytes_down": [0, 10, 5000, 5000, 6000][:size],
        "seconds_per_round": [9.0, 9.0, 1.0, 5.0, 2.0][:size],
        "scalars": [{}] * (size - 1) + [{} if loss is None else {"loss": loss}],
        "tracking_run_id": f"run{seed}",
        "config": {
            "image": {"size": 224},
            "task": {"learning_rate": rate},
            "method": {"client": {"learning_rate": client_rate}},
        },
    }


def shown(grid):
    """The texts of a table, those that are bold between stars."""
    return pd.DataFrame(
        [[f"**{cell.text}**" if cell.bold else cell.text for cell in line.cells] for line in grid.lines],
        columns=grid.heads,
    )


def results_table(table, rows, columns, runs, bold=False):
    cells = shown(results_grid(table, rows, columns, runs, lambda row, column: None, ""))
    return cells if bold else cells.map(lambda text: text.strip("*"))


def costs_table(table, rows, runs):
    return shown(costs_grid(table, rows, runs, lambda row, column: None, ""))


def frame(*outcomes):
    return runs_frame(outcomes, TABLE.metrics)


@pytest.fixture
def runs():
    """FedAvg on Wafer with three seeds, one of two FedDyMem seeds, one failure, one that is open."""
    return frame(
        Outcome("FedAvg", "Wafer", 0, "o/0", result(0.60, 0.50, 0.70)),
        Outcome("FedAvg", "Wafer", 1, "o/1", result(0.62, 0.50, 0.71, seed=1)),
        Outcome("FedAvg", "Wafer", 2, "o/2", result(0.67, 0.50, 0.72, seed=2)),
        Outcome("FedDyMem", "Wafer", 0, "o/3", result(0.70)),
        Outcome("FedDyMem", "Wafer", 1, "o/4", cause="no such file"),
        Outcome("FedAvg", "Brain", 0, "o/5", cause="no such file"),
        Outcome("FedDyMem", "Brain", 0, "o/6"),
    )


def test_mean_and_sample_deviation_stand_beside_the_paper(runs):
    cells = results_table(TABLE, TABLE.rows, BOTH, runs)
    assert list(cells) == [
        "method", "Wafer I-AUROC", "Wafer I-AUROC, paper", "Wafer PRO", "Wafer PRO, paper",
        "Brain I-AUROC", "Brain I-AUROC, paper", "Brain PRO",
    ]  # fmt: skip
    # Mean of 60, 62, 67 is 63; squared deviations 9 + 1 + 16 = 26, over two: 13.
    assert math.sqrt(13) == pytest.approx(3.61, abs=5e-3)
    assert cells.loc[0].tolist() == [
        "FedAvg", "63.00 ± 3.61 [71.00]", "63.90 ± 0.36", "50.00 ± 0.00 [50.00]", "67.00 ± 0.30",
        "failed", "50.16", "failed",
    ]  # fmt: skip
    assert cells.loc[1].tolist() == [
        "FedDyMem", "70.00 [70.00] (1 of 2 seeds)", "71.96", "failed", "74.91", "–", "–", "–",  # noqa: RUF001
    ]  # fmt: skip


def test_a_metric_that_is_undefined_is_not_made_up():
    cells = results_table(
        TABLE, TABLE.rows, {"Wafer": "wafer"}, frame(Outcome("FedAvg", "Wafer", 0, "o", result(0.6)))
    )
    assert cells["Wafer PRO"].tolist() == ["–", "–"]  # noqa: RUF001


def test_only_our_best_is_bold(runs):
    cells = results_table(TABLE, TABLE.rows, BOTH, runs, bold=True)
    assert cells["Wafer I-AUROC"].str.startswith("**").tolist() == [False, True]
    assert cells["Wafer PRO"].tolist() == ["**50.00 ± 0.00 [50.00]**", "failed"]
    assert not cells["Brain I-AUROC"].str.contains("*", regex=False).any()
    assert not cells["Wafer I-AUROC, paper"].str.contains("*", regex=False).any()


def test_equal_values_are_both_bold():
    """Equal by the digits that are shown."""
    values = zip(TABLE.rows, (0.6, 0.60004), strict=True)
    equal = frame(*(Outcome(row.label, "Wafer", 0, "o", result(value)) for row, value in values))
    assert (
        results_table(TABLE, TABLE.rows, BOTH, equal, bold=True)["Wafer I-AUROC"].tolist()
        == ["**60.00 [60.00]**"] * 2
    )


def test_less_may_be_better(runs):
    backwards = replace(TABLE, lower_is_better=["i_auroc"])
    cells = results_table(backwards, TABLE.rows, BOTH, runs, bold=True)
    assert cells["Wafer I-AUROC"].str.startswith("**").tolist() == [True, False]


def test_less_is_better_for_single_anomaly_sets_too():
    table = replace(TABLE, lower_is_better=["fe", "forgetting"])
    names = ("fe", "fe_calibrated_svhn", "forgetting_masked", "pro", "feature")
    assert [table.favourite(name) for name in names] == [min, min, min, max, max]


def test_data_that_the_paper_has_not_get_no_column_of_the_papers(runs):
    assert list(results_table(TABLE, TABLE.rows, {"Wafer": "my_wafers"}, runs)) == [
        "method",
        "Wafer I-AUROC",
        "Wafer PRO",
    ]


def test_costs_are_those_of_training_rounds(runs):
    costs = costs_table(TABLE, TABLE.rows, runs).set_index("method").loc["FedAvg"]
    # Two clients: 4000 and 6000 bytes of the last round halved; all exchanges 10,030 + 16,010 = 26,040 halved.
    assert costs["up a round"] == "2.00 kB"
    assert costs["down a round"] == "3.00 kB"
    assert costs["in all"] == "13.02 kB"
    assert costs["time of a round"] == "2.0 s"
    assert costs["rounds"] == "3"
    assert costs["learning rate"] == "0.001"
    assert costs["backbone, weights"] == "resnet18, imagenet"
    assert costs["partition"] == "Dirichlet, 2 clients"
    assert costs["seeds"] == "0, 1, 2"


def test_costs_that_differ_are_a_range_and_those_unknown_a_dash():
    runs = frame(
        Outcome("FedAvg", "Wafer", 0, "a", result(0.5, exchanges=(-1, 0, 1))),
        Outcome("FedAvg", "Wafer", 1, "b", result(0.5, client_rate=0.01)),
        Outcome("FedDyMem", "Wafer", 0, "c", result(0.5, exchanges=(-1, 0), loss=None)),
    )
    costs = costs_table(TABLE, TABLE.rows, runs).set_index("method")
    assert costs.loc["FedAvg", "time of a round"] == "1.0 s to 2.0 s"
    assert costs.loc["FedAvg", "learning rate"] == "0.001 to 0.01"
    assert costs.loc["FedAvg", "rounds"] == "1 to 3"
    for head in ("up a round", "down a round", "time of a round", "learning rate"):
        assert costs.loc["FedDyMem", head] == "–"  # noqa: RUF001
    assert costs.loc["FedDyMem", "in all"] == "20 B"


def test_where_the_server_trains_its_learning_rate_counts():
    condensing = result(0.5)
    condensing["config"]["method"]["server"] = {"training": {"learning_rate": 0.02}}
    costs = costs_table(TABLE, TABLE.rows, frame(Outcome("FedAvg", "Wafer", 0, "a", condensing)))
    assert costs["learning rate"][0] == "0.02"


def test_one_line_a_run_survives_csv(runs):
    read = pd.read_csv(io.StringIO(runs.to_csv(index=False)))
    assert read["state"].tolist() == ["complete"] * 4 + ["failed"] * 2 + ["open"]
    first = read.iloc[0]
    assert first[["i_auroc_first", "i_auroc_last", "i_auroc_best", "pro_last"]].tolist() == [
        0.4,
        0.6,
        0.7,
        0.5,
    ]
    assert first[["bytes_up", "bytes_down", "bytes_in_all", "seconds"]].tolist() == [2000, 3000, 13020, 2]
    assert first[["folder", "mlflow_run", "best_round"]].tolist() == ["o/0", "run0", 2]
    assert read["cause"].dropna().tolist() == ["no such file"] * 2
    assert read.loc[read["state"] != "complete", "i_auroc_last"].isna().all()


def test_caption_says_what_the_runs_say(runs):
    source, means, _, wafer, brain, note = caption(TABLE, ["Wafer", "Brain"], runs)
    assert (source, note) == ("The paper's numbers: a paper, Table IX.", "Mind the gap.")
    assert "in brackets the best round" in means
    assert wafer == "Wafer: data wafer, 42 training images, 224 pixels, 4 of 5 runs complete."
    attacked = caption(replace(TABLE, attack=["attack=lira"]), ["Wafer"], runs)[1]
    assert attacked.startswith("Per cent. Ours: what membership inference finds in what clients send")
    assert brain == "Brain: data –, – training images, – pixels, 0 of 2 runs complete."  # noqa: RUF001


def test_rows_beyond_the_paper_have_tables_of_their_own():
    ours = [Outcome(row, "Wafer", 0, "o", result(0.6)) for row in ("FedDyMem", "Ours")]
    grids = list(FilledTable("x", TABLE, BOTH, ours).grids())
    titles = ["A table", "A table: what it cost", "A table: beyond the paper"]
    assert [grid.title for grid in grids] == [*titles, f"{titles[2]}: what it cost"]
    assert [len(grid.lines) for grid in grids] == [2, 1, 1, 1]
    assert [bool(grid.notes) for grid in grids] == [False, False, False, True]
    grids = list(FilledTable("x", replace(TABLE, rows=[]), BOTH, ours[1:]).grids())
    assert {line.cells[0].text for grid in grids for line in grid.lines} == {"Ours"}


def test_figure_has_a_line_a_column_and_gaps_where_nothing_is_known(runs):
    figure = rows_figure(TABLE, ["Wafer", "Brain"], runs)
    (axes,), (legend,) = figure.axes, figure.legends
    wafer, brain = (container.lines[0] for container in axes.containers)
    assert wafer.get_ydata().tolist() == pytest.approx([63, 70])
    assert pd.isna(brain.get_ydata()).all()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["FedAvg", "FedDyMem"]
    assert [text.get_text() for text in legend.get_texts()] == ["Wafer", "Brain"]
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(math.sqrt(13))


def in_tasks(*values, ending="", pro=0.5):
    """A run with a task a value, each of two rounds."""
    rounds = [2 * number for number, _ in enumerate(values, start=1)]
    metrics = {
        str(round): {f"i_auroc{ending}": v, "pro": pro} for round, v in zip(rounds, values, strict=True)
    }
    last = {"round": rounds[-1], f"i_auroc{ending}": {"mean": values[-1]}, "pro": {"mean": pro}}
    return {
        **result(0.1),
        "last": last,
        "best": last,
        "milestones": rounds,
        "metrics": {"0": {}, "1": {}, **metrics},
    }


IN_TASKS = replace(TABLE, metrics=["i_auroc"], brackets="task_1", figure="tasks")


def test_a_stage_that_comes_again_is_the_mean_over_its_rounds():
    again = in_tasks(0.1, 0.2, 0.3, 0.6) | {"stage_rounds": [[2, 6], [4, 8]]}
    runs = runs_frame([Outcome("FedAvg", "Wafer", 0, "o", again)], IN_TASKS.metrics)
    assert runs["i_auroc_task_1"].tolist() == pytest.approx([0.2])
    assert runs["i_auroc_task_2"].tolist() == pytest.approx([0.4])
    again["metrics"]["6"]["i_auroc"] = None
    runs = runs_frame([Outcome("FedAvg", "Wafer", 0, "o", again)], IN_TASKS.metrics)
    assert pd.isna(runs["i_auroc_task_1"]).all()  # not the mean of those that are known


def test_rows_of_one_run_are_told_apart_by_their_ending():
    both = result(0.6) | {
        moment: {"round": 3, "i_auroc": {"mean": a}, "i_auroc_lp": {"mean": b}}
        for moment, a, b in (("first", 0.1, 0.2), ("last", 0.6, 0.7), ("best", 0.8, 0.9))
    }
    runs = frame(
        Outcome("FedAvg", "Wafer", 0, "o", both),
        Outcome("FedDyMem", "Wafer", 0, "o", both, ending="_lp"),
        Outcome("Ours", "Wafer", 0, "o", both, ending="_head"),
    )
    assert runs["i_auroc_first"].tolist()[:2] == [0.1, 0.2]
    cells = results_table(TABLE, [*TABLE.rows, *TABLE.beyond], {"Wafer": ""}, runs)
    assert cells["Wafer I-AUROC"].tolist() == ["60.00 [80.00]", "70.00 [90.00]", "–"]  # noqa: RUF001


def test_first_task_stands_beside_the_last():
    runs = runs_frame(
        [
            Outcome("FedAvg", "Wafer", 0, "a", in_tasks(0.9, 0.6, 0.5)),
            Outcome("FedAvg", "Wafer", 1, "b", in_tasks(0.8, 0.6, 0.4)),
            Outcome("FedDyMem", "Wafer", 0, "c", in_tasks(0.7, 0.3, ending="_lp"), ending="_lp"),
            Outcome("Ours", "Wafer", 0, "d", result(0.6)),
        ],
        IN_TASKS.metrics,
    )
    assert runs.filter(like="_task_").columns.tolist() == [f"i_auroc_task_{n}" for n in (1, 2, 3)]
    assert runs["i_auroc_task_3"].tolist()[:2] == [0.5, 0.4]
    cells = results_table(IN_TASKS, [*TABLE.rows, *TABLE.beyond], {"Wafer": ""}, runs)
    # Ours has no tasks, hence no brackets.
    assert cells["Wafer"].tolist() == ["45.00 ± 7.07 [85.00]", "30.00 [70.00]", "60.00"]
    assert "in brackets the last round of the first task." in caption(IN_TASKS, ["Wafer"], runs)[1]


def test_figure_has_a_panel_a_column_and_a_line_a_row_over_the_tasks():
    runs = runs_frame(
        [
            Outcome("FedAvg", "Wafer", 0, "a", in_tasks(0.9, 0.5)),
            Outcome("FedAvg", "Wafer", 1, "b", in_tasks(0.7, 0.5)),
            Outcome("Ours", "Wafer", 0, "c", in_tasks(0.1, 0.1)),
            Outcome("FedAvg", "Brain", 0, "d", in_tasks(0.4, 0.3)),
        ],
        IN_TASKS.metrics,
    )
    figure = tasks_figure(IN_TASKS, ["Wafer", "Brain"], runs)
    wafer, brain = figure.axes
    assert (wafer.get_title(), brain.get_title()) == ("Wafer", "Brain")
    # Neither FedDyMem, of which no run was asked, nor what is beyond the paper.
    (line,) = wafer.containers
    assert line.lines[0].get_xdata().tolist() == [1, 2]
    assert line.lines[0].get_ydata().tolist() == pytest.approx([80, 50])
    low, high = line.lines[2][0].get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(10 * math.sqrt(2))
    assert brain.containers[0].lines[0].get_ydata().tolist() == pytest.approx([40, 30])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg"]


def test_figure_over_tasks_is_there_before_any_run():
    runs = runs_frame([Outcome("FedAvg", "Wafer", 0, "a")], IN_TASKS.metrics)
    (axes,) = tasks_figure(IN_TASKS, ["Wafer"], runs).axes
    assert axes.containers[0].lines[0].get_xdata().size == 0

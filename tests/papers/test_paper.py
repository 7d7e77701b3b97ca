"""Complete runs in the papers' tables."""

from lit_fedad.papers.paper import fill
from lit_fedad.papers.plan import read_table


def test_a_paper_table_shows_ours_beside_the_papers(make_run):
    filled = fill(
        "feddymem_1", [make_run("a", "paper", [0.7, 0.8]), make_run("b", "paper", [0.6, 0.7], seed=1)]
    )
    assert filled.columns == {"MPDD": "mpdd"}
    assert [run.tracked.run_id for run in filled.complete["FedDyMem", "MPDD"]] == ["a", "b"]
    assert [(one.row, one.column, one.seed) for one in filled.outcomes] == [
        ("FedDyMem", "MPDD", 0),
        ("FedDyMem", "MPDD", 1),
    ]
    assert len(filled.table.rows) == len(read_table("feddymem_1").rows)  # the paper's, ours or not


def test_runs_of_other_settings_or_data_have_no_place(make_run):
    others = [make_run("a", "paper", [0.7, 0.8], rounds=5), make_run("b", "feddymem", [0.5, 0.7])]
    assert fill("feddymem_1", others) is None

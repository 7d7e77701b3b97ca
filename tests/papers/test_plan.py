"""The plan of a table: its columns, and which overrides count most."""

from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.plan import Column, add_roots, own_columns, plan_runs, read_table


def test_columns_of_several_experiments_and_data():
    found = add_roots(own_columns(["small", "paper"], ["mpdd", "textures"]), {"mpdd": "/m"})
    assert [column.label for column in found] == [
        "small, mpdd",
        "small, textures",
        "paper, mpdd",
        "paper, textures",
    ]
    assert found[2].names == ("paper", "mpdd")
    assert found[2].overrides == ("experiment=paper", "data=mpdd", "data.root=/m")
    assert found[3].overrides == ("experiment=paper", "data=textures")
    (one,) = own_columns(["paper"], ["mpdd"])
    assert (one.label, one.overrides) == ("mpdd", ("experiment=paper", "data=mpdd"))


def test_root_of_a_column_wins_over_that_of_all():
    found = add_roots(own_columns([], ["mpdd", "mvtec_textures"]), {"mpdd": "/m"})
    seeds = [0, 0]  # given twice, and counted once
    runs = plan_runs(read_table("feddymem_1").rows[:1], found, ["data.root=/all"], seeds)
    assert [run.config["data"]["root"] for run in runs] == ["/m", "/all"]


def test_row_wins_over_what_is_given_to_every_run():
    rows = [row for row in read_table("feddymem_1").beyond if row.label.startswith("Nearest")]
    (run,) = plan_runs(
        rows, [Column("t", ("textures",), ("data=textures",))], ["rounds=9", "batch_size=3"], [4]
    )
    assert (run.config["rounds"], run.config["batch_size"], run.config["seed"]) == (0, 3, 4)
    assert run.folder == RunFolder.of(run.config)

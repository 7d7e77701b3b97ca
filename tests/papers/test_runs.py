"""Groups of complete runs, and what their configurations differ in."""

from lit_fedad.core.config import compose
from lit_fedad.papers import runs as module
from lit_fedad.papers.runs import differences, groups_by_data


def test_configurations_of_one_method_are_told_apart(make_run):
    runs = [make_run("a", "feddymem", [0.5, 0.5]), make_run("b", "feddymem", [0.6, 0.6], batch_size=3)]
    groups = groups_by_data(runs)["textures"]
    assert {group.label for group in groups} == {"feddymem (batch_size=10)", "feddymem (batch_size=3)"}


def test_labels_of_many_configurations_read_each_once(make_run, monkeypatch):
    """Read anew for each pair, those of a few hundred runs took minutes."""
    read, write = [], module._override_text
    monkeypatch.setattr(module, "_override_text", lambda value: read.append(value) or write(value))
    runs = [make_run(str(number), "feddymem", [0.5], rounds=number) for number in range(1, 9)]
    groups_by_data(runs[:4])
    of_four = len(read)
    groups = groups_by_data(runs)["textures"]
    assert [group.label for group in groups] == [f"feddymem (rounds={number})" for number in range(1, 9)]
    assert len(read) == 3 * of_four > 0


def test_runs_of_other_promises_are_no_seeds_of_one_another(make_run, configs):
    evaluation = {**configs["feddymem"]["evaluation"], "alpha": 0.2}
    runs = [
        make_run("a", "feddymem", [0.5, 0.5]),
        make_run("b", "feddymem", [0.6, 0.6], seed=1, evaluation=evaluation),
    ]
    assert {group.label for group in groups_by_data(runs)["textures"]} == {
        "feddymem (evaluation.alpha=auto)",
        "feddymem (evaluation.alpha=0.2)",
    }


def test_of_runs_alike_the_last_counts(make_run):
    runs = [make_run("old", "feddymem", [0.5, 0.5]), make_run("new", "feddymem", [0.6, 0.6])]
    (group,) = groups_by_data(runs)["textures"]
    assert [run.tracked.run_id for run in group.runs] == ["new"]


def test_differences_are_overrides(configs):
    told = differences(configs["feddymem"], configs["fedavg"]).values()
    again = compose(["method=fedavg", "rounds=2", *told])
    assert differences(again, configs["feddymem"]) == {}


def test_a_section_that_another_run_has_not_is_told_by_its_class(make_run, configs):
    federation = configs["feddymem"]["federation"]
    bare = {**federation, "robust": {**federation["robust"], "banks": None}}
    runs = [make_run("a", "feddymem", [0.5, 0.5]), make_run("b", "feddymem", [0.6, 0.6], federation=bare)]
    assert {group.label for group in groups_by_data(runs)["textures"]} == {
        "feddymem (federation.robust.banks=BankSupport)",
        "feddymem (federation.robust.banks=null)",
    }

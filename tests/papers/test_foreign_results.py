"""Results that may come from anybody: one that does not hold what runs write costs the report no other run."""

from dataclasses import replace

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.experiment.run_files import save_json
from lit_fedad.papers import page as module
from lit_fedad.papers import runs as runs_module
from lit_fedad.papers import sections
from lit_fedad.papers.page import report_runs
from lit_fedad.papers.runs import complete_runs
from lit_fedad.report.console import Display


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    """Reports runs without MLflow and the papers' tables, with figures that are not rendered."""

    def report(runs, tracked=()):
        monkeypatch.setattr(sections, "svg", lambda figure: b"<svg/>")
        monkeypatch.setattr(sections, "metric_history", lambda *_: [(1, 0.25), (2, 0.5)])
        monkeypatch.setattr(module, "page_tables", list)
        monkeypatch.setattr(module, "tracked_runs", lambda *_: tracked or [run.tracked for run in runs])
        monkeypatch.setattr(module, "complete_runs", lambda *_: runs)
        report_runs(Display(), out=str(tmp_path / "reports"))

    return report


@pytest.mark.parametrize("key", ["seed", "task", "partition"])
def test_a_result_without_what_every_run_has_is_left_out(make_run, tmp_path, capsys, key):
    run = make_run("a", "feddymem", [0.5, 0.7])
    save_json(run.files, "result.json", {**run.result, key: None})
    assert complete_runs([run.tracked], tmp_path / "fetched", None, Display()) == []
    assert f"(no '{key}')" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "forged", [{"bytes_up": {}}, {"last": {"i_auroc": 3}}, {"decisions": {"auto": 0}}, {"exchanges": []}]
)
def test_a_result_of_other_kinds_costs_no_other_run(make_run, report_of, capsys, forged):
    whole, other = (make_run(name, "feddymem", [0.5, 0.7], seed=seed) for seed, name in enumerate("ab"))
    other.result.update(forged)
    report_of([whole, other])
    said = capsys.readouterr()
    assert "complete runs: 1;" in said.out
    assert f"b is left out: {other.files}/result.json does not hold what a run writes" in " ".join(
        said.err.split()
    )


def test_without_a_result_that_holds_what_runs_write_there_is_no_page(make_run, report_of):
    run = make_run("a", "feddymem", [0.5, 0.7])
    run.result["bytes_up"] = {}
    with pytest.raises(UserError, match="no result can be read"):
        report_of([run])


@pytest.mark.parametrize("folder", ["x" * 5000, "a\0b"], ids=["long", "nul"])
def test_a_folder_that_no_file_system_takes_costs_no_other_run(make_run, report_of, tmp_path, folder):
    whole, other = (make_run(name, "feddymem", [0.5, 0.7], seed=seed) for seed, name in enumerate("ab"))
    save_json(whole.files, "result.json", whole.result)
    tags = {**other.tracked.tags, "lit_fedad.out": folder}
    tracked = [whole.tracked, replace(other.tracked, tags=tags, status="FAILED")]
    found = complete_runs(tracked, tmp_path / "fetched", None, Display())
    assert [run.tracked.run_id for run in found] == ["a"]
    report_of(found, tracked)


def test_what_a_server_sends_lies_within_the_folder_for_it(make_run, tmp_path, monkeypatch):
    """An id is what the server says: one with dots would lead anywhere."""
    places = []
    monkeypatch.setattr(
        runs_module, "fetch_artifacts", lambda run, names, into, uri: places.append(into) or into
    )
    gone = make_run("a", "feddymem", [0.5, 0.7])
    complete_runs([replace(gone.tracked, run_id="../../elsewhere")], tmp_path / "fetched", None, Display())
    assert len(places) == 2
    assert all(place.resolve().is_relative_to(tmp_path / "fetched") for place in places)

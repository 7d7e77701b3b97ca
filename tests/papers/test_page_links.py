"""Where the numbers on the page of runs lead."""

import pytest

from lit_fedad.papers import page
from lit_fedad.report.console import Display


@pytest.mark.parametrize(
    ("uri", "ui", "links", "told"),
    [
        ("sqlite:///mlflow.db", None, "http://127.0.0.1:5000", "mlflow ui (http://127.0.0.1:5000)"),
        ("http://me:word@host:5000/", None, "http://host:5000", "http://host:5000"),
        ("http://host:5000", "https://lab/mlflow/", "https://lab/mlflow", "https://lab/mlflow"),
    ],
)
def test_numbers_lead_to_the_tracking_server(tmp_path, monkeypatch, capsys, uri, ui, links, told):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    built, file = [], tmp_path / "report.html"
    file.touch()
    monkeypatch.setattr(page, "tracked_runs", lambda *_: [])
    monkeypatch.setattr(page, "complete_runs", lambda *_: ["a run"])
    monkeypatch.setattr(page, "build_page", lambda tracked, runs, given, uri: built.append(given.ui))
    monkeypatch.setattr(page, "write_page", lambda page, out: file)
    page.report_runs(Display(), out=str(tmp_path), ui=ui)
    assert built == [links]
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["runs", told]

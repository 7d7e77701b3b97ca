import math

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.tracking.journal import Journal, artifact_values, text_values
from lit_fedad.tracking.sender import Delivery, deliver
from lit_fedad.tracking.tracker import Tracker


def test_only_new_values_are_appended(tmp_path, journal):
    for _ in range(2):  # the second time from what the file holds
        file = Journal(tmp_path)
        first = file.append_new("metrics", {"loss": 1.0}, 1)
        assert not file.append_new("metrics", {"loss": 2.0}, 1)
        file.append_new("metrics", {"loss": 2.0, "auroc": 0.5}, 2)
        file.append_new("tags", {"state": "new"}, None)
        assert file.append_new("tags", {"state": "resumed"}, None)
        file.close()
    assert not first
    assert [(record["kind"], record["scope"], record["values"]) for record in journal(tmp_path)] == [
        ("metrics", 1, {"loss": 1.0}),
        ("metrics", 2, {"loss": 2.0, "auroc": 0.5}),
        *[("tags", None, {"state": "new"}), ("tags", None, {"state": "resumed"})] * 2,
    ]


def test_half_written_last_line_is_forgotten(tmp_path, history):
    tracker = Tracker(tmp_path, "kill", "run")
    tracker.metrics({"loss": 1.0}, 1)
    run_id = tracker.close(timeout_s=120).run_id
    with (tmp_path / "tracking/journal.jsonl").open("ab") as file:
        file.write(b'{"kind": "metrics", "scope": 2, "values": {"lo')
    assert deliver(tmp_path) == Delivery(run_id, 0, None)

    tracker = Tracker(tmp_path, "kill", "run")
    tracker.metrics({"loss": 0.5}, 2)
    assert tracker.close(timeout_s=120) == Delivery(run_id, 0, None)
    assert history(run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_values_that_are_not_finite_are_dropped(tmp_path, client, journal):
    tracker = Tracker(tmp_path, "finite", "run")
    tracker.metrics({"loss": math.nan, "score": math.inf, "kept": 1.0}, step=1)
    tracker.metrics({"loss": math.nan}, step=2)
    delivery = tracker.close(timeout_s=120)
    assert client.get_run(delivery.run_id).data.metrics == {"kept": 1.0}
    assert [record["values"] for record in journal(tmp_path) if record["kind"] == "metrics"] == [
        {"kept": 1.0}
    ]


def test_a_folder_is_another_when_a_file_in_it_changes(tmp_path):
    figures = tmp_path / "figures" / "clients"
    figures.mkdir(parents=True)
    (figures / "a.png").write_bytes(b"123")
    before = artifact_values(figures.parent, tmp_path)
    assert before.keys() == {"figures"}
    assert before["figures"].startswith("1 files, 3 bytes, ")
    (figures / "b.png").write_bytes(b"45")
    assert artifact_values(figures.parent, tmp_path)["figures"].startswith("2 files, 5 bytes, ")
    outside = tmp_path / "empty"
    outside.mkdir()
    assert artifact_values(outside, tmp_path / "figures") == {str(outside): "0 files, 0 bytes, 0"}


@pytest.mark.parametrize(("length", "kept"), [(5999, 5999), (6000, 6000), (6001, 6000), (9000, 6000)])
def test_a_text_is_no_longer_than_mlflow_takes(length, kept):
    (text,) = text_values({"a": "x" * length}).values()
    assert len(text) == kept
    assert text.endswith("…") is (length > kept)


@pytest.mark.parametrize(("kind", "values"), [("metrics", 1000), ("params", 100), ("tags", 100)])
def test_a_record_has_no_more_values_than_a_request_takes(tmp_path, journal, kind, values):
    file = Journal(tmp_path)
    file.append_new(kind, {f"{number}": number for number in range(values + 1)}, None)
    file.close()
    assert [len(record["values"]) for record in journal(tmp_path)] == [values, 1]


def test_a_journal_of_any_length_is_not_read(tmp_path):
    (tmp_path / "tracking").mkdir()
    with (tmp_path / "tracking" / "journal.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"journal\.jsonl: has .* bytes"):
        Journal(tmp_path)

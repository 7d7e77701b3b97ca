"""Tables of declared forms: sizes against arithmetic by hand, and what crosses."""

from pathlib import Path

import pytest

from lit_fedad.cli import main as cli
from lit_fedad.contracts import Free, TensorSpec
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.papers.forms import messages, upload_mib
from lit_fedad.papers.plan import page_tables, paper_columns, read_table, table_names
from lit_fedad.report.tables import Setting

PATH = Setting("pathmnist", ["experiment=fedvck"], images=89_996, classes=9)
FORMS = [name for name in table_names() if read_table(name).cells != "runs"]


def configuration(method):
    return compose(["data.root=x", *PATH.overrides, f"method={method}"])


def test_weights_are_parameters_and_buffers():
    """Three blocks of 128 channels, each with the running mean and variance, and a count, of its normalisation."""
    floats = 317_961 + 3 * 2 * 128
    assert upload_mib(configuration("fedavg"), PATH) == pytest.approx(10 * (4 * floats + 3 * 8) / 2**20)


def test_condensed_images_take_a_byte_a_value():
    images = 0.01 * 89_996 * 3 * 28 * 28
    # Three lists of the nine classes in int64, and their mean logits in float32.
    lists = 10 * (3 * 9 * 8 + 9 * 9 * 4)
    assert upload_mib(configuration("fedvck"), PATH) == pytest.approx((images + lists) / 2**20)


def test_a_size_that_the_sender_chooses_is_not_guessed(monkeypatch):
    monkeypatch.setattr(FedAvgClient, "upload_spec", lambda self: {"x": TensorSpec((Free("things"), 2))})
    with pytest.raises(UserError, match="method=fedavg: only a run can tell how many things of 'x' are sent"):
        upload_mib(configuration("fedavg"), PATH)


@pytest.mark.slow
def test_what_crosses():
    found = messages(configuration("fedmix"), PATH)
    assert found == {
        "up, before round 1": "mean_images, mean_labels",
        "down, before round 1": "mean_images, mean_labels",
        "up, a round": "weights",
        "down, a round": "weights",
    }
    found = messages(configuration("fedgen"), PATH)
    assert found["down, a round"] == "weights, generator, label_counts"
    assert found["up, before round 1"] == "-"


@pytest.mark.slow
def test_the_command_writes_the_table_and_runs_nothing(workdir, capsys):
    assert cli.main(["report", "table=fedvck_5", "rows=FedVCK", "tracking=off"]) == 0
    assert "2.02" in capsys.readouterr().out
    text = Path("reports/fedvck_5/fedvck_5.md").read_text()
    assert "| FedVCK | 2.02 | 2.04" in " ".join(text.split())
    assert [path.name for path in workdir.iterdir()] == ["reports"]


def test_what_is_wrong_is_one_line(capsys):
    assert cli.main(["report", "table=fedvck_5", "data=cifar10"]) == 2
    assert "table=fedvck_5: counts what the paper's settings send" in capsys.readouterr().err
    assert cli.main(["report", "table=fedvck_10", "rows=FedAvg", "rouds=1"]) == 2
    assert "row FedAvg, column Path: unknown key 'rouds'" in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMS)
def test_every_column_says_how_many_images_and_classes_there_are(name):
    table = read_table(name)
    assert all(
        isinstance(column, Setting) and column.images and column.classes for column in table.columns.values()
    )
    assert all(column.label in table.columns for column in paper_columns(table))
    assert name not in page_tables()


def test_the_papers_two_tables_of_bytes_agree():
    few, all_of_them = ({row.label: row.paper for row in read_table(f"fedvck_{n}").rows} for n in (5, 9))
    assert few == {
        label: {column: paper[column] for column in few["FedAvg"]} for label, paper in all_of_them.items()
    }

"""The tables of ``conf/table``: their rows and columns compose, and their numbers are the papers'."""

import functools
import itertools
import os
from pathlib import Path

import pytest

from lit_fedad.papers.plan import page_tables, paper_columns, plan_runs, read_table, table_names
from lit_fedad.report.tables import Setting


@functools.cache
def planned(name):
    """Each row in some column, each column in some row: table, row, column and the configuration of their run."""
    table = read_table(name)
    rows, columns = [*table.rows, *table.beyond], paper_columns(table)
    number = max(len(rows), len(columns))
    pairs = itertools.islice(zip(itertools.cycle(rows), itertools.cycle(columns)), number)
    return [
        (table, row, column, plan_runs([row], [column], ["data.root=x"], [0])[0].config)
        for row, column in pairs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", table_names())
def test_every_row_and_every_column_composes(name):
    for table, _, column, config in planned(name):
        assert config["method"]["name"]
        data = table.columns[column.label]
        if isinstance(data, str):
            assert config["data"]["name"] == data  # by which the paper's numbers are found


def reader(config):
    """The data set that is read; one function reads several sets of classes, by name."""
    function = config["data"]["_target_"].rpartition(".")[2]
    return config["data"]["name"] if function == "class_set" else function


# Columns of frozen features are of settings of this library, beside the papers'.
GLDP_TABLES = [name for name in table_names() if name.startswith("gldp") and name != "gldp_frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GLDP_TABLES)
def test_every_column_of_gldp_is_what_its_label_says_and_every_row_trains_the_papers_epochs(name):
    for table, _, column, config in planned(name):
        data, partition = table.columns[column.label].data, config["partition"]
        numbers = [partition[key] for key in ("clients", "classes", "stages")]
        written = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny_imagenet": "Tiny-ImageNet"}[data]
        assert column.label == f"{written} {numbers}, IF {partition['imbalance']}"
        assert reader(config) == data
        picked = config["federation"]["sampler"]["fraction"] * partition["clients"]
        assert (config["rounds"], picked) == (50, 10)
        side = (128, 64) if data == "tiny_imagenet" else (32, 32)
        assert (config["batch_size"], config["image"]["size"]) == side
        # A method's own example does not take the place of the table's protocol.
        client = config["method"]["client"]
        assert sum(client.get(key, 0) for key in ("local_epochs", "base_epochs", "head_epochs")) == 30


@pytest.mark.slow
def test_every_row_of_local_epochs_trains_as_many_epochs_before_and_after_the_warm_up():
    for _, _, _, config in planned("fadngs_5"):
        epochs = config["method"]["client"]["local_epochs"]
        assert (epochs * config["warmup"], epochs * config["rounds"]) == (100, 1100)


FEDVCK = {  # data set, side, channels, synthetic images over real ones (FedVCK appendix)
    "Path": ("pathmnist", 28, 3, 0.01),
    "OCT": ("octmnist", 28, 1, 0.01),
    "OrganS": ("organsmnist", 28, 1, 0.05),
    "OrganC": ("organcmnist", 224, 1, 0.05),
    "Pneumonia": ("pneumoniamnist", 224, 1, 0.05),
    "CIFAR-10": ("cifar10", 32, 3, 0.02),
    "STL-10": ("stl10", 32, 3, 0.05),
    "ImageNette": ("imagenette", 64, 3, 0.01),
}
PAGE_TABLES = page_tables()
FEDVCK_TABLES = [name for name in PAGE_TABLES if name.startswith("fedvck")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDVCK_TABLES)
def test_every_column_of_fedvck_is_what_its_label_says(name):
    for table, row, column, config in planned(name):
        short, _, setting = column.label.partition(", ")
        data, side, channels, share = FEDVCK[short]
        limited = (
            name in ("fedvck_3", "fedvck_6", "fedvck_11", "fedvck_12", "fedvck_13") or setting == "10 rounds"
        )
        setting = "Dir 0.05" if table.attack else setting
        if table.rows_are == "p":
            share = float(row.label.removesuffix(" %")) / 100
        assert (config["rounds"], config["partition"]["clients"]) == (10 if limited else 100, 10)
        assert config["partition"]["alpha"] == (0.02 if setting == "Dir 0.02" else 0.05)
        assert data in (config["data"].get("name"), reader(config))
        sides = {config["image"]["size"], config["data"].get("size", side)}
        assert (sides, config["image"]["channels"]) == ({side}, channels)
        network = config["encoder"]["_target_"].rpartition(".")[2]
        assert network == ("ResNetCifar" if side == 224 else "ConvNet")
        assert config["condensation"]["share"] == FEDVCK[short][3]
        client = config["method"]["client"]
        if config["method"]["name"] in ("feddm", "fedvck", "fedvck_released"):
            assert (client["share"], client["min_synthetic"]) == (share, 5)
            assert (client["init"] == "real") == (row.label == "FedDM (real start)")
        else:
            assert client["local_epochs"] == 10


@pytest.mark.parametrize("name", PAGE_TABLES)
def test_paper_numbers_have_the_tables_form(name):
    table = read_table(name)
    labels = [row.label.casefold() for row in (*table.rows, *table.beyond)]
    assert len(labels) == len(set(labels))
    assert not any("," in label for label in labels)  # they separate rows on the command line
    for row in table.rows:
        known = {label if isinstance(c, Setting) else c for label, c in table.columns.items()}
        assert row.paper.keys() <= known
        for numbers in row.paper.values():
            assert len(numbers) == len(table.metrics)
            assert all(
                0 <= part < 100
                for n in numbers
                if n is not None
                for part in (n if isinstance(n, list) else [n])
            )


def test_the_papers_tables_agree_with_each_other():
    """FedDyMem with all its parts stands in three tables, with one local epoch in a fourth place."""
    detection, localisation, ablation, epochs = (
        read_table(name) for name in ("feddymem_1", "feddymem_2", "feddymem_3", "feddymem_fig8")
    )
    assert [row.label for row in detection.rows] == [row.label for row in localisation.rows]
    full, whole = detection.rows[-1].paper, ablation.rows[-1].paper
    assert {data: numbers[0][0] for data, numbers in full.items()} == {
        data: n[0] for data, n in whole.items()
    }
    located = localisation.rows[-1].paper
    assert {data: n[0][0] for data, n in located.items()} == {data: n[1] for data, n in whole.items() if n[1]}
    assert all(numbers[0] == full[data][0][0] for data, numbers in epochs.rows[0].paper.items())


def test_fadngs_tables_agree_with_each_other():
    """FADngs without distillation stands in three tables, with it in three."""
    tables = {number: read_table(f"fadngs_{number}") for number in (1, 3, 4, 5, 6)}
    without, full = (row.paper["semantic_cifar10"] for row in tables[1].rows[-2:])
    assert tables[3].rows[-1].paper["semantic_cifar10"] == without
    assert tables[4].rows[-1].paper["semantic_cifar10"] == without
    in_other_order = [*full[2:], *full[:2]]
    assert tables[5].rows[0].paper["semantic_cifar10"] == in_other_order
    assert tables[6].rows[-1].paper["semantic_cifar10"] == in_other_order


def test_gldp_tables_agree_with_each_other():
    """GLDP Table 2 and GLDP Table 3 print the same numbers; GLDP Table 4 prints A_glo of GLDP Table 2."""
    server, personal, ablation = (
        {row.label: row.paper for row in read_table(f"gldp_{number}").rows} for number in (2, 3, 4)
    )
    for label in ("GLDP-GP", "GLDP-LP"):
        assert server[label] == {column: personal[label][column] for column in server[label]}
    ten, hundred = ablation["full"]
    assert ablation["full"][ten][0] == server["GLDP-GP"][ten][0]
    assert ablation["full"][hundred][0] == server["GLDP-LP"][hundred][0]
    for column in (ten, hundred):
        assert ablation["neither"][column][0] == server["FedRep"][column][0]


def test_fedvck_tables_agree_with_each_other():
    """FedVCK and FedDM stand in the tables of all methods, in the ablation, and FedVCK with K = 5 once more."""
    long, short, ablation, negatives = (
        {row.label: row.paper for row in read_table(f"fedvck_{number}").rows} for number in (2, 3, 4, 13)
    )
    for label, part in (("FedDM", "without all"), ("FedVCK", "full")):
        for data in ("Path", "OrganS"):
            assert ablation[part][f"{data}, 10 rounds"] == short[label][f"{data}, Dir 0.05"]
            assert ablation[part][f"{data}, 100 rounds"] == long[label][f"{data}, Dir 0.05"]
    assert all(negatives["5"][data] == short["FedVCK"][f"{data}, Dir 0.05"] for data in ("Path", "OrganS"))


@pytest.mark.real_data
@pytest.mark.parametrize("name", [name for name in FEDVCK_TABLES if "fig" not in name])
def test_fedvck_s_numbers_are_those_of_the_paper_s_text(name):
    """Each row's numbers end one of the lines above the caption, in the order of the columns."""
    text = Path(os.environ.get("LIT_FEDAD_DATA", "missing")).parent / "papers" / "fedvck.txt"
    if not text.is_file():
        pytest.skip("the paper's text is not at hand")
    table = read_table(name)
    lines = text.read_text().splitlines()
    caption = f"{table.source.rpartition(', ')[2]}: "
    (end,) = [number for number, line in enumerate(lines) if line.startswith(caption)]
    printed = [line.split() for line in lines[end - 14 : end]]
    if name == "fedvck_13":  # the paper has its rows in columns
        rows = {column: [row.paper[column] for row in table.rows] for column in table.columns}
    else:
        rows = {row.label: [row.paper.get(column) for column in table.columns] for row in table.rows}
    # One half of the columns below the other; labels are formulas in it and in Table 4.
    if name == "fedvck_14":
        rows = {f"{label}{half}": n[4 * half :][:4] for label, n in rows.items() for half in (0, 1)}
    for label, numbers in rows.items():
        texts = [f"{number[0]:.2f}" if number else "OOM" for number in numbers]  # out of memory
        if table.attack:  # printed as a share, the last in per cent
            ((largest, mean, rate, *_),) = numbers
            texts = [f"{largest / 100:.3f}", f"{mean / 100:.3f}", f"{rate:.0f}%"]
        (line,) = [cells for cells in printed if cells[-len(texts) :] == texts]
        assert line[0] == label or name in ("fedvck_4", "fedvck_14")

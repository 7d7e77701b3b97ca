"""Tables of declared forms: what messages would hold, computed without any run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd

from lit_fedad.contracts import Free, MessageSpec, TensorSpec
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import Model, build_model
from lit_fedad.methods.parts.condensed_images import IMAGES
from lit_fedad.papers.paper import write_table
from lit_fedad.papers.plan import Column
from lit_fedad.report.console import Display
from lit_fedad.report.html import Grid, Line, Page, Section
from lit_fedad.report.tables import UNKNOWN, Row, Setting, Table

_MIB = 1024**2


def upload_mib(config: Config, setting: Setting) -> float:
    """Computes the size of what all clients send in a round, in MiB, without headers (FedVCK, Table 5).

    Condensed images are counted as `share` times the training images: that their number is rounded up in each class of
    a client, and has a minimum there, is ignored. Lists of classes are counted as if each client had all classes.

    Raises:
        UserError: If the sender chooses another size, which only a run can tell.
    """
    model, clients = _model(config, setting), config["partition"]["clients"]
    image = config["image"]
    share = config["method"]["client"].get("share", 0.0)
    sizes = {
        IMAGES: share * setting.images / clients,
        "classes": setting.classes,
        "channels": image["channels"],
        "height": image["size"],
        "width": image["size"],
    }
    tensors = chain.from_iterable(
        exchange.upload_spec(model.client).items() for exchange in model.method.exchanges.rounds
    )
    of_client = sum(_bytes(name, tensor, sizes, config["method"]["name"]) for name, tensor in tensors)
    return clients * of_client / _MIB


def messages(config: Config, setting: Setting) -> dict[str, str]:
    """Lists what crosses before round 1 and in a round, each way (FedVCK, Table 10)."""
    model = _model(config, setting)
    contents = {}
    for when, exchanges in (
        ("before round 1", model.method.exchanges.setup),
        ("a round", model.method.exchanges.rounds),
    ):
        for way in ("up", "down"):
            specs = [
                exchange.upload_spec(model.client) if way == "up" else exchange.broadcast_spec(model.client)
                for exchange in exchanges
            ]
            contents[f"{way}, {when}"] = ", ".join(_contents(specs, model)) or "-"
    return contents


def _model(config: Config, setting: Setting) -> Model:
    return build_model(config, [str(number) for number in range(setting.classes)])


def _bytes(name: str, tensor: TensorSpec, sizes: Mapping[str, float], method: str) -> float:
    lengths = []
    for size in tensor.shape:
        if isinstance(size, Free) and size.name not in sizes:
            raise UserError(f"method={method}: only a run can tell how many {size.name} of '{name}' are sent")
        lengths.append(sizes[size.name] if isinstance(size, Free) else size)
    return math.prod(lengths) * tensor.dtype.itemsize


def _contents(specs: Iterable[MessageSpec], model: Model) -> list[str]:
    """Names what messages hold; tensors of a module by the module's name."""
    weights = {name for name, _ in chain(model.task.named_parameters(), model.task.named_buffers())}
    names = ["weights" if name in weights else name.partition(".")[0] for spec in specs for name in spec]
    return list(dict.fromkeys(names))


_CAPTIONS = {
    "upload": "MiB that all clients send in a training round, by the declared forms of messages, without headers.",
    "messages": "Tensors by the declared forms of messages; weights are those of the task, with their buffers.",
}


def report_forms(
    name: str,
    table: Table,
    rows: Sequence[Row],
    columns: Sequence[Column],
    common: Sequence[str],
    out: Path,
    display: Display,
) -> list[Path]:
    """Writes a table of declared forms as Markdown and CSV, and prints it.

    Raises:
        UserError: For overrides that cannot be composed, naming row and column.
    """
    cells = [
        {heading: text for column in columns for heading, text in _cells(table, row, column, common).items()}
        for row in rows
    ]
    lines = [Line.of([row.label, *values.values()]) for row, values in zip(rows, cells, strict=True)]
    notes = [f"The paper's: {table.source}.", _CAPTIONS[table.cells], " ".join(table.note.split())]
    grid = Grid("", [table.rows_are, *cells[0]], lines, list(filter(None, notes)))
    files = [out / f"{name}.md", out / f"{name}.csv"]
    frame = pd.DataFrame([[cell.text for cell in line.cells] for line in lines], columns=list(grid.heads))
    write_table(Page(table.title, "", [Section("Declared forms", [grid])]), frame, *files)
    display.note(table.title)
    display.blocks([grid])
    display.where_next([("file", str(file)) for file in files])
    return files


def _cells(table: Table, row: Row, column: Column, common: Sequence[str]) -> dict[str, str]:
    """Returns the texts of a row's cells in a column, by heading."""
    setting = table.columns[column.label]
    assert isinstance(setting, Setting)  # a test checks it of all tables of declared forms
    try:
        config = compose(["data.root=DIR", *common, *column.overrides, *row.overrides])
        if table.cells == "messages":
            return messages(config, setting)
        cells = {column.label: f"{upload_mib(config, setting):.2f}"}
    except UserError as error:
        raise UserError(f"row {row.label}, column {column.label}: {error}") from error
    printed = row.paper.get(column.label)
    return {**cells, f"{column.label}, paper": f"{printed[0]:.2f}" if printed else UNKNOWN}

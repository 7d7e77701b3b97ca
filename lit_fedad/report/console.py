"""What an experiment says while it runs: progress, one line a round, a closing table.

Results go to standard output, warnings and errors to standard error. On a terminal there are colours (unless
NO_COLOR is set) and a live progress bar; in a file or a pipe there is the same text and nothing that moves.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

import lit_fedad
from lit_fedad.report.constant_predictions import constant_predictions

METRIC_TITLES = {
    "i_auroc": "I-AUROC", "p_auroc": "P-AUROC", "pro": "PRO", "aupr": "AUPR",
    "accuracy": "accuracy", "own_accuracy": "own accuracy", "balanced_accuracy": "balanced accuracy",
    "predicted_classes": "classes predicted",
    "auroc": "AUROC", "fe": "FE", "me": "ME",
    "fe_train": "FE train", "me_train": "ME train",
    "selection_accuracy": "A_sel", "global_accuracy": "A_glo", "local_accuracy": "A_loc",
    "incremental_accuracy": "A_inc", "forgetting": "forgetting",
}  # fmt: skip


def metric_title(name: str) -> str:
    """What a metric is called: its own title, or its family's and the anomaly set that it is about.

    Example:
        >>> metric_title("fe"), metric_title("fe_train_svhn"), metric_title("auroc_svhn")
        ('FE', 'FE train svhn', 'AUROC svhn')
    """
    if name in METRIC_TITLES:
        return METRIC_TITLES[name]
    family = _family(name)
    return name if family is None else f"{METRIC_TITLES[family]} {name.removeprefix(f'{family}_')}"


def _family(name: str) -> str | None:
    """The metric that this one is of a single anomaly set."""
    kin = [known for known in METRIC_TITLES if name.startswith(f"{known}_") and name not in METRIC_TITLES]
    return max(kin, key=len, default=None)


def _shown(names: Iterable[str]) -> list[str]:
    """What the closing tables list, once each: errors of single anomaly sets are left to the files."""
    return [
        name for name in dict.fromkeys(names) if _family(name) not in ("fe", "me", "fe_train", "me_train")
    ]


_LINE_WIDTH = 120  # columns of a round line at most
_LINE_INTERVAL = 15.0  # between two progress lines outside a terminal
# What a narrow round line gives up: the lesser a column, the higher its number; all else counts 0.
_LESSER = {"left": 1, "up": 2, "down": 3, "time": 4}


class Display:
    """Prints the progress and the results of one experiment.

    Args:
        quiet: Print nothing but warnings and errors.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._out = Console(quiet=quiet, highlight=False)
        self._err = Console(stderr=True, highlight=False)
        # Widest value of each column of the round lines so far: keeps the lines of a run aligned.
        self._columns: dict[str, int] = {}

    @contextmanager
    def progress(self, description: str) -> Iterator[Callable[[int, int], None]]:
        """Show how far a long step has come.

        On a terminal a bar that vanishes at its end; elsewhere a line at the start and then at most one every
        15 seconds. Steps do not nest.

        Args:
            description: What is being done.

        Yields:
            A function of the number of items done and the number of all items.
        """
        if self._out.quiet:
            yield lambda done, total: None
        elif self._out.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(compact=True),
            )
            # Redirected standard error stays in its file instead of appearing above the bar.
            bar = Progress(
                *columns,
                console=self._out,
                transient=True,
                redirect_stderr=self._err.is_terminal,
                expand=True,
            )
            with bar:
                task = bar.add_task(description, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
        else:
            self._print(f"{description} ...")
            yield self._progress_lines(description)

    def header(self, pairs: Mapping[str, str]) -> None:
        """Say what will run.

        Args:
            pairs: Name and value of each line: method, task, data, clients, backbone and weights, seed, ...
        """
        width = max(map(len, pairs), default=0)
        for name, value in pairs.items():
            self._print(Text.assemble((f"{name:<{width}}", "bold"), f"  {value}"))
        self._print("")

    def round_line(
        self,
        round: int,
        rounds: int,
        loss: float | None,
        metrics: Mapping[str, float],
        bytes_up: int,
        bytes_down: int,
        seconds: float,
        eta_s: float | None,
        notes: Sequence[str] = (),
        *,
        setup_rounds: int = 1,
        name: str | None = None,
    ) -> None:
        """Print one round as one line, aligned with those before it.

        A line is as wide as the terminal, at most 110 columns. Loss, metrics and notes come first; what room
        is left goes to the time left, the bytes up and down, and the time of the round. Columns only ever
        widen, and a metric that is measured in some rounds only keeps its place in the others.

        Args:
            round: Number of the round from 1; set-up rounds run from `1 - setup_rounds` to 0.
            rounds: Number of rounds without the set-up rounds.
            loss: Mean training loss; None if nothing was trained.
            metrics: Value of each metric; empty in rounds without evaluation.
            bytes_up: Bytes that all clients sent in this round.
            bytes_down: Bytes that all clients received in this round.
            seconds: How long the round took.
            eta_s: Seconds left in the run; None if unknown.
            notes: Remarks at the end of the line.
            setup_rounds: Number of set-up rounds.
            name: What to call a set-up round instead of its number.
        """
        digits = max(2, len(str(rounds)))
        label = f"round {round:>{digits}}/{rounds}"
        if round <= 0:
            label = (name or f"set-up {round + setup_rounds}/{setup_rounds}").ljust(len(label))

        values = {"loss": _loss(loss)}
        values |= {metric_title(metric): _metric(value) for metric, value in metrics.items()}
        values |= {"up": human_bytes(bytes_up), "down": human_bytes(bytes_down)}
        values |= {"time": human_seconds(seconds), "left": "" if eta_s is None else _clock(eta_s)}
        for column, value in values.items():
            self._columns[column] = max(len(value), self._columns.get(column, 0))
        cells = self._cells(values) | {f"note {index}": note for index, note in enumerate(notes)}

        room = min(_LINE_WIDTH, self._out.width) if self._out.is_terminal else _LINE_WIDTH
        room -= len(label)
        kept = set()
        for column in sorted(cells, key=lambda column: _LESSER.get(column, 0)):
            cost = len("  ") + len(cells[column])
            if cost <= room:
                room -= cost
                kept.add(column)
        rest = "  ".join(["", *(cell for column, cell in cells.items() if column in kept)]).rstrip()
        self._print(Text.assemble((label, "bold"), rest))

    def closing_table(self, result: Mapping[str, Any]) -> None:
        """Print the metrics of the first, the last and the best round.

        A star marks a round in which a client predicts a single class for every image.

        Args:
            result: `first`, `last` and `best`, each with the number of its `round` and a mapping for each
                metric, with `mean` and `worst` (over the clients) and `pooled` (all test images as one set),
                where None, NaN or a missing key means undefined; further `bytes_up`, `bytes_down` and
                `seconds_per_round`, one number an exchange.
        """
        stages = {head: result[head] for head in ("first", "last", "best")}
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        table.add_column("metric")
        for head, stage in stages.items():
            star = "*" if constant_predictions(stage) else ""
            table.add_column(f"{head} ({stage['round']}){star}", justify="right")
        table.add_column("worst client", justify="right")
        table.add_column("pooled", justify="right")
        for metric in _shown(key for stage in stages.values() for key in stage if key != "round"):
            cells = [stage.get(metric, {}).get("mean") for stage in stages.values()]
            cells += [result["last"].get(metric, {}).get(key) for key in ("worst", "pooled")]
            table.add_row(metric_title(metric), *(_metric(cell).strip() for cell in cells))
        up, down = human_bytes(sum(result["bytes_up"])), human_bytes(sum(result["bytes_down"]))
        self._print("")
        self._out.print(table)
        self._print("Means over clients by round; worst client and pooled test set of the last round.")
        for head, stage in stages.items():
            if constant := constant_predictions(stage):
                self._print(f"* {head}: {constant}.")
        self._print(f"up {up}  down {down}  in {human_seconds(sum(result['seconds_per_round']))}")

    def metrics_table(self, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of one round.

        Args:
            metrics: Each with `mean` and `worst` (over the clients) and `pooled` (all test images as one
                set), where None or NaN means undefined.
        """
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        table.add_column("metric")
        for head in ("mean", "worst client", "pooled"):
            table.add_column(head, justify="right")
        known = [metric for metric in METRIC_TITLES if metric in metrics]
        for metric in _shown([*known, *metrics]):
            values = metrics[metric]
            cells = [_metric(values[key]).strip() for key in ("mean", "worst", "pooled")]
            table.add_row(metric_title(metric), *cells)
        self._out.print(table)

    def table(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Print rows with the same headings, one line each however long; columns of numbers to the right.

        Args:
            rows: At least one; heading and text of each cell.
        """
        columns = {head: [head, *(row[head] for row in rows)] for head in rows[0]}
        padded = []
        for head, cells in columns.items():
            width = max(map(len, cells))
            right = all(row[head][:1].isdigit() for row in rows)
            padded.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
        heads, *lines = ["   ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
        self._print(Text(heads, "bold"))
        for line in lines:
            self._print(line)

    def where_next(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print commands and paths to copy: each whole, on a line of its own.

        Args:
            lines: Label, and command or path.
        """
        width = max((len(label) for label, _ in lines), default=0)
        self._print("")
        for label, value in lines:
            self._print(Text.assemble((f"{label:<{width}}", "bold"), f"  {value}"))

    def note(self, message: str) -> None:
        """Print a remark as one line.

        Args:
            message: What happened.
        """
        self._print(_one_line(message))

    def warn(self, message: str) -> None:
        """Print a warning as one line on standard error, also when quiet.

        Args:
            message: What is wrong and what to do.
        """
        self._complain("warning", "yellow", message)

    def error(self, message: str) -> None:
        """Print an error as one line on standard error, also when quiet.

        Args:
            message: What is wrong and what to do.
        """
        self._complain("error", "bold red", message)

    def _print(self, text: Text | str) -> None:
        """Print a line that rich neither wraps, crops nor reads as markup."""
        self._out.print(text, soft_wrap=True, markup=False, emoji=False)

    def _complain(self, kind: str, style: str, message: str) -> None:
        with self._err.capture() as line:
            self._err.print(Text.assemble((f"{kind}:", style), f" {_one_line(message)}"), soft_wrap=True)
        # Through sys.stderr, which a live bar replaces; a rich console would write past it, into the bar.
        sys.stderr.write(line.get())

    def _progress_lines(self, description: str) -> Callable[[int, int], None]:
        """A progress function that prints a line at most every 15 seconds."""
        start = printed = monotonic()

        def show(done: int, total: int) -> None:
            nonlocal printed
            now = monotonic()
            if now - printed >= _LINE_INTERVAL:
                printed = now
                left = f"  left {_clock((now - start) / done * (total - done))}" if done else ""
                self._print(f"{description}  {done}/{total}{left}")

        return show

    def _cells(self, values: Mapping[str, str]) -> dict[str, str]:
        """All columns seen so far, metrics in order of first appearance; those without a value stay blank."""
        metrics = [column for column in self._columns if column not in ("loss", *_LESSER)]
        cells = {}
        for column in ("loss", *metrics, "up", "down", "time", "left"):
            value, width = values.get(column, ""), self._columns[column]
            name = "" if column == "time" else f"{column} "
            if width:
                cells[column] = f"{name}{value:>{width}}" if value else " " * (len(name) + width)
        return cells


@contextmanager
def plain_warnings(display: Display, ignore: bool = False) -> Iterator[None]:
    """Show the library's own warnings as one clean line each, and keep other libraries' chatter away.

    Covers `warnings.warn` and `logging`. Of other libraries only logged errors come through. Enter it before
    Lightning is imported: Lightning takes handlers of its own where the root logger has none.

    Args:
        display: Prints the lines.
        ignore: Show no warnings at all, for processes beside the one that speaks.
    """
    package = Path(lit_fedad.__file__).parent

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not ignore and Path(filename).is_relative_to(package):
            display.warn(str(message))

    handler = _LogLines(display)
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.showwarning = show
        logging.root.addHandler(handler)
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(disabled)
            logging.root.removeHandler(handler)


class _LogLines(logging.Handler):
    """Hands the package's log records, and everyone's errors, to a display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.name.startswith(f"{lit_fedad.__name__}."):
            self.display.warn(record.getMessage())


def human_bytes(count: int) -> str:
    """Bytes in decimal units.

    Args:
        count: Number of bytes.

    Returns:
        Whole bytes, or two decimals of the unit that leaves less than 1,000.

    Examples:
        >>> human_bytes(999), human_bytes(22_478_848), human_bytes(999_999)
        ('999 B', '22.48 MB', '1.00 MB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if round(value, 2) < 1000:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} TB"


def human_seconds(seconds: float) -> str:
    """A duration, short and readable.

    Args:
        seconds: Duration in seconds.

    Returns:
        Seconds with one decimal below a minute, else minutes:seconds or hours:minutes:seconds.

    Examples:
        >>> human_seconds(1.84), human_seconds(75), human_seconds(7384)
        ('1.8 s', '1:15', '2:03:04')
    """
    return f"{seconds:.1f} s" if round(seconds, 1) < 60 else _clock(seconds)


def _clock(seconds: float) -> str:
    """The duration as minutes:seconds or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _one_line(message: str) -> str:
    return " ".join(message.splitlines())


def _metric(value: float | None) -> str:
    """Three decimals, or a dash of the same width where the value is undefined."""
    return f"{'-':>5}" if value is None or math.isnan(value) else f"{value:.3f}"


def _loss(value: float | None) -> str:
    """Six columns whatever the size of the loss, or a dash where there is none."""
    if value is None or math.isnan(value):
        return f"{'-':>6}"
    if value == 0 or 0.001 <= abs(value) < 10:
        return f"{value:6.4f}"
    return f"{value:6.4g}" if 10 <= abs(value) < 10_000 else f"{value:6.0e}"

"""Prints the output of a command: progress, one line a round, tables, warnings and errors.

Results go to standard output, warnings and errors to standard error. On a terminal there are colours (unless
NO_COLOR is set) and a live progress bar; in a file or a pipe there is the same text and nothing that moves.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.text import printable, redact, shell_word
from lit_fedad.report.closing import closing_rows, constant_predictions, in_words, looking_at_nothing
from lit_fedad.report.naming import (
    METRIC_TITLES,
    clock,
    human_bytes,
    human_seconds,
    metric_family,
    metric_text,
    metric_title,
    without_value,
)
from lit_fedad.report.round_lines import RoundLines

if TYPE_CHECKING:
    from lit_fedad.report.html import Block, Grid

_LINE_WIDTH = 120  # most columns of a round line
_LINE_INTERVAL = 15.0  # seconds between two progress lines outside a terminal
_MAX_MESSAGE = 2000  # characters of a warning or an error

_shown_warnings: ContextVar[set[str] | None] = ContextVar("said", default=None)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Prints each warning of the block once, on whichever display: the trials of a sweep repeat their warnings."""
    token = _shown_warnings.set(set())
    try:
        yield
    finally:
        _shown_warnings.reset(token)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Lets the command handle a pipe that its reader, such as head, has closed; rich would exit with an error."""
        raise BrokenPipeError


class Display:
    """Console output of one experiment."""

    def __init__(self, quiet: bool = False) -> None:
        self._out = _Console(quiet=quiet, highlight=False)
        self._err = _Console(stderr=True, highlight=False)
        self._round_lines = RoundLines()

    @contextmanager
    def progress(self, description: str, announced: bool = True) -> Iterator[Callable[[int, int], None]]:
        """Shows the progress of a long step.

        On a terminal this is a bar that vanishes at its end; elsewhere a line at the start and then at most one
        every 15 seconds. Steps do not nest.

        Args:
            description: Name of the step.
            announced: False to leave out the line at the start, for steps that are mostly short.

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
                task = bar.add_task(_clean(description), total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
        else:
            if announced:
                self._print(_clean(f"{description} ..."))
            yield self._progress_lines(_clean(description))

    def header(self, pairs: Mapping[str, str]) -> None:
        """Prints what will run, one line a fact."""
        self._labelled(list(pairs.items()))
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
        name: str,
    ) -> None:
        """Prints one round as one line, aligned with those before it.

        A line is as wide as the terminal, at most 120 columns. Loss and metrics come first; the remaining width
        goes to the time left, the bytes up and down, and the time of the round, in this order. Columns never
        become narrower, and a metric that is measured only in some rounds keeps its place in the others.

        Set-up exchanges have numbers up to 0, and are shown by their name. Bytes are those of all clients, times in
        seconds; `loss` and `eta_s`, until the end of the run, are None where they are not known.
        """
        label = f"round {round:>{max(2, len(str(rounds)))}}/{rounds}" if round > 0 else f"set-up {name}"
        values = {metric_title(metric): f"{metric_text(value):>5}" for metric, value in metrics.items()}
        values |= {"up": human_bytes(bytes_up), "down": human_bytes(bytes_down)}
        values |= {"time": human_seconds(seconds), "left": "" if eta_s is None else clock(eta_s)}
        room = min(_LINE_WIDTH, self._out.width) if self._out.is_terminal else _LINE_WIDTH
        self._print(Text.assemble(*self._round_lines.add(label, loss, values, room)))

    def closing_table(self, result: Mapping[str, Any]) -> None:
        """Prints up to four metrics of the last round, each with an explanation, and what the detector finds."""
        self._print("")
        self.table(closing_rows(result))
        lines = [*in_words(result), without_value(result["last"]), looking_at_nothing(result)]
        lines.append(constant_predictions(result["last"], ClientNames.of(result)))
        for line in filter(None, lines):
            self._print(line)
        up, down = human_bytes(sum(result["bytes_up"])), sum(result["bytes_down"])
        received = (
            f" and received {human_bytes(down)}" if down else ""
        )  # some receive the finished model alone
        seconds = human_seconds(sum(result["seconds_per_round"]))
        self._print(f"clients sent {up}{received} in {seconds} without evaluation")

    def metrics_table(self, metrics: Mapping[str, Any]) -> None:
        """Prints the metrics of one round.

        Args:
            metrics: Each with `mean` and `worst` (over the clients), `pooled` (all test images as one set) and, where
                products are known, `per_product` and `product_mean`, where None or NaN means undefined.
        """
        columns = {"mean": "mean", "worst client": "worst", "pooled": "pooled"}
        if any("product_mean" in values for values in metrics.values()):
            columns["mean of products"] = "product_mean"
        known = [metric for metric in METRIC_TITLES if metric in metrics]
        # Errors of single anomaly sets are only in the files.
        errors = ("fe", "me", "fe_calibrated", "me_calibrated")
        listed = [name for name in dict.fromkeys([*known, *metrics]) if metric_family(name) not in errors]
        rows = []
        for name in listed:
            cells = {head: metric_text(metrics[name].get(key)) for head, key in columns.items()}
            rows.append({"metric": metric_title(name), **cells})
        self.table(rows)
        if lacking := without_value(metrics):
            self._print(lacking)

    def table(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Prints a table, one line a row however long, and nothing without rows; numbers are aligned to the right."""
        if not rows:
            return
        columns = {head: [_clean(head), *(_clean(row[head]) for row in rows)] for head in rows[0]}
        padded = []
        for head, cells in columns.items():
            width = max(map(len, cells))
            right = all(row[head][:1].isdigit() or row[head] == "-" for row in rows)
            padded.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
        heads, *lines = ["   ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
        self._print(Text(heads, "bold"))
        for line in lines:
            self._print(line)

    def blocks(self, blocks: Iterable[Block]) -> None:
        """Prints tables and prose; a table wider than the terminal in parts, each with its columns of text."""
        from lit_fedad.report.html import Grid, Prose

        for block in blocks:
            if isinstance(block, Grid):
                self._print("")
                if block.title:
                    self.note(block.title)
                for columns in _column_groups(block, shutil.get_terminal_size((_LINE_WIDTH, 0)).columns):
                    self.table(
                        [{block.heads[i]: line.cells[i].text for i in columns} for line in block.lines]
                    )
            for line in (
                block.notes if isinstance(block, Grid) else block.lines if isinstance(block, Prose) else ()
            ):
                self.note(line)

    def where_next(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints commands and paths to copy, each whole on a line of its own."""
        self._print("")
        self._labelled(lines)

    def note(self, message: str) -> None:
        """Prints a remark as one line."""
        self._print(_clean(message))

    def warn(self, message: str) -> None:
        """Prints a warning as one line on standard error, also when quiet."""
        shown = _shown_warnings.get()
        if shown is not None:
            if message in shown:
                return
            shown.add(message)
        self._print_error_line("warning", "yellow", message)

    def unsent(self, records: int, run: Path) -> None:
        """Warns of tracking records that wait in a run's folder, if there are any."""
        if records:
            self.warn(
                f"{records} tracking records are kept; send them: lit-fedad sync {shell_word(f'run={run}')}"
            )

    def error(self, message: str) -> None:
        """Prints an error as one line on standard error, also when quiet."""
        self._print_error_line("error", "bold red", message)

    def _print(self, text: Text | str) -> None:
        """Prints a line that rich neither wraps, crops nor reads as markup."""
        self._out.print(text, soft_wrap=True, markup=False, emoji=False)

    def _labelled(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints values beside their labels, which are bold and equally wide."""
        width = max((len(label) for label, _ in lines), default=0)
        for label, value in lines:
            self._print(Text.assemble((f"{label:<{width}}", "bold"), f"  {_clean(value)}"))

    def _print_error_line(self, kind: str, style: str, message: str) -> None:
        text = _clean(message)
        if len(text) > _MAX_MESSAGE:  # a file may have a name of any length
            text = f"{text[:_MAX_MESSAGE]}..."
        with self._err.capture() as line:
            self._err.print(Text.assemble((f"{kind}:", style), f" {text}"), soft_wrap=True)
        # Through sys.stderr, which a live bar replaces; a rich console would write past it, into the bar.
        sys.stderr.write(line.get())

    def _progress_lines(self, description: str) -> Callable[[int, int], None]:
        """Returns a progress function that prints a line at most every 15 seconds."""
        start = printed = monotonic()

        def show(done: int, total: int) -> None:
            nonlocal printed
            now = monotonic()
            if now - printed >= _LINE_INTERVAL:
                printed = now
                left = f"  left {clock((now - start) / done * (total - done))}" if done else ""
                self._print(f"{description}  {done}/{total}{left}")

        return show


def _column_groups(grid: Grid, width: int) -> list[list[int]]:
    """Divides the columns of numbers into parts that, with the columns of text, are at most ``width`` wide."""
    cells = zip(grid.heads, *([cell.text for cell in line.cells] for line in grid.lines), strict=True)
    widths = [max(map(len, column)) + 3 for column in cells]
    parts = [list(range(grid.texts))]
    for column in range(grid.texts, len(widths)):
        if len(parts[-1]) > grid.texts and sum(widths[i] for i in (*parts[-1], column)) - 3 > width:
            parts.append(list(range(grid.texts)))
        parts[-1].append(column)
    return parts


def _clean(message: str) -> str:
    """Writes text from elsewhere as one line, without passwords and without control characters of a terminal."""
    return printable(redact(" ".join(message.splitlines())))

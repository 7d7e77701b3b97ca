"""Prints what the library warns of and logs as single lines on a display."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lit_fedad
from lit_fedad.report.console import Display


@contextmanager
def plain_warnings(display: Display, ignore: bool = False) -> Iterator[None]:
    """Prints the library's own warnings as one line each, and suppresses those of other libraries.

    Covers `warnings.warn` and `logging`. Of other libraries only logged errors are printed. Of two such blocks, one
    within the other, the inner one prints. Enter it before Lightning is imported: Lightning adds its own handlers if
    the root logger has none.
    """
    package = Path(lit_fedad.__file__).parent

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        if not ignore and Path(filename).is_relative_to(package):
            display.warn(str(message))

    handler = _LogLines(display)
    outer = [other for other in logging.root.handlers if isinstance(other, _LogLines)]
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.showwarning = show
        for other in outer:
            logging.root.removeHandler(other)
        logging.root.addHandler(handler)
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(disabled)
            logging.root.removeHandler(handler)
            for other in outer:
                logging.root.addHandler(other)


class _LogLines(logging.Handler):
    """Handler that prints the package's log records, and errors of all libraries, on a display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.name.startswith(f"{lit_fedad.__name__}."):
            self.display.warn(record.getMessage())

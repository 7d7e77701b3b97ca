"""What the scripts here have in common."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lit_fedad.core.errors import UserError
from lit_fedad.report.console import Display
from lit_fedad.report.plain_warnings import plain_warnings


@contextmanager
def script() -> Iterator[Display]:
    """Gives a script its display; bad input ends it in one line, with status 2."""
    display = Display()
    with plain_warnings(display):
        try:
            yield display
        except UserError as error:
            display.error(str(error))
            sys.exit(2)

"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from lit_fedad.guards.text import printable


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a table in Markdown, padded so that it can also be read as it is.

    Args:
        heads: Heading of each column.
        rows: Text of each cell, one a heading; ``|`` must be escaped.

    Returns:
        The lines of the table, without an end of line after the last.

    Raises:
        ValueError: A row has more or fewer cells than there are headings.

    Example:
        >>> print(markdown_table(["method", "Wafer"], [["FedAvg", "63.91"]]))
        | method | Wafer |
        |--------|-------|
        | FedAvg | 63.91 |
    """
    lines = [list(map(printable, line)) for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)

"""Model of a report, rendered as one HTML page that loads nothing, or as Markdown.

Nothing is computed here. All text is escaped by the templates; pictures are embedded in the HTML page.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lit_fedad.core.text import printable, printable_lines


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a table in Markdown, padded so that it can also be read as it is.

    In cells ``|`` must be escaped. The last line has no end.

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


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        url: Link to the source of the text.
        bold: Whether it stands out.
    """

    text: str
    url: str | None = None
    bold: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        part: Whether the line is a part of the one above, such as one seed of several.
    """

    cells: Sequence[Cell]
    part: bool = False

    @classmethod
    def of(cls, texts: Iterable[str], url: str | None = None, part: bool = False) -> Line:
        """Makes a line of texts with one source."""
        return cls([Cell(text, url) for text in texts], part)


@dataclass(frozen=True)
class Prose:
    """Paragraphs."""

    kind: ClassVar[str] = "prose"
    lines: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        texts: Number of columns from the left that hold text; the others hold numbers.
    """

    kind: ClassVar[str] = "grid"
    title: str
    heads: Sequence[str]
    lines: Sequence[Line]
    notes: Sequence[str] = ()
    texts: int = 1


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        alt: Description for readers who do not see it.
    """

    data: bytes
    form: Literal["svg", "webp"]
    alt: str
    caption: str
    url: str | None = None

    @property
    def inline(self) -> str:
        """The picture as a data URL."""
        mime = {"svg": "image/svg+xml", "webp": "image/webp"}[self.form]
        return f"data:{mime};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side, if there is room."""

    kind: ClassVar[str] = "gallery"
    pictures: Sequence[Picture]
    title: str = ""


Block = Prose | Grid | Gallery


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """Anchor of the section, for links to it."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        summary: One line under the title.
        sections: Its parts, with different titles.
    """

    title: str
    summary: str
    sections: Sequence[Section]


def render_html(page: Page) -> str:
    """Renders a report as one HTML document that loads no other file.

    Example:
        >>> "<h1>1 &lt; 2</h1>" in render_html(Page("1 < 2", "", []))
        True
    """
    return templates(Path(__file__).parent).get_template("template.html").render(page=page)


def render_markdown(page: Page, folder: str) -> tuple[str, dict[str, bytes]]:
    r"""Renders a report in Markdown, with the files of its pictures.

    Example:
        >>> text, files = render_markdown(Page("1 < 2", "so it is", []), "pictures")
        >>> print(text)
        # 1 \< 2
        <BLANKLINE>
        so it is
        <BLANKLINE>
    """
    files: dict[str, bytes] = {}

    def place(picture: Picture, anchor: str) -> str:
        name = f"{anchor}-{len(files) + 1}.{picture.form}"
        files[name] = picture.data
        return quote(f"{folder}/{name}")

    text = templates(Path(__file__).parent).get_template("template.md").render(page=page, place=place)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", files


def templates(folder: Path, **filters: Callable[..., str]) -> Environment:
    """Opens a folder's templates, which refuse names without a value and print no character of a terminal.

    Args:
        folder: The folder.
        **filters: Filters of its templates, in addition to ``md`` and ``md_url`` for texts and addresses in Markdown.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        # HTML is escaped; Markdown has a filter of its own.
        autoescape=lambda name: name is not None and name.endswith(".html"),  # noqa: S701 - see above
        finalize=printable_lines,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # What would end a Markdown link is escaped in addresses.
    environment.filters |= {"md": escaped, "md_url": partial(quote, safe="/:#?&=%.,-_~+@"), **filters}
    return environment


def escaped(text: str) -> str:
    r"""Escapes a text for Markdown, on one line.

    Example:
        >>> print(escaped("<b> of a|b"))
        \<b\> of a\|b
    """
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))

"""A report as one HTML page that loads nothing, and the same in Markdown: both from one small model.

Nothing is computed here. All text is escaped by the templates; pictures travel inside the page.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: What it says.
        url: Where it comes from.
    """

    text: str
    url: str | None = None


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        cells: One a heading.
        part: Whether it is a part of the line above it: one seed of several.
    """

    cells: Sequence[Cell]
    part: bool = False


@dataclass(frozen=True)
class Prose:
    """Paragraphs."""

    kind: ClassVar[str] = "prose"
    lines: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: What it is about.
        heads: Headings.
        lines: Its lines.
        notes: What a reader should know.
        texts: Number of columns from the left that hold text; those after them hold numbers.
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
        data: Its file's content.
        form: Its file's form.
        alt: What is to be seen, for those who do not see it.
        caption: What stands beneath.
        url: The run that it is of.
    """

    data: bytes
    form: Literal["svg", "webp"]
    alt: str
    caption: str
    url: str | None = None

    @property
    def inline(self) -> str:
        """The picture as an address that holds it."""
        mime = {"svg": "image/svg+xml", "webp": "image/webp"}[self.form]
        return f"data:{mime};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side, where there is room.

    Attributes:
        pictures: At least one.
        title: What they are about.
    """

    kind: ClassVar[str] = "gallery"
    pictures: Sequence[Picture]
    title: str = ""


@dataclass(frozen=True)
class Commands:
    """Commands to copy, each with what it makes."""

    kind: ClassVar[str] = "commands"
    pairs: Sequence[tuple[str, str]]


Block = Prose | Grid | Gallery | Commands


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading.

    Attributes:
        title: The heading.
        blocks: What stands under it.
    """

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """What links point to."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        title: Its title.
        summary: One line under it.
        sections: Its parts; titles differ.
    """

    title: str
    summary: str
    sections: Sequence[Section]


def render_html(page: Page) -> str:
    """The page as one HTML document that loads nothing from anywhere.

    Example:
        >>> "<h1>1 &lt; 2</h1>" in render_html(Page("1 < 2", "", []))
        True
    """
    return _templates().get_template("template.html").render(page=page)


def render_markdown(page: Page, folder: str) -> tuple[str, dict[str, bytes]]:
    r"""The page in Markdown, and the files of its pictures.

    Args:
        page: The report.
        folder: Name of the folder for pictures, beside the Markdown file.

    Returns:
        The text, and contents by file name.

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

    text = _templates().get_template("template.md").render(page=page, place=place)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", files


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": _escaped, "md_url": _plain_url}
    return environment


def _escaped(text: str) -> str:
    """Text that Markdown takes as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def _plain_url(url: str) -> str:
    """An address without characters that would end a Markdown link."""
    return quote(url, safe="/:#?&=%.,-_~+@")

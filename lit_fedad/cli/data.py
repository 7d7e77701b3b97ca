"""The ``data`` command: lists the data configurations, checks a download, and tells how images are laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.core.options import split
from lit_fedad.data.auto import recognise
from lit_fedad.data.cards import CARDS, Counts
from lit_fedad.data.check import Problem, check, count
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.strategies import even_split
from lit_fedad.report.console import Display

_SHOWN = 20  # problems printed one by one
_PAGE = "image.page"


def list_data(display: Display) -> None:
    """Prints each data configuration with its title, task, licences and addresses."""
    rows = []
    for name in choices("data"):
        row = {"data": name, "title": "your own images", "for": "", "licence": "", "from": ""}
        if card := CARDS.get(name):
            row |= {"title": card.title, "for": card.kind}
            row["licence"] = ", ".join(dict.fromkeys(source.licence for source in card.sources))
            row["from"] = ", ".join(dict.fromkeys(source.address for source in card.sources))
        rows.append(row)
    display.table(rows)


def init_data(overrides: Sequence[str], display: Display) -> None:
    """Prints how the images of a folder are laid out, their counts, and the command that reads them.

    Args:
        overrides: The folder alone, with or without ``root=`` before it.
        display: Prints the tables.

    Raises:
        UserError: No folder is given, no layout is recognised, or its reader refuses the files.
    """
    given = [override.removeprefix("root=") for override in overrides]
    if len(given) != 1 or not given[0]:
        raise UserError("data init takes one folder: data init DIR")
    folder = expand_home(given[0])
    layout = recognise(folder)
    images = layout.read()
    # The default partition deals products to clients unevenly, which does not work for one product or few images.
    few = len(images.categories) == 1 or len(images.train) < 100
    partition = f" {even_split(len(images.train))}" if few else ""
    display.note(f"{folder}: {layout.seen}")
    display.table(_products(images))
    # This method holds back none of few images to set thresholds.
    display.where_next(
        [
            ("train", f"lit-fedad train method=federated_bank {layout.command}{partition}"),
            ("check", "lit-fedad data check " + layout.command.removeprefix("data=")),
        ]
    )


def check_data(overrides: Sequence[str], display: Display) -> None:
    """Reads every file of a download, and prints broken images, wrong masks, leaks, what is missing, and its card.

    Sets that hold arrays instead of files are only counted: building them has read them completely.

    Args:
        overrides: The data's name, and values of its keys.
        display: Prints tables and problems.

    Raises:
        UserError: No data are named, the set cannot be built, or something is wrong with it.
    """
    name, *others = overrides or [""]
    if not name or "=" in name:
        raise UserError("data check takes the name of data first: data check NAME root=DIR")
    given = dict(split(word.removeprefix("data.")) for word in others)
    words = [f"{key if key == _PAGE else f'data.{key}'}={value}" for key, value in given.items()]
    config = compose([f"data={name}", *words])
    images = build(config["data"], "data")
    card = CARDS.get(name)
    problems: list[Problem] = []
    if isinstance(images, ImageSet):
        # Any other key may change which images belong to the set.
        official = card.counts if card and given.keys() <= {"root", "products", _PAGE} else {}
        with display.progress("Files") as progress:
            problems = check(images, official, progress, config["image"]["page"])
        problems_of = Counter(problem.category for problem in problems)
        rows = _products(images, official)
        display.table([{**row, "problems": str(problems_of[row["product"]])} for row in rows])
    else:
        display.table(_classes(images))
    for problem in problems[:_SHOWN]:
        display.note(problem.message)
    if len(problems) > _SHOWN:
        display.note(f"... and {len(problems) - _SHOWN} more problems")
    for source in card.sources if card else ():
        display.where_next(
            [
                ("set", source.title),
                ("from", source.address),
                ("licence", source.licence),
                ("paper", source.paper),
                *([("layout", card.layout)] if card and card.layout else []),
            ]
        )
    if problems:
        number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems, first"
        raise UserError(f"{name}: {number}: {problems[0].message}")


def _products(images: ImageSet, official: Mapping[str, Counts] | None = None) -> list[dict[str, str]]:
    """Counts images and masks by product as rows of a table, beside the official numbers of images."""
    masks = Counter(sample.category for sample in images.test if sample.mask is not None)
    rows = []
    for product, counts in count(images).items():
        cells = [str(number) for number in counts]
        if official and product in official:
            cells = [f"{cell} of {number}" for cell, number in zip(cells, official[product], strict=True)]
        row = dict(zip(("train", "test good", "test anomalous"), cells, strict=True))
        rows.append({"product": product, **row, "with mask": str(masks[product])})
    return rows


def _classes(images: Any) -> list[dict[str, str]]:
    train, test = (Counter(item.category for item in part) for part in (images.train, images.test))
    return [{"class": name, "train": str(train[name]), "test": str(test[name])} for name in images.categories]

"""docs/papers.md lists every table and figure of the four papers, once, and what it names exists."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from lit_fedad.comparison.plan import table_names

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
ROMAN = ("I", "II", "III", "IV", "V", "VI")
# Counted in the papers.
ITEMS = {
    "FedDyMem": (ROMAN[:3], 9),
    "FADngs": (ROMAN, 9),
    "GLDP": (tuple(map(str, range(1, 5))), 4),
    "FedVCK": (tuple(map(str, range(1, 15))), 5),
}
TEXTS = {"FedDyMem": "feddymem", "FADngs": "fadngs", "GLDP": "gldp_sthfl", "FedVCK": "fedvck"}


def lines() -> list[list[str]]:
    """Paper, item, where it is and remark."""
    rows = [line.strip("|\n").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def listed() -> Counter:
    """Pairs of paper and item; a range of figures is each of them."""
    found: Counter = Counter()
    for paper, item, *_ in lines():
        kind, _, numbers = item.partition(" ")
        first, _, last = numbers.replace("Fig. ", "").partition(" to ")
        every = [first] if not last else list(map(str, range(int(first), int(last) + 1)))
        found.update((paper, kind, number) for number in every)
    return found


def test_every_table_and_figure_is_listed_once():
    expected = {
        (paper, kind, number)
        for paper, (tables, figures) in ITEMS.items()
        for kind, numbers in (("Table", tables), ("Fig.", map(str, range(1, figures + 1))))
        for number in numbers
    }
    assert listed() == Counter(expected)


def test_what_is_not_there_says_why():
    assert all(remark for _, _, where, remark in lines() if where == "-")


def test_every_table_of_a_paper_s_number_is_named_at_its_item():
    """``fedvck_14`` at FedVCK's Table 14; ``gldp_frozen`` belongs to no table of a paper."""
    named = {}
    for paper, item, where, _ in lines():
        for name in re.findall(r"TABLE=(\w+)`", where):
            assert name in table_names(), name
            named.setdefault(name, []).append((paper, item))
    for name in table_names():
        paper, _, part = name.partition("_")
        if part == "frozen":
            continue
        number = part.removeprefix("fig")
        items = [(p.lower(), item) for p, item in named.get(name, [])]
        wanted = {f"Fig. {number}"} if part.startswith("fig") else {f"Table {number}"}
        if not part.startswith("fig") and paper in ("feddymem", "fadngs"):
            wanted = {f"Table {ROMAN[int(number) - 1]}"}
        assert any(p == paper and item in wanted for p, item in items), name


@pytest.mark.real_data
@pytest.mark.parametrize("paper", ITEMS)
def test_the_papers_have_no_others(paper):
    """Captions in the papers' texts."""
    file = Path(os.environ.get("LIT_FEDAD_DATA", "missing")).parent / "papers" / f"{TEXTS[paper]}.txt"
    if not file.is_file():
        pytest.skip("the paper's text is not at hand")
    text = file.read_text()
    tables = set(re.findall(r"^(?:TABLE|Table) ([IVX]+|\d+)(?:$|:)", text, re.M))
    figures = set(re.findall(r"^(?:Fig\.|Figure) (\d+)[.:] ?", text, re.M))
    assert tables == set(ITEMS[paper][0])
    assert figures == {str(number) for number in range(1, ITEMS[paper][1] + 1)}

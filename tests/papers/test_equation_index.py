"""Every equation of the four papers is found by name, ``FedDyMem Eq. 12``, where it is implemented."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import lit_fedad

PACKAGE = Path(lit_fedad.__file__).parent
MENTION = re.compile(r"(\w+) Eq\. (\d+)")

IMPLEMENTED = {
    "FedDyMem": {4, *range(8, 17)},
    "FADngs": {*range(1, 14), *range(17, 20)},
    "FedVCK": {*range(2, 10), *range(11, 17)},
    "GLDP": {*range(3, 14)},
}

LAST = {"FedDyMem": 21, "FADngs": 19, "FedVCK": 16, "GLDP": 13}


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def mentions() -> dict[str, dict[int, set[str]]]:
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, text in texts().items():
        for paper, number in MENTION.findall(text):
            found[paper][int(number)].add(path.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("paper", IMPLEMENTED)
def test_each_implemented_equation_is_found_by_its_number(paper):
    assert IMPLEMENTED[paper] <= mentions()[paper].keys()


@pytest.mark.parametrize("paper", IMPLEMENTED)
def test_every_mention_is_of_a_number_that_the_paper_has(paper):
    assert mentions()[paper].keys() <= set(range(1, LAST[paper] + 1))


def test_a_number_stands_behind_its_papers_name_alone():
    """Neither ``Eq. 12`` without a paper, nor ``Eqs. 2-9``, in which no search finds 5."""
    papers = (*IMPLEMENTED, "FedNova", "Geiping", "PaDiM", "RD4AD", "SimpleNet")
    for path, text in texts().items():
        for line in text.splitlines() if "Eq" in text else ():
            assert not re.search(r"Eqs\.|Eq\. \d+ ?(-|to|and|,) ?\d", line), f"{path}: {line.strip()}"
            for found in re.finditer(r"(\w+)?,? ?Eq\. \d", line):
                assert found[1] in papers, f"{path}: {line.strip()}"

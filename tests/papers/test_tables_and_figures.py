"""The catalogue lists every table and figure of the four papers once; each is made, or says why it is not."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from lit_fedad.cli import main as cli
from lit_fedad.core.errors import UserError
from lit_fedad.papers.plan import items, listing, read_table, table_names

ROMAN = ("I", "II", "III", "IV", "V", "VI")
# Counted in the papers.
COUNTED = {
    "FedDyMem": (ROMAN[:3], 9),
    "FADngs": (ROMAN, 9),
    "GLDP": (tuple(map(str, range(1, 5))), 4),
    "FedVCK": (tuple(map(str, range(1, 15))), 5),
}
PARTS = {("FedVCK", "1"): ("(a)", "(b)")}  # figures whose parts are items of their own
TEXTS = {"FedDyMem": "feddymem", "FADngs": "fadngs", "GLDP": "gldp_sthfl", "FedVCK": "fedvck"}


def test_every_table_and_figure_is_listed_once():
    expected = Counter(
        (paper, " ".join([kind, number, part]).strip())
        for paper, (tables, figures) in COUNTED.items()
        for kind, numbers in (("Table", tables), ("Fig.", map(str, range(1, figures + 1))))
        for number in numbers
        for part in (PARTS.get((paper, number), ("",)) if kind == "Fig." else ("",))
    )
    assert Counter((item.paper, item.printed) for item in items()) == expected


def test_what_report_offers_is_what_the_catalogue_says():
    made = [item.name for item in items() if not item.reason]
    own = ["detection", "gldp_frozen"]  # tables of this library
    assert Counter([*made, *own]) == Counter(table_names())


def test_a_table_s_source_names_its_item():
    """Each description in ``conf/table`` says which table or figure of the paper it is."""
    for item in items():
        if not item.reason:
            source = read_table(item.name).source
            assert re.search(rf"{re.escape(item.printed)}(?!\w)", source), item.name


@pytest.mark.parametrize("item", [item for item in items() if item.reason], ids=lambda item: item.name)
def test_what_is_not_made_says_why(item):
    with pytest.raises(UserError, match=re.escape(item.reason)):
        read_table(item.name)


def test_the_command_prints_the_catalogue(capsys):
    assert cli.main(["report", "table=list"]) == 0
    printed = capsys.readouterr().out
    assert all(line["made by"] in printed for line in listing())
    assert "table=detection" in printed


@pytest.mark.real_data
@pytest.mark.parametrize("paper", COUNTED)
def test_the_papers_have_no_others(paper):
    """Captions in the papers' texts."""
    file = Path(os.environ.get("LIT_FEDAD_DATA", "missing")).parent / "papers" / f"{TEXTS[paper]}.txt"
    if not file.is_file():
        pytest.skip("the paper's text is not at hand")
    text = file.read_text()
    tables = set(re.findall(r"^(?:TABLE|Table) ([IVX]+|\d+)(?:$|:)", text, re.M))
    figures = set(re.findall(r"^(?:Fig\.|Figure) (\d+)[.:] ?", text, re.M))
    assert tables == set(COUNTED[paper][0])
    assert figures == {str(number) for number in range(1, COUNTED[paper][1] + 1)}

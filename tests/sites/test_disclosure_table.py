"""The table of docs/sites.md: what every method discloses by exchange, and what the default policy says to it."""

import re
from pathlib import Path

import pytest

from lit_fedad.contracts.disclosure import Kind
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.sites.offer import taken_by
from lit_fedad.sites.overrides import compose_overrides
from lit_fedad.sites.settings import Policy

PAGE = Path(__file__).parents[2] / "docs" / "sites.md"
SMALL = ["backbone=test_resnet", "backbone.weights=random", "image.size=64"]


def row_of(method):
    """Returns exchanges with their kinds, and what the default policy says where products have many images."""
    config = compose_overrides([f"method={method}", *SMALL])
    try:
        model = build_model(config, ("a", "b", "c"))
    except UserError:  # it works with another task
        config = compose_overrides([f"method={method}", "task=autoencoder", *SMALL])
        model = build_model(config, ())
    said, policy, answers = dict[str, list[str]](), Policy(), set()
    for part in taken_by(model.method.exchanges, model.client, config, smallest=1000):
        said.setdefault(part.exchange, []).append(part.disclosed.kind.words)
        allowed = policy.allows(part.disclosed, 1000)
        answers.add("refused" if policy.needs_more(part.disclosed) else "allowed" if allowed else "approval")
    told = "; ".join(f"{name}: {', '.join(dict.fromkeys(kinds))}" for name, kinds in said.items())
    return told or "nothing", next((a for a in ("refused", "approval", "allowed") if a in answers), "allowed")


def table():
    """Reads the rows of the page by method."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| (`\w+`(?:, `\w+`)*) \| (.+) \| (allowed|approval|refused) \|", line):
            found |= dict.fromkeys(re.findall(r"\w+", match[1]), (match[2], match[3]))
    return found


def test_the_table_has_every_method_and_no_other():
    assert set(table()) == set(choices("method"))


@pytest.mark.slow
@pytest.mark.parametrize("method", choices("method"))
def test_a_row_says_what_the_code_declares(method):
    assert table().get(method) == row_of(method)  # which says the row that a new method needs


def test_kinds_of_the_page_are_those_of_the_code():
    page = PAGE.read_text()
    assert all(f"`{kind.value}`" in page for kind in Kind)

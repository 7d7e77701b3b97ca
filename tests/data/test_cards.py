from urllib.parse import urlsplit

import pytest

from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices
from lit_fedad.data.cards import CARDS, Counts


@pytest.mark.parametrize("name", CARDS)
def test_cards_are_complete(name):
    card = CARDS[name]
    assert card.title
    assert card.sources
    for source in card.sources:
        assert all((source.title, source.address, source.licence, source.paper))
        assert urlsplit(source.address).scheme in (
            ("",) if name in ("textures", "motifs", "motif_classes") else ("http", "https")
        )
    for counts in card.counts.values():
        assert min(counts) > 0


@pytest.mark.parametrize("name", ["mvtec_textures", "mpdd"])
def test_official_sizes_are_those_of_the_configured_products(name):
    section = compose([f"data={name}", "data.root=x"])["data"]
    assert list(CARDS[name].counts) == section["products"]


def test_only_configurations_for_images_of_ones_own_have_no_card():
    own = {"auto", "coco", "mvtec_mixture", "folders", "labelled_csv", "path_lists", "packed"}
    own |= {"semantic_cifar10_packed"}
    assert set(choices("data")) - set(CARDS) <= own


@pytest.mark.parametrize(
    ("name", "totals"),
    [
        ("mvtec", (3629, 467, 1258)),
        ("mvtec_textures", (1266, 133, 382)),
        ("mpdd", (888, 176, 282)),  # MPDD's published totals
        ("pcb", (3614, 402, 400)),  # normal: 1,004 + 1,001 + 1,006 + 1,005
        ("visa", (8659, 962, 1200)),  # normal: 9,621
        ("kolektor_sdd2", (2085, 894, 110)),
    ],
)
def test_official_sizes_add_up_to_the_published_totals(name, totals):
    assert Counts(*map(sum, zip(*CARDS[name].counts.values(), strict=True))) == totals

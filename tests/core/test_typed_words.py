"""Words of the command line: names are taken as they are typed."""

import pytest

from lit_fedad.core.config import compose

NAMES = [
    *(
        "my data (1)",
        "ü",
        "漢字",
        "~/data",
        "a=b",
        "a#b",
        "a&b",
        "a'b",
        'a"b',
        "[x]",
        "{y}",
        "a,b",
        "a\\b",
        "x\\'",
    ),
    *(
        "2024_11_25",
        "2024",
        "2024-11-25",
        "1e3",
        "007",
        "true",
        "nan",
        "a  b",
        " lead",
        "a*b",
        "100%",
        "$HOME",
        "-1",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_the_one_that_is_typed(name):
    assert compose(["data=mvtec_mixture", f"data.root={name}"])["data"]["root"] == name


@pytest.mark.parametrize(
    ("typed", "products"),
    [
        ("[10]", ["10"]),
        ("[1_0,007]", ["1_0", "007"]),
        ("[a b, c]", ["a b", "c"]),
        ("['a,b',c]", ["a,b", "c"]),
        ("10", "10"),
        ("null", None),
    ],
)
def test_products_are_names(typed, products):
    assert (
        compose(["data=mvtec_mixture", "data.root=x", f"data.products={typed}"])["data"]["products"]
        == products
    )


def test_quotes_and_null_mean_what_they_mean_elsewhere():
    config = compose(["data=mvtec_mixture", "data.root='a b'", "data.name=null", "out=''"])
    assert (config["data"]["root"], config["data"]["name"], config["out"]) == ("a b", None, "")

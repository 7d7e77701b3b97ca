"""Words of the command line: names are taken as they are typed."""

import math

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lit_fedad.core.config import compose
from lit_fedad.core.nested import value_at
from lit_fedad.core.typed_words import as_override_value

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


@pytest.mark.parametrize("key", ["experiment", "parent"])
@pytest.mark.parametrize("name", ["2024", "1e3", "true"])
def test_a_name_that_mlflow_knows_is_the_one_that_is_typed(key, name):
    assert compose([f"tracking.{key}={name}"])["tracking"][key] == name


@pytest.mark.parametrize(
    "value",
    [
        *(3, 0.5, 1e-20, math.inf, True, None, "", "null", r"a\b", 'a\\"b', "a\nb", "größe", "[a, b]"),
        *([1, [r"a\b", None]], [{"_target_": "a.b", "paths": ["x y"]}], {}),
    ],
)
def test_a_value_that_is_written_is_read_again(value):
    assert OverridesParser.create().parse_override(f"key={as_override_value(value)}").value() == value


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


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("method=federated_bank", "task.products"),
        ("partition=products_in_turn", "partition.order"),
        ("data=packed", "data.classes"),
    ],
)
def test_other_lists_of_products_and_classes_are_names_too(group, key):
    config = compose([group, f"{key}=[10,007]", "data.root=x", *["data.train=x"] * (group == "data=packed")])
    assert value_at(config, key) == ["10", "007"]


def test_quotes_and_null_mean_what_they_mean_elsewhere():
    config = compose(["data=mvtec_mixture", "data.root='a b'", "data.name=null", "out=''"])
    assert (config["data"]["root"], config["data"]["name"], config["out"]) == ("a b", None, "")

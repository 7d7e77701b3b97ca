"""YAML and JSON from anybody: the values of the usual readers, and an error for all else."""

import pytest
import yaml

from lit_fedad.core.config_groups import conf_folder
from lit_fedad.core.plain_values import plain_json, plain_yaml

DEEP = 20_000
NESTED = ["[" * DEEP, "[" * DEEP + "]" * DEEP, "{a: " * DEEP + "}" * DEEP, "- " * DEEP, "? " * DEEP]


def test_values_are_those_of_the_safe_loader():
    files = sorted(conf_folder().rglob("*.yaml"))
    assert len(files) > 100
    for file in files:
        assert plain_yaml(file.read_text()) == yaml.safe_load(file.read_text())


@pytest.mark.parametrize("content", NESTED, ids=lambda content: content[:3])
def test_deep_nesting_is_an_error_and_no_crash(content):
    with pytest.raises(yaml.YAMLError):
        plain_yaml(content)


@pytest.mark.parametrize("read", [plain_json, plain_yaml])
def test_more_levels_than_any_file_has_are_an_error(read):
    """Readers of configurations and results call themselves by level."""
    assert read("[" * 100 + "1" + "]" * 100)
    with pytest.raises((ValueError, yaml.YAMLError), match="nested too deeply"):
        read('{"a":' * 101 + "1" + "}" * 101)


@pytest.mark.parametrize(
    "content", ["a: *b", "a: &b [*b]", "!!python/name:os.getcwd", "1: 2", "a: .inf", "\0"]
)
def test_anything_but_plain_values_is_an_error(content):
    with pytest.raises(yaml.YAMLError):
        plain_yaml(content)

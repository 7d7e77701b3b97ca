"""Values from files of anybody, whose parts may refer to each other so often that no walk through them ends."""

import math
from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML without merge keys (``<<``), which no file of a run has: they multiply while they are read."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("merge keys (<<) are not read")
        super().flatten_mapping(node)


def stored_yaml(content: str) -> Any:
    """Reads YAML.

    Raises:
        yaml.YAMLError: If it is none, or its parts refer to each other again and again.
    """
    value = yaml.load(content, _PlainLoader)  # noqa: S506 (a safe loader)
    try:
        check_unfolded(value)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
    return value


def check_unfolded(value: Any) -> None:
    """Refuses nested lists and dictionaries that refer to each other so often that no walk through them ends.

    Raises:
        ValueError: If they do.
    """
    sizes: dict[int, float] = {}
    values = 0

    def count(part: Any) -> float:
        nonlocal values
        if not isinstance(part, (dict, list, tuple)):
            return 1
        if id(part) not in sizes:
            sizes[id(part)] = math.inf  # of one that holds itself
            inner = list(part.values()) if isinstance(part, dict) else part
            values += len(inner)
            sizes[id(part)] = 1 + sum(map(count, inner))
        return sizes[id(part)]

    if count(value) > 10 * values + 1000:
        raise ValueError("its parts refer to each other again and again")

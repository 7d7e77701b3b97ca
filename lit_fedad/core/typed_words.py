"""Quotes words of the command line, so that Hydra's grammar takes paths and names as they were typed."""

import json
import re
from collections.abc import Iterable, Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

_TEXTS = frozenset((
    "experiment", "folder", "group", "id_column", "images", "label_column", "labels", "mask_folder", "name", "out",
    "parent", "path", "root", "split", "split_csv", "start", "uri", "weights",
))  # fmt: skip
"""Last words of keys whose values are paths or names."""

_SECTIONS = frozenset({"backbone", "cache", "calibration", "data", "partition", "public", "root", "tracking"})
"""Sections of such keys; in others, as in ``method.client.group``, a key with the same last word may be a number."""

_LISTS = frozenset(
    {
        "annotations",
        "anomalous",
        "classes",
        "normal",
        "products",
        "test_anomalous",
        "test_normal",
        "train_normal",
    }
)
"""Last words of keys of ``data`` whose values are lists of names."""

_LISTS_ELSEWHERE = frozenset({"partition.order", "task.products"})
"""Other keys whose values are such lists."""

_ELEMENT = re.compile(r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]*?)\s*(?:,|$)""")


def as_typed(override: str) -> str:
    r"""Quotes the value of an override if it is a path or name, or if Hydra could not read it otherwise.

    Values that are quoted, empty, ``null`` or interpolated stay unchanged.

    Example:
        >>> as_typed("data.root=my data (1)"), as_typed("data.products=[10,1_0]"), as_typed("rounds=3")
        ("data.root='my data (1)'", "data.products=['10','1_0']", 'rounds=3')
    """
    key, equals, value = override.partition("=")
    if not equals or key.startswith("-") or needs_no_quotes(value):
        return override
    section, dot, _ = key.lstrip("+").partition(".")
    leaf = key.rpartition(".")[2]
    if (leaf in _LISTS and section == "data") or key.lstrip("+") in _LISTS_ELSEWHERE:
        if value.startswith("[") and value.endswith("]"):
            elements = [match[1] for match in _ELEMENT.finditer(value[1:-1]) if match[1]]
            if _read(override) == elements:
                return override
            return f"{key}=[{','.join(one if needs_no_quotes(one) else _quoted(one) for one in elements)}]"
        return override if _read(override) == value else f"{key}={_quoted(value)}"
    read = _read(override)
    if leaf in _TEXTS and (not dot or section in _SECTIONS):
        return override if read == value else f"{key}={_quoted(value)}"
    # A list or section that Hydra cannot read has a mistake: it is left for Hydra to refuse.
    return override if read is not None or value[0] in "[{" else f"{key}={_quoted(value)}"


def as_list(names: Iterable[str]) -> str:
    """Formats names as the value of a list in the ``data`` section, to be passed to `as_typed`.

    Example:
        >>> as_list(["good", "ok, but old"])
        "[good,'ok, but old']"
    """
    return f"[{','.join(map(as_text, names))}]"


def as_text(name: str) -> str:
    r"""Formats the name of a file or folder as a value for `as_typed`; quotes what would be read as something else.

    Example:
        >>> print(as_text("images"), as_text("null"), as_text("${x}"), as_text("???"))
        images 'null' '\${x}' ./???
    """
    if name == "???":  # a missing value to OmegaConf, quoted or not
        return "./???"
    if "," in name or name != name.strip() or needs_no_quotes(name):
        return _quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", name))  # with a backslash, it is no reference
    return name


def advice(override: str) -> str:
    """Returns the advice to quote an override, for Hydra and for the shell, so that it is taken as typed."""
    key, _, value = override.partition("=")
    return f'give "{key}={_quoted(value)}" to take it as typed'


def as_override_value(value: object) -> str:
    r"""Formats a value as in an override; in its quoted strings, a single backslash is a backslash.

    Raises:
        TypeError: If it is no number, string, list, section or None, or contains anything else.

    Example:
        >>> print(as_override_value({"paths": [r"C:\data", 'a "b"'], "rate": 0.5, "more": None}))
        {paths:["C:\data","a \"b\""],rate:0.5,more:null}
    """
    match value:
        case str():
            return QuotedString(value, Quote.double).with_quotes()
        case Mapping():
            return "{" + ",".join(f"{key}:{as_override_value(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(as_override_value, value)) + "]"
        case float():
            return repr(float(value))  # Hydra would read JSON's word for infinity as a string
    return json.dumps(value)


def needs_no_quotes(value: str) -> bool:
    """Returns whether a value needs no quotes, because it is quoted, empty, ``null`` or interpolated."""
    return value in ("", "null", "???") or value[0] in "'\"" or "${" in value


def _read(override: str) -> object:
    """Returns the value that Hydra reads in an override; None if Hydra cannot read it."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except (HydraException, ValueError):
        return None


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def given_keys(overrides: Iterable[str]) -> set[str]:
    """Returns the keys that overrides set."""
    return {override.lstrip("+").partition("=")[0] for override in overrides}

"""Words of the command line, taken as they are typed where Hydra's grammar would read something else in them."""

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
"""Sections in which they are: elsewhere, as in ``method.client.group``, the same word is a number."""

_LISTS = frozenset(
    {"annotations", "anomalous", "normal", "products", "test_anomalous", "test_normal", "train_normal"}
)
"""Last words of keys of ``data`` whose values are lists of names."""

_ELEMENT = re.compile(r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]*?)\s*(?:,|$)""")


def as_typed(override: str) -> str:
    r"""Quotes the value of an override where it is a name, or where it cannot be read otherwise.

    Values that are quoted, empty, ``null`` or interpolated stay as they are.

    Example:
        >>> as_typed("data.root=my data (1)"), as_typed("data.products=[10,1_0]"), as_typed("rounds=3")
        ("data.root='my data (1)'", "data.products=['10','1_0']", 'rounds=3')
    """
    key, equals, value = override.partition("=")
    if not equals or settled(value):
        return override
    section, dot, _ = key.lstrip("+").partition(".")
    leaf = key.rpartition(".")[2]
    if leaf in _LISTS and key.lstrip("+").startswith("data."):
        if value.startswith("[") and value.endswith("]"):
            elements = [match[1] for match in _ELEMENT.finditer(value[1:-1]) if match[1]]
            if _read(override) == elements:
                return override
            return f"{key}=[{','.join(one if settled(one) else _quoted(one) for one in elements)}]"
        return override if _read(override) == value else f"{key}={_quoted(value)}"
    read = _read(override)
    if leaf in _TEXTS and (not dot or section in _SECTIONS):
        return override if read == value else f"{key}={_quoted(value)}"
    # A list or section that is not closed is a mistake.
    return override if read is not None or value[0] in "[{" else f"{key}={_quoted(value)}"


def as_list(names: Iterable[str]) -> str:
    """Writes names as the value of a key of `data` that takes a list, for `as_typed`.

    Example:
        >>> as_list(["good", "ok, but old"])
        "[good,'ok, but old']"
    """
    named = (
        _quoted(name) if "," in name or name != name.strip() or settled(name) else name for name in names
    )
    return f"[{','.join(named)}]"


def advice(override: str) -> str:
    """Returns the form in which an override is taken as typed, in quotes for the shell."""
    key, _, value = override.partition("=")
    return f'give "{key}={_quoted(value)}" to take it as typed'


def written(value: object) -> str:
    r"""Writes a value as an override has it, in whose texts a backslash is one as it stands.

    Raises:
        TypeError: If it is no number, text, list, section or None, nor made of them.

    Example:
        >>> print(written({"paths": [r"C:\data", 'a "b"'], "rate": 0.5, "more": None}))
        {paths:["C:\data","a \"b\""],rate:0.5,more:null}
    """
    match value:
        case str():
            return QuotedString(value, Quote.double).with_quotes()
        case Mapping():
            return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(written, value)) + "]"
        case float():
            return repr(float(value))  # JSON's word for infinity would be a text
    return json.dumps(value)


def settled(value: str) -> bool:
    """Tells whether a value is read as it stands: it is quoted, empty, ``null`` or interpolated."""
    return value in ("", "null", "???") or value[0] in "'\"" or "${" in value


def _read(override: str) -> object:
    """What Hydra reads; None for nothing."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except (HydraException, ValueError):
        return None


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()

"""Cleans text that leaves the program, of passwords, control characters and spreadsheet formulas.

File names, addresses and messages of libraries come from others. Text for a terminal, a spreadsheet or a stored file
passes through this module.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

_MIN_PASSWORD = 3  # characters of a password to be searched for in a text: shorter ones may occur in any text

# User and password of an address. A password may contain slashes or @; the slashes before the user may be missing.
_USERS = re.compile(
    r"""(?xi)
    (?: (?P<scheme> [a-z][a-z0-9+.-]* :// ) [^\s/@:]* (?: : \S* )?
      | (?P<bare> [a-z][a-z0-9+.-]* : )? /? [^\s:/@='"(,]+ : (?! [/\\] | \*{3}@ ) \S*
    ) @
    """
)
_KEYS = re.compile(
    r"(?i)\b((?:password|passwd|pwd|token|secret|api_?key)=)[^\s&;,'\")]+?(?=[:.]?(?:[\s&;,'\")]|$))"
)
_PASSWORD = re.compile(r"(?i)^(?:[a-z][a-z0-9+.-]*:/{0,2})?[^\s:/@]*:(\S*)@")

# The beginning of a formula in a cell. Some spreadsheets end a cell at a semicolon or a tab, and some also accept the
# full-width forms of the signs.
_FORMULA = re.compile(r"(^|[;\t])(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")


def redact(text: str, *addresses: str | None) -> str:
    """Hides users and passwords of all addresses in a text, and values of keys such as ``token=``.

    Args:
        text: The text.
        *addresses: Addresses whose passwords are also hidden where they stand alone in the text.

    Example:
        >>> redact("http://me:word@host/api does not answer")
        'http://***@host/api does not answer'
        >>> redact("no port 'word@host'", "postgresql:me:word@host")
        "no port '***@host'"
    """
    if "@" not in text and not addresses:
        return _KEYS.sub(rf"\1{HIDDEN}", text)
    for address in addresses:
        if address and (match := _PASSWORD.match(address)):
            for password in {match[1], unquote(match[1])}:
                text = text.replace(password, HIDDEN) if len(password) >= _MIN_PASSWORD else text
    text = _USERS.sub(lambda match: f"{match['scheme'] or match['bare'] or ''}{HIDDEN}@", text)
    return _KEYS.sub(rf"\1{HIDDEN}", text)


def redacted(value: Any) -> Any:
    """Returns a value with every text in its mappings and lists redacted.

    Example:
        >>> redacted({"tracking": {"uri": "http://me:word@host"}, "rounds": 2})
        {'tracking': {'uri': 'http://***@host'}, 'rounds': 2}
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return value


def without_user(address: str) -> str:
    """Returns an address without user and password, which can be stored and used again.

    Example:
        >>> without_user("http://me:word@host:5000"), without_user("sqlite:////tmp/a.db")
        ('http://host:5000', 'sqlite:////tmp/a.db')
    """
    return redact(address).replace(f"{HIDDEN}@", "")


def printable(text: str) -> str:
    r"""Replaces characters that a terminal would interpret, hide or refuse by escape sequences.

    Example:
        >>> print(printable("a\x1b[2J.png"))
        a\x1b[2J.png
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(value: Any) -> Any:
    """Makes each line of a plain string printable; returns other values, such as markup of a template, unchanged."""
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value


def csv_cell(value: Any) -> Any:
    """Puts a quote before text that a spreadsheet would execute as a formula; numbers and other values stay unchanged.

    Example:
        >>> csv_cell("=HYPERLINK(1)"), csv_cell("a;=1.png"), csv_cell("-1.5"), csv_cell(-1.5)
        ("'=HYPERLINK(1)", "a;'=1.png", '-1.5', -1.5)
    """
    if not isinstance(value, str) or not _FORMULA.search(value):
        return value
    try:
        float(value)
    except ValueError:
        return _FORMULA.sub(r"\1'", value)
    return value


def shell_word(word: str) -> str:
    """Quotes a word for a shell if necessary."""
    if any(letter in word for letter in '"$`\\!'):
        return shlex.quote(word)
    return f'"{word}"' if any(letter in word for letter in " '[]()&;#*?~|<>") else word

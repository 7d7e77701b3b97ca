"""Text that leaves the program: without passwords, control characters or formulas.

File names, addresses and messages of libraries are others' text. What a terminal, a spreadsheet or a stored file is
given passes through here.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

_SHORTEST = 3  # of passwords that are searched for by themselves: shorter ones are parts of any text

# User and password of an address. A password may hold a slash or an @, and the slashes before it may be missing.
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

# Where a cell begins for a spreadsheet: some take a semicolon or a tab for its end. Some obey wide signs, too.
_FORMULA = re.compile(r"(^|[;\t])(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")


def redact(text: str, *addresses: str | None) -> str:
    """Hides users and passwords of all addresses in a text.

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
                text = text.replace(password, HIDDEN) if len(password) >= _SHORTEST else text
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
    """Returns an address without user and password, as it is stored and may be used again.

    Example:
        >>> without_user("http://me:word@host:5000"), without_user("sqlite:////tmp/a.db")
        ('http://host:5000', 'sqlite:////tmp/a.db')
    """
    return redact(address).replace(f"{HIDDEN}@", "")


def printable(text: str) -> str:
    r"""Writes the characters that a terminal would obey, hide or refuse as escapes.

    Example:
        >>> print(printable("a\x1b[2J.png"))
        a\x1b[2J.png
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(value: Any) -> Any:
    """Makes each line of a text printable; leaves other values, such as a template's own markup, as they are."""
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value


def csv_cell(value: Any) -> Any:
    """Puts a quote before a text that a spreadsheet would run as a formula; numbers and other values stay.

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
    """Quotes a word for a shell where it needs it."""
    if any(letter in word for letter in '"$`\\!'):
        return shlex.quote(word)
    return f'"{word}"' if any(letter in word for letter in " '[]()&;#*?~|<>") else word

"""The help of the command line: all commands, or the keys of one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from lit_fedad.core.usage import Key, keys

_WIDTH = 118
_COLUMN, _KEY_COLUMN = 28, 26


class Form(NamedTuple):
    """One of the things that a command does.

    Attributes:
        purpose: What it does.
        example: All words after the command in an example.
        declared: Paths of the dataclasses in the package that declare its keys; none: the command's function does.
        words: Words that it takes besides, such as overrides of the configuration.
    """

    purpose: str
    example: str
    declared: tuple[str, ...] = ()
    words: str = ""


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        function: Path of its function in the package, bound by `lit_fedad.core.options.bind`; imported when it is
            called: the list of commands must not wait for Lightning.
        forms: What it does, by the first word of each form; the empty word where there is one form alone.
        continues: Whether the same command continues what was interrupted.
        extra: Key of `EXTRAS`: what must be installed beside the package itself.
    """

    function: str
    forms: Mapping[str, Form]
    continues: bool = False
    extra: str | None = None


def only(*form: Any, **words: Any) -> dict[str, Form]:
    """Makes the forms of a command that has one alone."""
    return {"": Form(*form, **words)}


def overview(commands: Mapping[str, Command]) -> str:
    """Writes the list of all commands."""
    lines = ["lit-fedad COMMAND key=value ...", ""]
    for name, command in commands.items():
        for word, form in command.forms.items():
            lines += _wrapped(form.purpose, f"  {name} {word}".rstrip(), _COLUMN)
    return "\n".join(
        [*lines, "", "Keys, defaults and an example: lit-fedad COMMAND --help. Version: lit-fedad --version"]
    )


def command_help(name: str, command: Command, first: str | None = None) -> str:
    """Writes the keys of a command, with defaults and one example for each of its forms."""
    forms = {word: form for word, form in command.forms.items() if word == first} or command.forms
    return "\n\n".join(_form_help(name, command, word, form) for word, form in forms.items())


def _form_help(name: str, command: Command, word: str, form: Form) -> str:
    listed = listed_keys(form.declared or (command.function,))
    if word and "=" in word:  # the key that chooses the form is given already
        listed = [key for key in listed if key.name != word.partition("=")[0]]
    needed = [key.syntax for key in listed if key.default is None]
    more = ["[key=value ...]"] if len(needed) < len(listed) else []
    usage = " ".join(filter(None, [f"usage: lit-fedad {name}", word, *needed, *more, form.words]))
    lines = [*_wrapped(usage, "", 0), *_wrapped(form.purpose, "", 2)]
    lines += _key_lines(listed)
    if name == "train":
        lines += _key_lines(configuration_keys())
    return "\n".join([*lines, "", f"example: lit-fedad {name} {form.example}".rstrip()])


def listed_keys(paths: Iterable[str]) -> list[Key]:
    """Lists the keys that several paths in the package declare together, those first that must be given."""
    listed: dict[str, Key] = {}
    for path in paths:
        listed |= {key.name: key for key in keys(f"lit_fedad.{path}")}
    return sorted(listed.values(), key=lambda key: key.default is not None)


def configuration_keys() -> list[Key]:
    """Lists the groups of the configuration and the keys that every run has, as ``conf/config.yaml`` tells them."""
    from lit_fedad.core.config import choices, conf_folder  # Hydra: the overview does not wait for it

    text = (conf_folder() / "config.yaml").read_text()
    root: dict[str, Any] = yaml.safe_load(text)
    comments = dict(re.findall(r"^(\w+): .*?# (.*)$", text, re.M))
    groups = {
        group: chosen
        for one in root.pop("defaults")
        if isinstance(one, dict)
        for group, chosen in one.items()
    }
    groups["experiment"] = ""  # a method brings its own
    listed = [
        Key(
            group,
            "null" if chosen is None else chosen,
            f"one of {len(choices(group))}: lit-fedad options {group}",
        )
        for group, chosen in groups.items()
    ]
    single = {key: value for key, value in root.items() if not isinstance(value, dict)}
    listed += [
        Key(key, yaml.safe_dump(value).split("\n")[0], comments.get(key, "")) for key, value in single.items()
    ]
    sections = ", ".join(key for key, value in root.items() if isinstance(value, dict))
    return [
        *listed,
        Key("SECTION.KEY", "", f"of {sections} and of every group: lit-fedad train --cfg shows all"),
    ]


def _key_lines(listed: Iterable[Key]) -> list[str]:
    """Writes a line or more for each key: as it is given, and what it does."""
    lines = [""]
    for key in listed:
        given = key.syntax if key.default is None else f"{key.name}={key.default}"
        meaning = key.meaning
        if key.default is not None and key.choices:
            meaning = f"{'|'.join(key.choices)}: {meaning}"
        lines += _wrapped(meaning, f"  {given}", _KEY_COLUMN)
    return lines if len(lines) > 1 else []


def _wrapped(text: str, head: str, column: int) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - column, break_long_words=False, break_on_hyphens=False) or [""]
    if len(head) >= column > 0:  # too long for its column: a line of its own
        return [head, *(" " * column + line for line in lines)]
    return [(head.ljust(column) if place == 0 else " " * column) + line for place, line in enumerate(lines)]

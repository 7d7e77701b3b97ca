"""The help of the command line: all commands, or the keys of one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from lit_fedad.core.errors import UserError
from lit_fedad.core.usage import Key, keys, summary

_WIDTH = 118
_COLUMN, _KEY_COLUMN = 28, 26


class Form(NamedTuple):
    """One of the things that a command does.

    Attributes:
        told_by: Path of the function in the package whose docstring says what it does.
        example: All words after the command in an example.
        declared: Paths of the dataclasses in the package that declare its keys; none: that function does.
        words: Words that it takes besides, such as overrides of the configuration.
    """

    told_by: str
    example: str
    declared: tuple[str, ...] = ()
    words: str = ""

    @property
    def keys(self) -> list[Key]:
        """Its keys."""
        return listed_keys(self.declared or (self.told_by,))


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        forms: What it does, by the first word of each form; the empty word where there is one form alone.
        function: Path of the function that takes all words of any form, bound by `lit_fedad.core.options.bind`; where
            there is none, each form's own function takes the words after the first.
        continues: Whether the same command continues what was interrupted.
        extra: Key of `EXTRAS`: what must be installed beside the package itself.
    """

    forms: Mapping[str, Form]
    function: str = ""
    continues: bool = False
    extra: str | None = None

    def called(self, name: str, words: Sequence[str]) -> tuple[str, Sequence[str], str]:
        """Finds the path of the function that some words call, the words that it takes, and its name in errors.

        Raises:
            UserError: If the first word names no form.
        """
        if self.function or "" in self.forms:
            return self.function or self.forms[""].told_by, words, name
        first, *others = words or [""]
        if first not in self.forms:
            raise UserError(f"the {name} command is: {', '.join(f'{name} {word}' for word in self.forms)}")
        return self.forms[first].told_by, others, f"{name} {first}"


def only(*form: Any, words: str = "", continues: bool = False, extra: str | None = None) -> Command:
    """Makes a command that has one form alone."""
    made = Form(*form)
    return Command({"": made._replace(words=words or made.words)}, continues=continues, extra=extra)


def overview(commands: Mapping[str, Command]) -> str:
    """Writes the list of all commands."""
    lines = ["lit-fedad COMMAND key=value ...", ""]
    for name, command in commands.items():
        for word, form in command.forms.items():
            lines += _wrapped(summary(f"lit_fedad.{form.told_by}"), f"  {name} {word}".rstrip(), _COLUMN)
    return "\n".join(
        [*lines, "", "Keys, defaults and an example: lit-fedad COMMAND --help. Version: lit-fedad --version"]
    )


def command_help(name: str, command: Command, first: str | None = None) -> str:
    """Writes the keys of a command, with defaults and one example for each of its forms."""
    forms = {word: form for word, form in command.forms.items() if word == first} or command.forms
    return "\n\n".join(_form_help(name, word, form) for word, form in forms.items())


def _form_help(name: str, word: str, form: Form) -> str:
    listed = form.keys
    if word and "=" in word:  # the key that chooses the form is given already
        listed = [key for key in listed if key.name != word.partition("=")[0]]
    needed = [key.syntax for key in listed if key.default is None]
    more = ["[key=value ...]"] if len(needed) < len(listed) else []
    usage = " ".join(filter(None, [f"usage: lit-fedad {name}", word, *needed, *more, form.words]))
    lines = [*_wrapped(usage, "", 0), *_wrapped(summary(f"lit_fedad.{form.told_by}"), "", 2)]
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
    """Lists the groups of the configuration and the keys that every run has, with the values of a run without words."""
    # Hydra comes with it: the overview does not wait for that.
    from lit_fedad.core.config import choices, conf_folder, defaults

    text = (conf_folder() / "config.yaml").read_text()
    root: dict[str, Any] = yaml.safe_load(text)
    comments = dict(re.findall(r"^(\w+): .*?# (.*)$", text, re.M))
    groups, values = defaults()
    listed = [
        Key(
            group,
            "null" if chosen is None else chosen,
            f"one of {len(choices(group))}: lit-fedad options {group}",
        )
        for group, chosen in groups.items()
    ]
    sections = [key for key, value in root.items() if isinstance(value, dict)]
    listed += [Key(key, values[key], meaning) for key, meaning in comments.items() if key not in sections]
    return [
        *listed,
        Key(
            "SECTION.KEY", "", f"of {', '.join(sections)} and of every group: lit-fedad train --cfg shows all"
        ),
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

"""The help of the command line: the list of all commands, or the keys of one command."""

from __future__ import annotations

import difflib
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
    """One form of a command, such as ``site init``: a function, and how to call it.

    Attributes:
        function: Path of its function in the package, whose parameters are its keys (`lit_fedad.core.options.bind`).
        example: All words after the command in an example.
        words: Other words that the form takes, such as overrides of the configuration, as the usage shows them.
    """

    function: str
    example: str
    words: str = ""

    @property
    def keys(self) -> list[Key]:
        """The keys of the form; those that must be given come first."""
        return sorted(keys(f"lit_fedad.{self.function}"), key=lambda key: key.default is not None)


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        forms: The forms, by the word that chooses them: a first word, a key with a value (``attack=lira``) or a key
            with any value (``table=NAME``). The empty word stands for the form without a key, or for the only form.
        continues: Whether the same command continues what was interrupted.
        extra: Key of `EXTRAS`: packages that must be installed in addition to the package itself.
    """

    forms: Mapping[str, Form]
    continues: bool = False
    extra: str | None = None

    def called(self, name: str, words: Sequence[str]) -> tuple[Form, Sequence[str], str]:
        """Finds the form that the words after a command choose.

        Returns:
            The form, the words that its function takes, and the form's name in error messages.

        Raises:
            UserError: If the words choose no form, or misspell the key that chooses one.
        """
        key, *_ = [word.partition("=")[0] for word in self.forms if "=" in word] or [""]
        if key and (chosen := [word for word in words if word.startswith(f"{key}=")]):
            if f"{key}=NAME" in self.forms:
                return self.forms[f"{key}=NAME"], words, name
            if chosen[-1] in self.forms:
                others = [word for word in words if word not in chosen]
                return self.forms[chosen[-1]], others, f"{name} {chosen[-1]}"
            choices = ", ".join(word.removeprefix(f"{key}=") for word in self.forms)
            raise UserError(f"{name}: {chosen[-1]} must be one of {choices}")
        if "" in self.forms:
            given = [word.partition("=")[0] for word in words]
            if key and (misspelt := difflib.get_close_matches(key, given, n=1, cutoff=0.7)):
                raise UserError(f"{name} has no key '{misspelt[0]}'; did you mean '{key}'?")
            return self.forms[""], words, f"{name} without {key}=" if key else name
        if words and words[0] in self.forms:
            return self.forms[words[0]], words[1:], f"{name} {words[0]}"
        raise UserError(f"the {name} command is: {', '.join(f'{name} {word}' for word in self.forms)}")


def one_form(*form: str, continues: bool = False, extra: str | None = None) -> Command:
    """Makes a command of one form, from the fields of `Form`."""
    return Command({"": Form(*form)}, continues, extra)


def overview(commands: Mapping[str, Command]) -> str:
    """Writes the list of all commands."""
    lines = ["lit-fedad COMMAND key=value ...", ""]
    for name, command in commands.items():
        for word, form in command.forms.items():
            lines += _wrapped(summary(f"lit_fedad.{form.function}"), f"  {name} {word}".rstrip(), _COLUMN)
    return "\n".join(
        [*lines, "", "Keys, defaults and an example: lit-fedad COMMAND --help. Version: lit-fedad --version"]
    )


def command_help(name: str, command: Command, first: str | None = None) -> str:
    """Writes the keys of a command with defaults and an example, for the form that `first` chooses or for all."""
    forms = {word: form for word, form in command.forms.items() if word == first} or command.forms
    return "\n\n".join(_form_help(name, word, form) for word, form in forms.items())


def _form_help(name: str, word: str, form: Form) -> str:
    form_keys = form.keys
    if word and "=" in word:  # the key that chooses the form is given already
        form_keys = [key for key in form_keys if key.name != word.partition("=")[0]]
    needed = [key.syntax for key in form_keys if key.default is None]
    more = ["[key=value ...]"] if len(needed) < len(form_keys) else []
    usage = " ".join(filter(None, [f"usage: lit-fedad {name}", word, *needed, *more, form.words]))
    lines = [*_wrapped(usage, "", 0), *_wrapped(summary(f"lit_fedad.{form.function}"), "", 2)]
    lines += _key_lines(form_keys)
    if name == "train":
        lines += _key_lines(configuration_keys())
    return "\n".join([*lines, "", f"example: lit-fedad {name} {form.example}".rstrip()])


def configuration_keys() -> list[Key]:
    """Lists the groups of the configuration and the keys that every run has, with their default values."""
    # Imported only here: it imports Hydra, for which the overview must not wait.
    from lit_fedad.core.config import defaults
    from lit_fedad.core.config_groups import choices, conf_folder

    text = (conf_folder() / "config.yaml").read_text()
    root: dict[str, Any] = yaml.safe_load(text)
    comments = dict(re.findall(r"^(\w+): .*?# (.*)$", text, re.M))
    groups, values = defaults()
    all_keys = [
        Key(
            group,
            "null" if chosen is None else chosen,
            f"one of {len(choices(group))}: lit-fedad options {group}",
        )
        for group, chosen in groups.items()
    ]
    sections = [key for key, value in root.items() if isinstance(value, dict)]
    all_keys += [Key(key, values[key], meaning) for key, meaning in comments.items() if key not in sections]
    return [
        *all_keys,
        Key(
            "SECTION.KEY", "", f"of {', '.join(sections)} and of every group: lit-fedad train --cfg shows all"
        ),
    ]


def _key_lines(form_keys: Iterable[Key]) -> list[str]:
    """Writes one or more lines for each key: how it is given, and what it means."""
    lines = [""]
    for key in form_keys:
        usage = key.syntax if key.default is None else f"{key.name}={key.default}"
        meaning = key.meaning
        if key.default is not None and key.choices:
            meaning = f"{'|'.join(key.choices)}: {meaning}"
        lines += _wrapped(meaning, f"  {usage}", _KEY_COLUMN)
    return lines if len(lines) > 1 else []


def _wrapped(text: str, head: str, column: int) -> list[str]:
    """Wraps a text that begins at a column, behind a head in the first line."""
    lines = textwrap.wrap(text, _WIDTH - column, break_long_words=False, break_on_hyphens=False) or [""]
    if len(head) >= column > 0:  # the head is too long for the column and gets a line of its own
        return [head, *(" " * column + line for line in lines)]
    return [(head.ljust(column) if number == 0 else " " * column) + line for number, line in enumerate(lines)]

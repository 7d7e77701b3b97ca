"""A folder with an operator's settings in YAML: the common part of a coordinator's folder and a site's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import atomic, given_bytes, unwritable_in_one_line
from lit_fedad.core.plain_values import plain_yaml

NAME = re.compile(r"\w[\w-]{0,63}")
"""Form of the names of sites and runs, which become names of files."""

_FORMS: Mapping[str, tuple[type, str]] = {
    "str": (str, "a text, in quotes"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "Sequence[str]": (list, "a list of words"),
    "Mapping[str, Any]": (dict, "names with their values"),
}
"""By a setting's declared type: the Python type that YAML must give, and what an error message calls it."""


@dataclass(frozen=True)
class SettingsFolder:
    """A folder with a file of settings, which are the fields of a subclass.

    Attributes:
        path: The folder.
    """

    holds: ClassVar[str]  # name of the command that makes the folder, and of its file of settings
    path: Path

    @property
    def file(self) -> Path:
        """The file with the settings."""
        return self.path / f"{self.holds}.yaml"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads a folder that `create` wrote.

        Raises:
            UserError: If the folder holds no such settings, or a setting is invalid.
        """
        file = path / f"{cls.holds}.yaml"
        try:
            content = plain_yaml(given_bytes(file).decode())
            folder = cls(path.absolute(), **cls._typed(content))
            try:
                folder.check()
            except UserError as error:
                raise UserError(f"{file}: {error}") from error
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            cause = one_line(error)
            advice = "correct it" if file.exists() else f"make it: lit-fedad {cls.holds} init"
            raise UserError(f"{file}: cannot be read ({cause}); {advice}") from error
        return folder

    @classmethod
    def _typed(cls, content: object) -> dict[str, Any]:
        """Returns the settings in a file's content, each converted to its declared type.

        Raises:
            ValueError: If a setting is missing, unknown or of another type; the message names its key.
        """
        known = {f.name: f for f in fields(cls) if f.name != "path"}
        if not isinstance(content, dict):
            raise ValueError("give names with their values")
        if unknown := [name for name in content if name not in known]:
            raise ValueError(f"there is no {unknown[0]}; choose among {', '.join(known)}")
        for name, setting in known.items():
            if name not in content and setting.default is setting.default_factory is MISSING:
                raise ValueError(f"{name} is missing")
        return {name: _value(value, str(known[name].type), name) for name, value in content.items()}

    def check(self) -> None:
        """Checks the settings.

        Raises:
            UserError: If one is invalid.
        """

    def make(self) -> None:
        """Makes the folder where it is missing, and lets only this account read it: its content tells of images.

        Raises:
            OSError: If it cannot be made.
        """
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        with suppress(PermissionError):  # a mounted folder may belong to another account
            self.path.chmod(0o700)

    @contextmanager
    def writing(self, new: bool = False, **more: Any) -> Iterator[None]:
        """Turns an error of writing in a block into one line; after the block, writes the settings of a new folder.

        Args:
            new: Whether the folder is a new one.
            **more: Values to write for some settings instead of this object's.

        Raises:
            UserError: If something cannot be written, or if a new folder holds settings already or has an invalid one.
        """
        if new:
            self.check()
            if self.file.exists():
                raise UserError(f"{self.path}: holds a {self.holds} already; give another out=DIR")
        with unwritable_in_one_line(self.path, within=True):
            yield
            if new:
                content = {name: value for name, value in (asdict(self) | more).items() if name != "path"}
                with atomic(self.file, durable=True) as partial:  # half a file could pass as a whole one
                    partial.write_text(yaml.safe_dump(content, sort_keys=False))


def _value(value: Any, declared: str, name: str) -> Any:
    """Converts a value from YAML, which reads some texts as whole numbers, to its setting's declared type."""
    if value is None and declared.endswith(" | None"):
        return None
    kind, what = _FORMS[declared.removesuffix(" | None")]
    words = value if kind is list and isinstance(value, list) else ()
    if type(value) is int and kind in (str, float):
        value = kind(value)
    if type(value) is not kind or not all(type(word) in (str, int) for word in words):
        raise ValueError(f"{name}: give {what}")
    return [str(word) for word in words] if kind is list else value

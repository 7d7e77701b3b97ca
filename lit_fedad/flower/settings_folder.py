"""A folder with an operator's settings in YAML: of a coordinator, or of a site."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import given_bytes, stored_yaml


@dataclass(frozen=True)
class SettingsFolder:
    """A folder with settings: the fields of a subclass.

    Attributes:
        path: The folder.
    """

    holds: ClassVar[str]  # as the command is called that makes it
    path: Path

    @property
    def file(self) -> Path:
        """The file of the settings."""
        return self.path / f"{self.holds}.yaml"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads a folder that `create` wrote.

        Raises:
            UserError: If it holds no such settings, or one is invalid.
        """
        file = path / f"{cls.holds}.yaml"
        try:
            content = stored_yaml(given_bytes(file).decode())
            if not isinstance(content, dict) or not set(content) <= {f.name for f in fields(cls)} - {"path"}:
                raise ValueError("other keys")
            folder = cls(path.absolute(), **cls._words(content))
            try:
                folder.check()
            except UserError as error:
                raise UserError(f"{file}: {error}") from error
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            cause = " ".join(str(error).split())
            raise UserError(
                f"{file}: cannot be read ({cause}); make it: lit-fedad {cls.holds} init"
            ) from error
        return folder

    @classmethod
    def _words(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings, with the words of lists as texts: YAML takes some for numbers."""
        lists = {f.name for f in fields(cls) if str(f.type).startswith("Sequence")} & set(content)
        for name in lists:
            if not isinstance(content[name], list) or not all(
                isinstance(w, str | int) for w in content[name]
            ):
                raise ValueError(f"{name}: give a list of words")
        return content | {name: [str(word) for word in content[name]] for name in lists}

    def check(self) -> None:
        """Checks the settings.

        Raises:
            UserError: If one is invalid.
        """

    @contextmanager
    def writing(self, new: bool = False, **more: Any) -> Iterator[None]:
        """Tells in one line what cannot be written in a block, after which the settings of a new folder are written.

        Args:
            new: Whether the folder is a new one.
            **more: Values in the place of the settings'.

        Raises:
            UserError: If something cannot be written, or what should be new is there or has an invalid setting.
        """
        if new:
            self.check()
            if self.file.exists():
                raise UserError(f"{self.path}: holds a {self.holds} already; give another out=DIR")
        try:
            yield
            if new:
                content = {name: value for name, value in (asdict(self) | more).items() if name != "path"}
                self.file.write_text(yaml.safe_dump(content, sort_keys=False))
        except OSError as error:
            raise UserError(f"{error.filename or self.path}: cannot be written ({error.strerror})") from error

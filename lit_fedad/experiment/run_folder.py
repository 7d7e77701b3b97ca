"""The folder of a run: its name, how commands find it, and what they read from it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.config_schema import check_root
from lit_fedad.core.errors import RESTORE, UserError
from lit_fedad.core.identity import identity
from lit_fedad.core.nested import value_at
from lit_fedad.core.text import shell_word
from lit_fedad.data.additions import Addition
from lit_fedad.evaluation.calibration import alphas
from lit_fedad.experiment.run_files import (
    check_folders,
    file_named_in_errors,
    read_json,
    read_object,
    read_settings,
    save_json,
    there,
    write,
)
from lit_fedad.experiment.trusted_targets import check_targets
from lit_fedad.metrics.conformal import Alpha, Calibration
from lit_fedad.tracking.reading import find_run_folder

_DEFAULT = "versions/default.json"

_READ_LATER = ("seed", "rounds", "evaluation.alpha", "evaluation.batch_size")
"""Keys that commands read after they have built a detector."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; methods raise `UserError` if a file cannot be read, or was changed."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """Returns the folder of a configuration's run, the same for equal configurations.

        Raises:
            UserError: If the name of the method or of the data cannot be part of a folder's name.
        """
        if config["out"]:
            return cls(Path(config["out"]))
        method = config["method"]["name"]
        data = config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
        for key, part in (("method.name", method), ("data.name", data)):
            if not re.fullmatch(r"\w[\w.+-]*", str(part)):
                raise UserError(
                    f"{key}={part!r} must be letters, digits, '_', '.', '+' and '-'; or give out=DIR"
                )
        name = f"{method}-{data}-s{config['seed']}-{identity(config)[:8]}"
        return cls(Path("outputs") / name)

    @classmethod
    def find(cls, run: str, key: str = "run") -> RunFolder:
        """Finds the folder of a finished or begun run.

        Args:
            run: Folder of the run, or the id of a tracked run.
            key: The key by which the user has named the run, for error messages.

        Raises:
            UserError: If there is no such run, another version wrote it, or a folder in it is a link, through which
                commands would write elsewhere.
        """
        if Path(run).is_dir():
            folder = Path(run)
        else:
            try:
                folder = find_run_folder(run)
            except UserError as error:
                raise UserError(f"{key}={run}: no such folder, and no tracked run: {error}") from error
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder}: not a run's folder (it holds no config.yaml)")
        check_folders(folder)
        run_folder = cls(folder)
        run_folder.config()  # refuses a run that cannot be opened
        return run_folder

    def config(self) -> Config:
        """Reads the resolved configuration of the run.

        Raises:
            UserError: If the file is no configuration of a run, was changed, names code that a stored run must not
                call, holds keys that no run takes, or another version wrote it.
        """
        config = read_settings(self.path)
        with file_named_in_errors(self.path / "config.yaml"):
            check_targets(config, self.path / "config.yaml")
            check_root(config)
            if lost := [key for key in _READ_LATER if value_at(config, key) is None]:
                raise UserError(f"{lost[0]} is missing, and every run has one; {RESTORE}")
        return config

    def result(self) -> dict[str, Any] | None:
        """Reads the result of a complete run; None for a run that is not complete."""
        if not there(self.path / "result.json"):
            return None
        result = read_json(self.path, "result.json")
        try:
            ClientNames.of(result)
        except UserError as error:
            raise UserError(f"{self.path}/{error}") from error
        return result

    def calibration(self) -> Calibration:
        """Reads the calibration scores of a complete run."""
        with file_named_in_errors(self.path / "calibration.json"):
            stored = Calibration.from_json(read_json(self.path, "calibration.json"))
        return replace(stored, names=ClientNames.of(self.result() or {}))

    def alpha(self) -> Alpha:
        """Reads the rate of false alarms that the run promises."""
        return alphas(self.config())[0]

    def attack(self, name: str) -> dict[str, Any] | None:
        """Reads the result of the attack with this name; None if the run was not attacked so."""
        file = self.path / "privacy" / f"{name}.json"
        return read_object(file, "remove it, and attack the run again") if there(file) else None

    def additions(self) -> list[Addition]:
        """Reads the images that were added after the run was complete; empty if the run was not updated."""
        if not there(self.path / "additions.json"):
            return []
        content = read_json(self.path, "additions.json")
        try:
            return [Addition.from_json(part) for part in content["additions"]]
        except (KeyError, TypeError, UserError) as error:
            raise UserError(f"{self.path / 'additions.json'}: not the images of an update") from error

    def save_additions(self, additions: Sequence[Addition]) -> None:
        """Writes the images that were added, for `additions`."""
        save_json(self.path, "additions.json", {"additions": [one.to_json() for one in additions]})

    @property
    def home(self) -> RunFolder:
        """Folder of the run of which this folder is a version; the folder itself if it is the run as trained."""
        above = self.path.resolve().parent
        return RunFolder(above.parent) if above.name == "versions" else self

    def place(self, name: str) -> str:
        """Returns the artifact folder for files of this version, among the artifacts of the run (`home`)."""
        return f"versions/{self.path.name}/{name}" if self.home != self else name

    def version_folder(self, number: int) -> RunFolder:
        """Returns the folder of a version, which may not exist; version 0 is the run as it was trained."""
        return RunFolder(self.path / "versions" / str(number)) if number else self

    @contextmanager
    def new_version(self) -> Iterator[tuple[int, RunFolder]]:
        """Creates a version; it is complete if the block ends without an error, and absent otherwise.

        Yields:
            Number of the version, and the temporary folder to write it to.

        Raises:
            OSError: If it cannot be written.
        """
        # The number of a version without a result is taken too: its files may be restored later.
        taken = [path.name for path in self.path.glob("versions/*")]
        number = max([0, *(int(name) for name in taken if name.isdecimal())]) + 1
        partial = RunFolder(self.path / "versions" / f".partial_{number}")
        shutil.rmtree(partial.path, ignore_errors=True)
        try:
            yield number, partial
            partial.path.replace(self.version_folder(number).path)
        finally:
            shutil.rmtree(partial.path, ignore_errors=True)

    def versions(self) -> list[int]:
        """Lists the numbers of the complete versions, in ascending order."""
        names = (path.parent.name for path in self.path.glob("versions/*/result.json"))
        return [0, *sorted(int(name) for name in names if name.isdecimal())]

    def version(self, number: int | None) -> RunFolder:
        """Finds a version.

        Args:
            number: Its number; None for the default version, which is the run as it was trained until another is
                chosen.

        Raises:
            UserError: If there is no version of this number, it is a link or contains one in place of a folder, or the
                file that names the default cannot be read.
        """
        numbers, wanted = self.versions(), self.default_version() if number is None else number
        if wanted not in numbers:
            change = f"lit-fedad update {shell_word(f'run={self.path}')} default=N"
            advice = f"; another becomes the default by: {change}" if number is None else ""
            raise UserError(
                f"{self.path} has no version {wanted}, only {', '.join(map(str, numbers))}{advice}"
            )
        folder = self.version_folder(wanted)
        check_folders(folder.path, *[folder.path] * (wanted > 0))
        return folder

    def choose_version(self, number: int) -> RunFolder:
        """Makes a version the default, and returns its folder.

        Raises:
            UserError: If there is no version of this number.
        """
        folder = self.version(number)
        if number or (self.path / _DEFAULT).exists():
            write(self.path, _DEFAULT, json.dumps({"default": number}))
        return folder

    def default_version(self) -> int:
        """Reads the number of the version that commands use; 0 until another is chosen."""
        if not there(self.path / _DEFAULT):
            return 0
        number = read_object(self.path / _DEFAULT, "remove it, and choose a version anew").get("default")
        if type(number) is not int:
            raise UserError(f"{self.path / _DEFAULT}: names no version; remove it, and choose one anew")
        return number

"""The folder of a run's files, and its lookup by later commands."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config, identity
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import absent, atomic, plain_json, stored_bytes, stored_yaml, undone
from lit_fedad.core.text import redact, redacted
from lit_fedad.data.additions import Addition
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.lock import LOCK, locked
from lit_fedad.experiment.manifest import MANIFEST, announce, check, read_manifest
from lit_fedad.experiment.trusted_targets import check_targets
from lit_fedad.metrics.conformal import Alpha, Calibration
from lit_fedad.privacy.image_privacy import KEY_FILE
from lit_fedad.tracking.reading import find_run_folder

_FOLDERS = (
    "checkpoints",
    "personal",
    "figures",
    "tracking",
    "predictions",
    "privacy",
    "export",
    "watch",
    "versions",
)
_LISTED = ("config.yaml", "calibration.json", "additions.json", "result.json")  # in the manifest
_DEFAULT = "versions/default.json"
# Those by which a run's folder is recognised are removed last.
_FILES = ("result.json", "calibration.json", "evaluation.json", "partition.json", MANIFEST, "config.yaml")

# Written to config.yaml. Raise it when a version cannot open the files of the one before; 0.1 wrote none.
_FORMAT = 6
_MAKERS = {None: "lit_fedad 0.1", 4: "lit_fedad 0.2"}

_ANEW = "remove result.json and calibration.json, and the command that began the run writes them anew"
_ATTACK = "remove it, and attack the run again"


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; `UserError` is raised where one cannot be read, or was changed."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """Returns the folder of a configuration's run, the same for equal configurations.

        Raises:
            UserError: If the name of its method or data cannot be part of a folder's name.
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
    def find(cls, run: str) -> RunFolder:
        """Finds the folder of a finished or begun run.

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
                raise UserError(f"run={run}: no such folder, and no tracked run: {error}") from error
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder}: not a run's folder (it holds no config.yaml)")
        found = cls(folder)
        found._check_folders()
        found.config()
        return found

    def locked(self) -> AbstractContextManager[None]:
        """Holds the folder for one command.

        Raises:
            UserError: If another one is at work there.
        """
        return locked(self.path)

    @contextlib.contextmanager
    def begun(self, config: Config) -> Iterator[None]:
        """Holds the folder for the command that begins or continues a run; one that is refused leaves nothing there.

        Raises:
            UserError: As `locked` and `claim` do, or if a folder in it is a link.
        """
        self._check_folders()
        before, made = self._present(), absent(self.path / LOCK)
        with self.locked(), undone(made, unless=self.path / "config.yaml"):
            try:
                if config["fresh"]:
                    self.clear()
                self.claim(config)
                yield
            except BaseException:
                if not before and {*self._present()} <= {"config.yaml", MANIFEST}:
                    self.clear()
                raise

    def clear(self) -> None:
        """Removes the files of an earlier run, and no other files in the folder.

        Raises:
            UserError: If no run wrote them.
        """
        if (present := self._present()) and not self._holds_run():
            raise UserError(
                f"{self.path}: holds {present[0]}, but no run of lit-fedad; fresh=true deletes only what a run wrote."
                " Give another out=DIR"
            )
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (*(f".{name}.partial" for name in _FILES), *_FILES, KEY_FILE):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.path / name).unlink()

    def config(self) -> Config:
        """Reads the resolved configuration of the run.

        Raises:
            UserError: If the file is not such a configuration, was changed, names code that a stored run must not
                call, or another version wrote it.
        """
        config = self._settings()
        check_targets(config, self.path / "config.yaml")
        return config

    def _settings(self) -> Config:
        """Reads the configuration to compare it, not to build from it: it may name anything."""
        path = self.path / "config.yaml"
        content, config = self._stored_config()
        if not isinstance(config, dict) or "method" not in config:
            raise UserError(f"{path}: not the configuration of a run; name another folder")
        version = config.pop("format", None)
        if version != _FORMAT:
            maker = _MAKERS.get(version, f"another version of lit_fedad (format {version})")
            raise UserError(
                f"{self.path}: a run of {maker}, which this version cannot open; use that version, or train again"
                " (another out=DIR, or fresh=true)"
            )
        check(self.path, path.name, content, "restore it from a copy, or train anew with fresh=true")
        return config

    def claim(self, config: Config) -> None:
        """Reserves the folder for a configuration, and writes the configuration to it.

        Raises:
            UserError: If it holds a run of another configuration or version, files that no run wrote, or cannot be
                written.
        """
        if (self.path / "config.yaml").exists():
            if identity(self._settings()) != identity(config):
                if self.result() or any((self.path / "checkpoints").glob("round_*")):
                    raise self._occupied()
                self.clear()  # left by a command that failed before its first round
        elif (present := self._present()) and not self._holds_run():
            raise UserError(
                f"{self.path}: holds {present[0]}, which no run of lit-fedad wrote; give another out=DIR"
            )
        result = self.result()
        if result is not None and identity(result.get("config", {})) != identity(_plain(config)):
            raise self._occupied()
        self._write("config.yaml", yaml.safe_dump({"format": _FORMAT, **redacted(config)}, sort_keys=False))

    def result(self) -> dict[str, Any] | None:
        """Reads the result of a complete run; None for a run that is not complete."""
        return self._read_json("result.json") if _there(self.path / "result.json") else None

    def calibration(self) -> Calibration:
        """Reads the calibration scores of a complete run."""
        try:
            read = Calibration.from_json(self._read_json("calibration.json"))
        except UserError as error:
            path = self.path / "calibration.json"
            raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
        return replace(read, names=ClientNames.of(self.result() or {}))

    def alpha(self) -> Alpha:
        """Reads the rate of false alarms that the run promises."""
        return alphas(self.config())[0]

    def attacks(self) -> dict[str, dict[str, Any]]:
        """Reads what attacks on the run have found, by the name of the attack."""
        files = sorted((self.path / "privacy").glob("*.json"))
        return {path.stem: _object(path, _ATTACK)[1] for path in files}

    def additions(self) -> list[Addition]:
        """Reads the images that came after the run was complete; none where it was not updated."""
        if not _there(self.path / "additions.json"):
            return []
        content = self._read_json("additions.json")
        try:
            return [Addition.from_json(part) for part in content["additions"]]
        except (KeyError, TypeError, UserError) as error:
            raise UserError(f"{self.path / 'additions.json'}: not the images of an update") from error

    @property
    def home(self) -> RunFolder:
        """Folder of the run that this is a version of; of a run as it was trained, itself."""
        above = self.path.resolve().parent
        return RunFolder(above.parent) if above.name == "versions" else self

    def place(self, name: str) -> str:
        """Returns the folder among the artifacts of the run (`home`) for files of this version."""
        return f"versions/{self.path.name}/{name}" if self.home != self else name

    def version_folder(self, number: int) -> RunFolder:
        """Returns the folder of a version, which need not exist; version 0 is the run as it was trained."""
        return RunFolder(self.path / "versions" / str(number)) if number else self

    def versions(self) -> list[int]:
        """Lists the numbers of the versions that there are, ascending."""
        found = (path.parent.name for path in self.path.glob("versions/*/result.json"))
        return [0, *sorted(int(name) for name in found if name.isdecimal())]

    def version(self, number: int | None) -> RunFolder:
        """Finds a version.

        Args:
            number: Its number; None for the default: the run as it was trained, until another is chosen.

        Raises:
            UserError: If there is none of this number, it is a link or has one for a folder, or the file that names
                the default cannot be read.
        """
        known = self.versions()
        if number is None:
            number = self.default_version()
        if number not in known:
            raise UserError(f"version={number}: {self.path} has {', '.join(map(str, known))}")
        found = self.version_folder(number)
        found._check_folders(*[found.path] * (number > 0))
        return found

    def choose_version(self, number: int) -> RunFolder:
        """Makes a version the default, and returns its folder.

        Raises:
            UserError: If there is none of this number.
        """
        folder = self.version(number)
        if number or (self.path / _DEFAULT).exists():
            self._write(_DEFAULT, json.dumps({"default": number}))
        return folder

    def default_version(self) -> int:
        """Reads the number of the version that commands use; 0 until another is chosen."""
        if not _there(self.path / _DEFAULT):
            return 0
        number = _object(self.path / _DEFAULT, "remove it, and choose a version anew")[1].get("default")
        if type(number) is not int:
            raise UserError(f"{self.path / _DEFAULT}: names no version; remove it, and choose one anew")
        return number

    def save_json(self, name: str, value: Any) -> Path:
        """Writes a JSON file, in which undefined numbers become null and passwords are hidden; returns its path."""
        return self._write(name, json.dumps(_plain(value), indent=1))

    def _check_folders(self, *beside: Path) -> None:
        """Refuses links in the place of folders: commands would write where they lead."""
        for folder in (*beside, *(self.path / name for name in _FOLDERS)):
            if folder.is_symlink():
                raise UserError(
                    f"{folder}: is a link, and no folder of this run; put the folder itself in its place"
                )

    def _present(self) -> list[str]:
        """Names what lies in the folder where a run writes."""
        return [name for name in (*_FOLDERS, *_FILES) if (self.path / name).exists()]

    def _holds_run(self) -> bool:
        """Tells whether a run wrote to the folder; its files may be damaged."""
        with contextlib.suppress(UserError):
            if read_manifest(self.path) is not None:
                return True
        with contextlib.suppress(UserError):
            config = self._stored_config()[1]
            return (
                isinstance(config, dict) and {"method", "task", "data", "partition", "seed"} <= config.keys()
            )
        return False

    def _occupied(self) -> UserError:
        return UserError(
            f"{self.path}: holds a run of another configuration; give another out=DIR, or fresh=true"
        )

    def _stored_config(self) -> tuple[bytes, Any]:
        """Reads config.yaml: its bytes, and what they say."""
        path = self.path / "config.yaml"
        try:
            content = stored_bytes(path)
            return content, stored_yaml(content.decode())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error

    def _read_json(self, name: str) -> dict[str, Any]:
        """Reads an object from a file that the run wrote."""
        content, value = _object(self.path / name, _ANEW)
        if (self.path / "config.yaml").exists():  # else artifacts of the run, from MLflow
            check(self.path, name, content, _ANEW)
        return value

    def _write(self, name: str, text: str) -> Path:
        """Writes a file that is either complete or absent."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if name in _LISTED:
                announce(self.path, name, text.encode())
            with atomic(self.path / name, durable=True) as partial:
                partial.write_text(text)
        except OSError as error:
            raise UserError(f"{self.path / name}: cannot be written ({error.strerror})") from error
        return self.path / name


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a link to nothing is not taken for nothing


def _object(path: Path, advice: str) -> tuple[bytes, dict[str, Any]]:
    """Reads a file of JSON that holds an object: its bytes, and what they say."""
    try:
        content = stored_bytes(path)
        value = plain_json(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); {advice}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not an object of JSON; {advice}")
    return content, value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return redact(value) if isinstance(value, str) else value

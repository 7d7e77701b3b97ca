"""The files that a run writes: their names, how they are written and read, and how their hashes are checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.core.config import Config
from lit_fedad.core.errors import ANEW, RESTORE, UserError, one_line
from lit_fedad.core.files import atomic, stored_bytes, stored_text, unwritable_in_one_line
from lit_fedad.core.plain_values import plain_json, plain_yaml
from lit_fedad.core.text import redact, redacted

MANIFEST = "manifest.json"
"""The list of a run's files with their hashes, which shows whether a file was changed or never written by a run."""

FOLDERS = (
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
_LISTED = ("config.yaml", "calibration.json", "additions.json", "result.json")  # files in the manifest
# Files are removed in this order: those by which a run's folder is recognised come last.
FILES = ("result.json", "calibration.json", "evaluation.json", "partition.json", MANIFEST, "config.yaml")

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What readers of a result raise that are given values of another kind."""

# The number in config.yaml; to be raised when a release cannot open the files of the previous one. 0.1 wrote none.
_FORMAT = 8
_RELEASES = {None: "lit_fedad 0.1", 4: "lit_fedad 0.2"}  # released versions of the package, by format


_LARGEST_YAML = 1 << 20
"""Largest size in bytes of a ``config.yaml``, which takes seconds to read; one of any size would take hours."""


def _advice(folder: Path) -> str:
    """Returns advice on a damaged file of a run; no command can write the files of a version (an update) again."""
    if folder.resolve().parent.name == "versions":
        return "restore it from a copy, or use another version: lit-fedad update run=RUN default=NUMBER"
    return "remove result.json and calibration.json, and the command that began the run writes them anew"


def check_folders(folder: Path, *further: Path) -> None:
    """Refuses links in place of a run's folders: commands would write to where the links lead.

    Args:
        folder: Folder of the run.
        *further: Further folders that must be no links.

    Raises:
        UserError: If one of the folders is a link.
    """
    for inner in (*further, *(folder / name for name in FOLDERS)):
        if inner.is_symlink():
            raise UserError(
                f"{inner}: is a link, and no folder of this run; put the folder itself in its place"
            )


def write_settings(folder: Path, config: Config) -> None:
    """Writes the configuration of a run.

    Raises:
        UserError: If it cannot be written.
    """
    text = yaml.safe_dump({"format": _FORMAT, **redacted(config)}, sort_keys=False)
    write(folder, "config.yaml", text)


def read_settings(folder: Path) -> Config:
    """Reads the configuration of a run for comparison only; it may name any code and must not be used to build parts.

    Raises:
        UserError: If the file is no configuration of a run, was changed, or another version wrote it.
    """
    content, config = _settings(folder)
    _check(folder, "config.yaml", content, RESTORE)
    return config


def check_format(folder: Path) -> None:
    """Refuses the files of a run that another version wrote, whose keys may have another meaning.

    Args:
        folder: Folder of the run, or of a copy that has no manifest.

    Raises:
        UserError: If another version wrote the files, or ``config.yaml`` cannot be read.
    """
    _settings(folder)


def _settings(folder: Path) -> tuple[bytes, Config]:
    """Reads ``config.yaml`` and checks its format: its bytes, and the configuration."""
    path = folder / "config.yaml"
    content, config = read_yaml(path)
    if not isinstance(config, dict) or "method" not in config:
        raise UserError(f"{path}: not the configuration of a run; name another folder")
    version = config.pop("format", None)
    if version != _FORMAT:
        format_number = version if isinstance(version, int | None) else -1
        release = _RELEASES.get(format_number, f"another version of lit_fedad (format {version!s:.20})")
        raise UserError(
            f"{folder}: a run of {release}, which this version cannot open; use that version, or train again"
            f" ({ANEW})"
        )
    return content, config


def read_yaml(path: Path) -> tuple[bytes, Any]:
    """Reads a YAML file: its bytes, and the values in them.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        content = stored_bytes(path, _LARGEST_YAML)
        return content, plain_yaml(content.decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error


@contextmanager
def refused_if_malformed(what: str) -> Iterator[None]:
    """Refuses a file in one line if a block that reads it fails on its values; the file may come from anybody.

    Args:
        what: The file, for the message.

    Raises:
        UserError: If the block raises an error that values of the wrong kind cause (`MALFORMED`).
    """
    try:
        yield
    except MALFORMED as error:
        raise UserError(
            f"{what} does not hold what a run writes ({type(error).__name__}); restore it from a copy"
        ) from error


@contextmanager
def file_named_in_errors(file: Path, given: Iterable[str] = ()) -> Iterator[None]:
    """Puts a run's file before the message of an error, unless the message already begins with a file of the run.

    Args:
        file: The file that the block reads values of, or a folder with several.
        given: Keys that do not come from the file: an error that begins with one of them is left as it is.

    Raises:
        UserError: If the block raises one.
    """
    try:
        yield
    except UserError as error:
        told = (f"{file.parent}: ", *(str(file.parent / name) for name in (file.name, *FILES, *FOLDERS)))
        if str(error).startswith((*told, *(f"{key}=" for key in given))):
            raise
        raise UserError(f"{file}: {error!s:.500}") from error


def there(path: Path) -> bool:
    """Returns whether a path exists; a link counts even if its target does not exist."""
    return path.exists() or path.is_symlink()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Reads an object from a file that the run wrote.

    Raises:
        UserError: If it cannot be read, or was changed.
    """
    content, value = _object(folder / name, _advice(folder))
    if (folder / "config.yaml").exists():  # otherwise artifacts from MLflow, which have no manifest
        _check(folder, name, content, _advice(folder))
    return value


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Reads an object from a JSON file that is not listed in a manifest.

    Raises:
        UserError: If it cannot be read; the message ends with `advice`.
    """
    return _object(path, advice)[1]


def save_json(folder: Path, name: str, value: Any) -> Path:
    """Writes a JSON file, in which undefined numbers become null and passwords are hidden; returns its path.

    Raises:
        UserError: If it cannot be written.
    """
    return write(folder, name, json.dumps(plain(value), indent=1))


def write(folder: Path, name: str, text: str) -> Path:
    """Writes a file that is either complete or absent; returns its path.

    Raises:
        UserError: If it cannot be written.
    """
    with unwritable_in_one_line(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        if name in _LISTED:
            _announce(folder, name, text.encode())
        with atomic(folder / name, durable=True) as partial:
            partial.write_text(text)
    return folder / name


def _object(path: Path, advice: str) -> tuple[bytes, dict[str, Any]]:
    """Reads a JSON file that holds an object: its bytes, and the object."""
    try:
        content = stored_bytes(path)
        value = plain_json(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {advice}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not an object of JSON; {advice}")
    return content, value


def plain(value: Any) -> Any:
    """Returns nested values as they are written to JSON: undefined numbers become None, passwords are hidden."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return redact(value) if isinstance(value, str) else value


def _announce(folder: Path, name: str, content: bytes) -> None:
    """Adds the hash of a file to the manifest before the file is written.

    The hash of the file that it replaces stays in the manifest until the next write. If the process is killed between
    the two writes, the manifest still has the hash of the file that is on disk.

    Raises:
        UserError: If the manifest cannot be read.
        OSError: If the manifest cannot be written.
    """
    listed = {key: list(digests) for key, digests in (read_manifest(folder) or {}).items()}
    try:
        current = [_digest(stored_bytes(folder / name))]
    except OSError:
        current = []
    before = [digest for digest in current if digest in listed.get(name, [])]
    listed[name] = list(dict.fromkeys([*before, _digest(content)]))
    with atomic(folder / MANIFEST, durable=True) as partial:
        partial.write_text(json.dumps(listed, indent=1))


def _check(folder: Path, name: str, content: bytes, advice: str) -> None:
    """Compares a file with the manifest.

    Raises:
        UserError: If the file is not as the run wrote it, or the manifest is missing or cannot be read.
    """
    listed = read_manifest(folder)
    if listed is None:
        raise UserError(f"{folder / MANIFEST}: is missing; {RESTORE}")
    if _digest(content) not in listed.get(name, []):
        raise UserError(f"{folder / name}: changed since the run wrote it; {advice}")


def read_manifest(folder: Path) -> Mapping[str, Sequence[str]] | None:
    """Reads the hashes of a run's files by name; None for a folder without a manifest.

    Raises:
        UserError: If the manifest cannot be read.
    """
    path = folder / MANIFEST
    try:
        listed = plain_json(stored_text(path))
        if not all(isinstance(digests, list) for digests in listed.values()):
            raise ValueError("not a manifest")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {RESTORE}") from error
    return listed


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""The files that a run writes: their names, and how they are written, read, and known by their hashes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.core.config import Config
from lit_fedad.core.errors import ANEW, RESTORE, UserError, one_line
from lit_fedad.core.files import atomic, stored_bytes, stored_text, told_unwritable
from lit_fedad.core.plain_values import plain_json, plain_yaml
from lit_fedad.core.text import redact, redacted

MANIFEST = "manifest.json"
"""The list of a run's files with their hashes: what was changed or never written by a run is recognised."""

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
_LISTED = ("config.yaml", "calibration.json", "additions.json", "result.json")  # in the manifest
# Those by which a run's folder is recognised are removed last.
FILES = ("result.json", "calibration.json", "evaluation.json", "partition.json", MANIFEST, "config.yaml")

# Written to config.yaml. Raise it when a version cannot open the files of the one before; 0.1 wrote none.
_FORMAT = 6
_MAKERS = {None: "lit_fedad 0.1", 4: "lit_fedad 0.2"}


def _advice(folder: Path) -> str:
    """Says what to do about a damaged file: of a version, no command writes it anew."""
    if folder.resolve().parent.name == "versions":
        return "restore it from a copy, or use another version: lit-fedad update run=RUN default=NUMBER"
    return "remove result.json and calibration.json, and the command that began the run writes them anew"


def check_folders(folder: Path, *beside: Path) -> None:
    """Refuses links in the place of a run's folders: commands would write where they lead.

    Args:
        folder: Folder of the run.
        beside: Further folders that must be no links.

    Raises:
        UserError: If one is a link.
    """
    for inner in (*beside, *(folder / name for name in FOLDERS)):
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
    """Reads the configuration of a run to compare it, not to build from it: it may name anything.

    Raises:
        UserError: If the file is not such a configuration, was changed, or another version wrote it.
    """
    content, config = _settings(folder)
    _check(folder, "config.yaml", content, RESTORE)
    return config


def check_format(folder: Path) -> None:
    """Refuses the files of a run that another version wrote; their names may mean something else there.

    Args:
        folder: Folder of the run, or of a copy that has no manifest.

    Raises:
        UserError: If another version wrote them, or it cannot be told.
    """
    _settings(folder)


def _settings(folder: Path) -> tuple[bytes, Config]:
    path = folder / "config.yaml"
    content, config = read_yaml(path)
    if not isinstance(config, dict) or "method" not in config:
        raise UserError(f"{path}: not the configuration of a run; name another folder")
    version = config.pop("format", None)
    if version != _FORMAT:
        known = version if isinstance(version, int | None) else -1
        maker = _MAKERS.get(known, f"another version of lit_fedad (format {version!s:.20})")
        raise UserError(
            f"{folder}: a run of {maker}, which this version cannot open; use that version, or train again"
            f" ({ANEW})"
        )
    return content, config


def read_yaml(path: Path) -> tuple[bytes, Any]:
    """Reads a file of YAML: its bytes, and what they say.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        content = stored_bytes(path)
        return content, plain_yaml(content.decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error


def there(path: Path) -> bool:
    """Tells whether something has the name of a file; a link to nothing is not taken for nothing."""
    return path.exists() or path.is_symlink()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Reads an object from a file that the run wrote.

    Raises:
        UserError: If it cannot be read, or was changed.
    """
    content, value = _object(folder / name, _advice(folder))
    if (folder / "config.yaml").exists():  # else artifacts of the run, from MLflow
        _check(folder, name, content, _advice(folder))
    return value


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Reads a file of JSON that holds an object and no manifest lists.

    Raises:
        UserError: If it cannot be read; `advice` says what to do.
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
    with told_unwritable(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        if name in _LISTED:
            _announce(folder, name, text.encode())
        with atomic(folder / name, durable=True) as partial:
            partial.write_text(text)
    return folder / name


def _object(path: Path, advice: str) -> tuple[bytes, dict[str, Any]]:
    """Reads a file of JSON that holds an object: its bytes, and what they say."""
    try:
        content = stored_bytes(path)
        value = plain_json(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {advice}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not an object of JSON; {advice}")
    return content, value


def plain(value: Any) -> Any:
    """Returns nested values as a file of JSON holds them: without undefined numbers and passwords."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return redact(value) if isinstance(value, str) else value


def _announce(folder: Path, name: str, content: bytes) -> None:
    """Lists a file that is about to be written.

    The file that it replaces stays listed until the next one: a kill between the two leaves no file unknown.

    Raises:
        UserError: If the manifest cannot be read.
        OSError: If it cannot be written.
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
        UserError: If there is one that cannot be read.
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

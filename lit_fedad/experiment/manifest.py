"""The list of a run's files with their hashes: what was changed or never written by a run is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, plain_json, stored_bytes, stored_text

MANIFEST = "manifest.json"


def announce(folder: Path, name: str, content: bytes) -> None:
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


def check(folder: Path, name: str, content: bytes, advice: str) -> None:
    """Compares a file with the manifest.

    Raises:
        UserError: If the file is not as the run wrote it, or the manifest is missing or cannot be read.
    """
    listed = read_manifest(folder)
    if listed is None:
        raise UserError(
            f"{folder / MANIFEST}: is missing; restore it from a copy, or train anew with fresh=true"
        )
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
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())}); restore it from a copy, or train anew with"
            " fresh=true"
        ) from error
    return listed


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""Damages files as disks, transfers and people do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

DAMAGES = ("bit", "bits", "truncated", "empty", "missing", "garbage", "swapped")


class Planted:
    """Code in the form of a pickle."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def damage(path: Path, kind: str, draw: random.Random, other: Path) -> None:
    """Damages a file; ``swapped`` puts the content of another one in its place. Linked copies keep their content."""
    content = bytearray(path.read_bytes())
    path.unlink()  # else a hard link would be damaged with it
    if kind == "missing":
        return
    if kind == "swapped":
        shutil.copyfile(other, path)
        return
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else 16):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "truncated":
        del content[draw.randrange(1, len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "garbage":
        content[:] = draw.randbytes(len(content))
    path.write_bytes(content)


def forge(run: Path, name: str, text: str) -> None:
    """Replaces a file that a run's manifest lists, and its hash as whoever prepares a folder would."""
    (run / name).write_text(text)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest[name] = [hashlib.sha256(text.encode()).hexdigest()]
    (run / "manifest.json").write_text(json.dumps(manifest))

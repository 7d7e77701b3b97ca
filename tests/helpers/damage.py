"""Damages files as disks, transfers and people do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import torch
import yaml

from lit_fedad.core.files import sha256
from lit_fedad.core.identity import identity

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


def forge_config(run: Path, change) -> None:
    """Changes the configuration of a run, and signs its last checkpoint with it."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    forge(run, "config.yaml", yaml.safe_dump(config, sort_keys=False))
    made = identity({key: value for key, value in config.items() if key != "format"})
    _sign(run, lambda meta: f"{made}-{meta['identity'].rpartition('-')[2]}")


def forge_state(run: Path, name: str, change) -> None:
    """Changes a file of a run's last checkpoint, which stays signed."""
    (path,) = run.glob(f"checkpoints/round_*/{name}")
    state = torch.load(path, weights_only=True)
    change(state)
    path.unlink()
    torch.save(state, path)
    _sign(run, lambda meta: meta["identity"])


def plant(checkpoint: Path, name: str, command: str) -> None:
    """Puts code in the place of a file of a checkpoint, and its hash where that of the file was."""
    (checkpoint / name).unlink()  # else a hard link would be changed with it
    torch.save({"server": Planted(command), "history": []}, checkpoint / name)
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][name] = sha256(checkpoint / name)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def _sign(run: Path, identity_of) -> None:
    (path,) = run.glob("checkpoints/round_*/meta.json")
    meta = json.loads(path.read_text())
    files = {name: sha256(path.parent / name) for name in meta["files"]}
    path.write_text(json.dumps({**meta, "files": files, "identity": identity_of(meta)}))

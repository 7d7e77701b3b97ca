"""Checkpoints that are either complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from lit_fedad.errors import UserError


class Checkpoints:
    """The checkpoints of one run: one folder a round, the last one kept.

    A checkpoint is written under a temporary name and renamed when all its files are on disk, so that the previous one
    remains if the process is killed at any moment.

    Args:
        folder: Folder of the checkpoints.
        identity: Hash of what must be equal for a run to be resumed (configuration and backbone weights); None accepts
            any checkpoint.
    """

    def __init__(self, folder: Path, identity: str | None = None) -> None:
        self.folder = folder
        self.identity = identity

    def latest(self) -> Path | None:
        """Returns the folder of the newest complete checkpoint; None if there is none."""
        complete = sorted(self.folder.glob("round_*"))
        return complete[-1] if complete else None

    def begin(self, round: int) -> Path:
        """Creates an empty folder for the files of a round's checkpoint and returns it."""
        partial = self.partial(round)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, round: int, state: dict[str, Any]) -> Path:
        """Writes the server's state beside the files of the other processes and completes the checkpoint.

        Args:
            round: Round that the checkpoint follows.
            state: Server state and history.

        Returns:
            The checkpoint's folder.
        """
        partial, final = self.partial(round), self.folder / f"round_{round + 100_000:06d}"
        torch.save(state, partial / "server.pt")
        (partial / "meta.json").write_text(json.dumps({"round": round, "identity": self.identity}))
        for path in partial.iterdir():
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        _sync(self.folder)
        for older in sorted(self.folder.glob("round_*"))[:-1]:
            shutil.rmtree(older)
        return final

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Loads the server's state of a checkpoint.

        Args:
            path: The checkpoint's folder.

        Returns:
            The round that the checkpoint follows, and the state given to `commit`.

        Raises:
            UserError: If it was written under another configuration, or cannot be read.
        """
        try:
            meta = json.loads((path / "meta.json").read_text())
            state = torch.load(path / "server.pt", map_location="cpu", weights_only=False)
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            raise UserError(f"{path}: the checkpoint cannot be read ({error}); remove the folder") from error
        if self.identity is not None and meta["identity"] != self.identity:
            raise UserError(
                f"{self.folder.parent}: begun under another configuration or with other backbone weights;"
                " give another out=DIR or add fresh=true"
            )
        return meta["round"], state

    def partial(self, round: int) -> Path:
        """Returns the folder of a checkpoint that is not yet complete."""
        return self.folder / f".partial_{round + 100_000:06d}"


def _sync(path: Path) -> None:
    """Writes the content of a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints that are either complete or absent; their files are read as data, and no code in them is run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lit_fedad.core.errors import ANEW, RESTORE, UserError, first_sentence
from lit_fedad.core.files import (
    check_stored,
    check_unpacked,
    forbidden_in_one_line,
    link,
    sha256,
    stored_text,
    sync,
)
from lit_fedad.core.plain_values import check_unfolded, plain_json
from lit_fedad.federation.round_report import RoundReport

_MAX_EXPANSION = 1 << 30
"""Bytes by which the tensors of a file may exceed 16 times its size: views may share the stored values."""


def write_state(state: Any, path: Path) -> None:
    """Writes a nested state of tensors, numbers, texts and containers.

    Raises:
        UserError: If the state holds an object that `read_state` would refuse.
        OSError: If the file cannot be written.
    """
    try:
        # torch gets an open file: given a path, it would hide that a full disk or an interruption caused a failure.
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, (OSError, KeyboardInterrupt, SystemExit)):
            raise error.__context__ from error
        raise
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(str(path)):
        raise UserError(
            f"{path}: a {refused[0]} is kept, which could not be read again; keep tensors, numbers, texts, lists and"
            " dictionaries, or give its class to torch.serialization.add_safe_globals"
        )


def read_state(path: Path, digest: str | None = None, advice: str = RESTORE) -> Any:
    """Reads a state that `write_state` wrote; runs no code that the file may name.

    The file must have the SHA-256 `digest`, unless that is None. `advice` ends the error message if the file cannot be
    read, and says what to do.

    Returns:
        The state, with tensors on the CPU.

    Raises:
        UserError: If the file is missing, was changed, or holds no such state.
    """
    try:
        check_stored(path)
        with forbidden_in_one_line(path):
            check_unpacked(path)
        if digest is not None and sha256(path) != digest:
            raise UserError(f"{path}: changed since it was written; {advice}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        check_unfolded(state)
        _check_tensors(state, path.stat().st_size)
        return state
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in zipfile, pickle, struct or torch
        raise UserError(f"{path}: cannot be read ({first_sentence(error)}); {advice}") from error


def _check_tensors(state: Any, size: int) -> None:
    """Refuses tensors that take little room in the file, but would fill the memory once they are copied.

    Such tensors are large views of few stored values, or have no dense values on the CPU.

    Args:
        state: The nested state.
        size: Size of its file in bytes.

    Raises:
        ValueError: If the state holds such tensors.
    """
    pending, total = [state], 0
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu" or value.is_nested:
                raise ValueError("a tensor is sparse, nested or empty")
            total += value.nbytes
        elif isinstance(value, (dict, list, tuple)):
            pending += value.values() if isinstance(value, dict) else value
    if total > 16 * size + _MAX_EXPANSION:
        raise ValueError("its tensors are larger than what is stored of them")


_SERVER, _META = "server.pt", "meta.json"
_REPORTS_PER_FILE = 50
"""Number of reports of training rounds that are moved together into a file, which is written only once."""
_ROUND_OFFSET = 100_000  # added to rounds in names: names then sort like rounds, which may be negative


class Checkpoints:
    """The checkpoints of one run: one folder for each round, of which the last is kept.

    A checkpoint is written under a temporary name and renamed when all its files are on disk, so that the previous one
    remains if the process is killed at any moment. ``meta.json`` lists its files with their SHA-256. Files that no
    longer change, such as reports of earlier rounds, are links to the files of the previous checkpoint.

    Args:
        folder: Folder of the checkpoints.
        identity: Hash of the configuration and the backbone weights, which must be equal for a run to be resumed; None
            accepts any checkpoint.
        images: Hash of the images and of their partition, which must be equal too; None accepts any checkpoint.
        code: Hashes of the files of the user's own packages that the run uses (`code_of`). A checkpoint of other code
            can be resumed, with a warning: the user may have corrected an error that ended the run. None accepts any.
    """

    def __init__(
        self,
        folder: Path,
        identity: str | None = None,
        images: str | None = None,
        code: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.images = images
        self.code = code

    def latest(self) -> Path | None:
        """Returns the folder of the newest complete checkpoint; None if there is none."""
        complete = sorted(self.folder.glob("round_*"))
        return complete[-1] if complete else None

    def latest_round(self) -> int | None:
        """Returns the newest round with a complete checkpoint, at most 0 during the set-up; None if there is none."""
        latest = self.latest()
        return None if latest is None else int(latest.name.removeprefix("round_")) - _ROUND_OFFSET

    def begin(self, round: int) -> Path:
        """Creates an empty folder for the files of a round's checkpoint and returns it."""
        partial = self.partial(round)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, round: int, state: dict[str, Any]) -> Path:
        """Writes the server's state next to the files of the other processes and completes the checkpoint.

        Raises:
            UserError: If the state holds an object that could not be read again.
        """
        partial, final = self.partial(round), self.folder / _name(round)
        previous = self.latest()
        # Reports of the set-up and of the last round may still change.
        changing, played = _split(state["history"])
        full_files = (len(played) - 1) // _REPORTS_PER_FILE if played else 0
        for number in range(full_files):
            name = f"history_{number:05d}.pt"
            if previous is not None and (previous / name).exists():
                link(previous / name, partial / name)
            else:
                reports = played[number * _REPORTS_PER_FILE : (number + 1) * _REPORTS_PER_FILE]
                write_state([_plain(report) for report in reports], partial / name)
        history = [_plain(report) for report in (*changing, *played[full_files * _REPORTS_PER_FILE :])]
        write_state({**state, "history": history}, partial / _SERVER)
        linked = _linked(partial, previous)
        files = {name: linked.get(name) or sha256(partial / name) for name in sorted(_names(partial))}
        return self._complete(partial, final, self._meta(round, files), linked)

    def adopt(self, other: Checkpoints) -> tuple[Path, dict[str, Any]]:
        """Takes over the last checkpoint of another run, under this run's configuration and images.

        Raises:
            UserError: As in `load`, or if the other run has no checkpoint.
        """
        source = other.latest()
        if source is None:
            raise UserError(f"{other.folder}: holds no checkpoint; give the run's folder back as it was")
        round, state = other.load(source)
        # The hashes are taken over too, so that a file that was changed is still noticed.
        files = read_meta(source)["files"]
        partial = self.begin(round)
        for name in files:
            shutil.copyfile(source / name, partial / name)
        return self._complete(partial, self.folder / _name(round), self._meta(round, files)), state

    def _meta(self, round: int, files: Mapping[str, str]) -> dict[str, Any]:
        kept = {"identity": self.identity, "images": self.images, "code": self.code or {}}
        return {"round": round, **kept, "files": files}

    def _complete(
        self, partial: Path, final: Path, meta: Mapping[str, Any], on_disk: Collection[str] = ()
    ) -> Path:
        """Renames a checkpoint to its final name when all of its files are on disk, and removes older checkpoints."""
        (partial / _META).write_text(json.dumps(meta))
        for path in partial.iterdir():
            if path.name not in on_disk:
                sync(path)
        sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        sync(self.folder)
        self.remove_older()
        return final

    def remove_older(self) -> None:
        """Removes all complete checkpoints but the newest, including those that a killed process left behind."""
        for older in sorted(self.folder.glob("round_*"))[:-1]:
            shutil.rmtree(older)

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Loads the server's state of a checkpoint.

        Returns:
            The round that the checkpoint follows, and the state given to `commit`.

        Raises:
            UserError: If the checkpoint was written under another configuration or with other images, or one of its
                files is missing or changed, or a file does not belong to it.
        """
        meta = read_meta(path)
        if self.identity is not None and meta["identity"] != self.identity:
            raise UserError(
                f"{self.folder.parent}: begun under another configuration or with other backbone weights; {ANEW}"
            )
        self.check_images(path)
        old, new = meta["code"], self.code
        if new is not None and (changed := [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]):
            warnings.warn(
                f"{self.folder.parent}: {changed[0]} was changed after its last round", stacklevel=2
            )
        state = read_state(path / _SERVER, meta["files"][_SERVER])
        names = sorted(name for name in meta["files"] if name.startswith("history_"))
        parts = [read_state(path / name, meta["files"][name]) for name in names]
        try:
            changing, last = _split([RoundReport(**report) for report in state["history"]])
            earlier = [RoundReport(**report) for part in parts for report in part]
            return meta["round"], {**state, "history": [*changing, *earlier, *last]}
        except (TypeError, KeyError) as error:
            raise UserError(f"{path / _SERVER}: not the state of a server") from error

    def check_images(self, path: Path) -> None:
        """Refuses a checkpoint of other images.

        Raises:
            UserError: If it was written with other images, or with another partition of them.
        """
        if self.images is not None and read_meta(path)["images"] != self.images:
            raise UserError(
                f"{self.folder.parent}: begun with other images, or with another partition of them; give back those"
                " that it was begun with, or another out=DIR"
            )

    def partial(self, round: int) -> Path:
        """Returns the folder of a checkpoint that is not yet complete."""
        return self.folder / f".partial_{round + _ROUND_OFFSET:06d}"


def read_meta(path: Path) -> dict[str, Any]:
    """Reads the ``meta.json`` of a checkpoint: round, identity, images, own code, and SHA-256 by file name.

    Raises:
        UserError: If it cannot be read, or the folder does not hold exactly the files that it lists.
    """
    try:
        meta = plain_json(stored_text(path / _META))
        round, files, _, _ = meta["round"], meta["files"], meta["identity"], meta["images"]
        dicts = isinstance(files, dict) and isinstance(meta.setdefault("code", {}), dict)
        named, present = {_META, *files}, {_META} | _names(path)
        if _name(round) != path.name or not dicts or _SERVER not in files:
            raise ValueError("it is of another checkpoint")
        for name in files.keys() & present:
            check_stored(path / name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path / _META}: cannot be read ({error}); {RESTORE}") from error
    if lost := sorted(named - present):
        raise UserError(f"{path / lost[0]}: is missing; {RESTORE}")
    if foreign := sorted(present - named):
        raise UserError(f"{path / foreign[0]}: is not part of this checkpoint; remove it")
    return meta


def _split(history: Sequence[RoundReport]) -> tuple[list[RoundReport], list[RoundReport]]:
    """Separates the reports of the set-up from those of training rounds."""
    return [r for r in history if r.round <= 0], [r for r in history if r.round > 0]


def _plain(report: RoundReport) -> dict[str, Any]:
    """Returns the fields of a report by name, as plain values."""
    # `asdict` is slow, as it copies every number. Only `trained` may need it, which is empty in most rounds.
    return asdict(report) if report.trained else vars(report)


def _name(round: int) -> str:
    return f"round_{round + _ROUND_OFFSET:06d}"


def _names(folder: Path) -> set[str]:
    """Lists the files of a checkpoint without its meta.json and the hidden files that file systems create."""
    return {path.name for path in folder.iterdir() if path.name != _META and not path.name.startswith(".")}


def _linked(folder: Path, previous: Path | None) -> dict[str, str]:
    """Returns the SHA-256 by name of files that are links to files of the previous checkpoint."""
    if previous is None:
        return {}
    files = read_meta(previous)["files"]
    names = files.keys() & _names(folder)
    return {name: files[name] for name in names if (folder / name).samefile(previous / name)}

"""Checkpoints that are either complete or absent, of files that are read as data alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lit_fedad.core.errors import ANEW, RESTORE, UserError, first_sentence
from lit_fedad.core.files import check_stored, check_unpacked, link, sha256, stored_text, sync, told_forbidden
from lit_fedad.core.plain_values import check_unfolded, plain_json
from lit_fedad.federation.round_report import RoundReport

_MOST_UNFOLDED = 1 << 30
"""Most bytes of tensors that may share what is stored of them, beside 16 times those of the file."""


def write_state(state: Any, path: Path) -> None:
    """Writes a nested state of tensors, numbers, texts and containers.

    Raises:
        UserError: If the state holds an object that `read_state` would refuse.
        OSError: If the file cannot be written.
    """
    try:
        # Given a path, torch hides the cause of a failure: a full disk, or an interruption, looks like a bug.
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

    The file must have the SHA-256 `digest`, unless that is None; `advice` says what to do where it cannot be read.

    Returns:
        The state, tensors on the CPU.

    Raises:
        UserError: If the file is missing, was changed, or holds something else.
    """
    try:
        check_stored(path)
        with told_forbidden(path):
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
    """Refuses a state of tensors that are views of little, or have no values, and would fill the memory as copies.

    Args:
        state: The nested state.
        size: Bytes of its file.

    Raises:
        ValueError: If it holds some.
    """
    parts, total = [state], 0
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            if part.layout is not torch.strided or part.device.type != "cpu" or part.is_nested:
                raise ValueError("a tensor is sparse, nested or empty")
            total += part.nbytes
        elif isinstance(part, (dict, list, tuple)):
            parts += part.values() if isinstance(part, dict) else part
    if total > 16 * size + _MOST_UNFOLDED:
        raise ValueError("its tensors are larger than what is stored of them")


_SERVER, _META = "server.pt", "meta.json"
_REPORTS = 50
"""Reports of training rounds in a file of their own, which is written once."""
_FIRST = 100_000  # so that names sort as rounds do, also those of set-up


class Checkpoints:
    """The checkpoints of one run: one folder a round, the last one kept.

    A checkpoint is written under a temporary name and renamed when all its files are on disk, so that the previous one
    remains if the process is killed at any moment. ``meta.json`` names its files with their SHA-256. What
    does not change any more, such as the reports of earlier rounds, is a link to the file of the previous checkpoint.

    Args:
        folder: Folder of the checkpoints.
        identity: Hash of what must be equal for a run to be resumed (configuration and backbone weights); None accepts
            any checkpoint.
        images: Hash of the images and of their partition, which must be equal likewise; None accepts any.
    """

    def __init__(self, folder: Path, identity: str | None = None, images: str | None = None) -> None:
        self.folder = folder
        self.identity = identity
        self.images = images

    def latest(self) -> Path | None:
        """Returns the folder of the newest complete checkpoint; None if there is none."""
        complete = sorted(self.folder.glob("round_*"))
        return complete[-1] if complete else None

    def latest_round(self) -> int | None:
        """Returns the number of the newest complete round, at most 0 within the set-up; None if there is none."""
        latest = self.latest()
        return None if latest is None else int(latest.name.removeprefix("round_")) - _FIRST

    def begin(self, round: int) -> Path:
        """Creates an empty folder for the files of a round's checkpoint and returns it."""
        partial = self.partial(round)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, round: int, state: dict[str, Any]) -> Path:
        """Writes the server's state beside the files of the other processes and completes the checkpoint.

        Raises:
            UserError: If the state holds an object that could not be read again.
        """
        partial, final = self.partial(round), self.folder / _name(round)
        previous = self.latest()
        # Reports of the set-up and of the last round may still change.
        changing, played = _split(state["history"])
        whole = (len(played) - 1) // _REPORTS if played else 0
        for number in range(whole):
            name = f"history_{number:05d}.pt"
            if previous is not None and (previous / name).exists():
                link(previous / name, partial / name)
            else:
                reports = played[number * _REPORTS : (number + 1) * _REPORTS]
                write_state([_plain(report) for report in reports], partial / name)
        history = [_plain(report) for report in (*changing, *played[whole * _REPORTS :])]
        write_state({**state, "history": history}, partial / _SERVER)
        linked = _linked(partial, previous)
        files = {name: linked.get(name) or sha256(partial / name) for name in sorted(_names(partial))}
        meta = {"round": round, "identity": self.identity, "images": self.images, "files": files}
        return self._complete(partial, final, meta, linked)

    def adopt(self, other: Checkpoints) -> tuple[Path, dict[str, Any]]:
        """Takes over the last checkpoint of another run, under this run's configuration and images.

        Raises:
            UserError: As `load`, or if there is none.
        """
        source = other.latest()
        if source is None:
            raise UserError(f"{other.folder}: holds no checkpoint; give the run's folder back as it was")
        round, state = other.load(source)
        # A file that was changed since does not fit its hash, here as there.
        files = read_meta(source)["files"]
        partial = self.begin(round)
        for name in files:
            shutil.copyfile(source / name, partial / name)
        meta = {"round": round, "identity": self.identity, "images": self.images, "files": files}
        return self._complete(partial, self.folder / _name(round), meta), state

    def _complete(
        self, partial: Path, final: Path, meta: Mapping[str, Any], on_disk: Collection[str] = ()
    ) -> Path:
        """Gives a checkpoint its name when all of its files are on disk, and removes older ones."""
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
        """Removes all complete checkpoints but the newest, also those that a killed process had no time to remove."""
        for older in sorted(self.folder.glob("round_*"))[:-1]:
            shutil.rmtree(older)

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Loads the server's state of a checkpoint.

        Returns:
            The round that the checkpoint follows, and the state given to `commit`.

        Raises:
            UserError: If it was written under another configuration or with other images, or a file in it is missing,
                foreign or changed.
        """
        meta = read_meta(path)
        if self.identity is not None and meta["identity"] != self.identity:
            raise UserError(
                f"{self.folder.parent}: begun under another configuration or with other backbone weights; {ANEW}"
            )
        self.check_images(path)
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
            UserError: It was written with other images, or with another partition of them.
        """
        if self.images is not None and read_meta(path)["images"] != self.images:
            raise UserError(
                f"{self.folder.parent}: begun with other images, or with another partition of them; give back those"
                " that it was begun with, or another out=DIR"
            )

    def partial(self, round: int) -> Path:
        """Returns the folder of a checkpoint that is not yet complete."""
        return self.folder / f".partial_{round + _FIRST:06d}"


def read_meta(path: Path) -> dict[str, Any]:
    """Reads what a checkpoint says of itself: round, identity, images, and SHA-256 by name of file.

    Raises:
        UserError: If it cannot be read, or the folder does not hold exactly the files that it names.
    """
    try:
        meta = plain_json(stored_text(path / _META))
        round, files, _, _ = meta["round"], meta["files"], meta["identity"], meta["images"]
        named, present = {_META, *files}, {_META} | _names(path)
        if _name(round) != path.name or not isinstance(files, dict) or _SERVER not in files:
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
    # `asdict` copies every number, and turns what `trained` holds into plain values; few rounds have that.
    return asdict(report) if report.trained else vars(report)


def _name(round: int) -> str:
    return f"round_{round + _FIRST:06d}"


def _names(folder: Path) -> set[str]:
    """Names the files of a checkpoint but for its meta.json and for what file systems hide there."""
    return {path.name for path in folder.iterdir() if path.name != _META and not path.name.startswith(".")}


def _linked(folder: Path, previous: Path | None) -> dict[str, str]:
    """Finds files that are links to those of the previous checkpoint: their SHA-256 by name."""
    if previous is None:
        return {}
    files = read_meta(previous)["files"]
    names = files.keys() & _names(folder)
    return {name: files[name] for name in names if (folder / name).samefile(previous / name)}

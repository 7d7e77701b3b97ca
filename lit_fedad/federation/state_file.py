"""Files of state: written whole, known by their hash, read as data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import sha256

_ADVICE = "restore it from a copy, or begin anew with fresh=true"


def write_state(state: Any, path: Path) -> None:
    """Writes a nested state of tensors, numbers, texts and containers.

    Args:
        state: The state. A class of its own must be known to `torch.serialization.add_safe_globals`.
        path: The file.

    Raises:
        UserError: If the state holds an object that `read_state` would refuse.
        OSError: If the file cannot be written.
    """
    try:
        # Given a path, torch hides the cause of a failure: a full disk looks like a bug.
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(str(path)):
        raise UserError(
            f"{path}: a {refused[0]} is kept, which could not be read again; keep tensors, numbers, texts, lists and"
            " dictionaries, or give its class to torch.serialization.add_safe_globals"
        )


def read_state(path: Path, digest: str | None = None, advice: str = _ADVICE) -> Any:
    """Reads a state that `write_state` wrote; runs no code that the file may name.

    Args:
        path: The file.
        digest: SHA-256 that the file must have; None accepts any.
        advice: What to do where it cannot be read.

    Returns:
        The state, tensors on the CPU.

    Raises:
        UserError: If the file is missing, was changed, or holds something else.
    """
    try:
        if digest is not None and sha256(path) != digest:
            raise UserError(f"{path}: changed since it was written; {advice}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in zipfile, pickle, struct or torch
        raise UserError(f"{path}: cannot be read ({_cause(error)}); {advice}") from error


def _cause(error: Exception) -> str:
    """Returns the first sentence of an error: torch's own advice is to read the file without protection."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0][:160]

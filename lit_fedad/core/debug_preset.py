"""Fits a debug preset to the data that a configuration chose: each kind has other limits of its size."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, open_dict


def fit_preset(composed: DictConfig, plain: DictConfig, reader: Callable[..., Any]) -> None:
    """Takes back what a preset says of data that are not of the kind meant.

    Keys of the data that only the preset names stay where the reader takes them; parts of the data take those that they
    have and that are null. Images in memory keep the size that the data's ``size`` says, if it does.

    Args:
        composed: The configuration with the preset; it is changed.
        plain: The configuration without the preset.
        reader: Target of the data.
    """
    limits = {
        key: value for key, value in composed.data.items() if key not in plain.data or plain.data[key] is None
    }
    parts = [part for part in composed.data.values() if isinstance(part, DictConfig) and "_target_" in part]
    returned = typing.get_type_hints(reader)["return"]
    with open_dict(composed):
        for part in parts:
            part.update({key: value for key, value in limits.items() if key in part and part[key] is None})
        for key in set(composed.data) - set(plain.data) - set(inspect.signature(reader).parameters):
            del composed.data[key]
        in_memory = hasattr(returned, "channels")
        if in_memory and composed.image.size != plain.image.size:  # the preset's, not the command's
            composed.image.size = plain.data.get("size", composed.image.size)

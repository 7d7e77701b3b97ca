"""Adapts the settings of the debug preset (``debug=``) to the method and the data of the run."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lit_fedad.core.building import locate, parameters_of
from lit_fedad.core.nested import flatten
from lit_fedad.core.sizes import gives_arrays

_OF_GROUPS = r"(?!debug=)\w+=|\+*(data|image)\."
"""Beginning of overrides that choose a file of a group or set top-level keys, and of keys of data and images."""


def without_preset(overrides: Iterable[str]) -> list[str]:
    """Lists overrides of groups, and of data and images, without the debug preset; others may be keys of the preset."""
    return [override for override in overrides if re.match(_OF_GROUPS, override)]


def kept_stages(plain: DictConfig, given: Collection[str]) -> list[str]:
    """Lists the override that keeps a partition in stages under the preset, whose own has none.

    Args:
        plain: The configuration without the preset, with Hydra's own section.
        given: Keys that the command line sets.
    """
    kept = "stages" in plain.partition and "partition" not in given
    return [f"partition={plain.hydra.runtime.choices.partition}"] if kept else []


def fit_preset(
    composed: DictConfig, plain: DictConfig, reader: Callable[..., Any], given: Collection[str]
) -> None:
    """Adapts a debug preset to the method and to the data.

    The preset's ``most`` has upper limits by the last word of a key (``epochs`` for ``local_epochs``). Larger numbers
    of method and encoder are lowered to these limits, unless the command gives them or they refer to another key
    (``${condensation.steps}``), which the preset or the command sets.

    Keys of the data or the partition that only the preset names are kept if the reader takes them; parts of the data
    take those of them that they have and that are null. Images in memory keep the size that the data's ``size`` says,
    if there is one. Classes that come in stages still do so, by default one stage in each round, and images that a
    single client holds (``method=centralised``) stay with that client. A backbone that the command leaves out stays
    out.

    Args:
        composed: The configuration with the preset, which is changed in place.
        plain: The configuration without the preset.
        reader: The reader of the data.
        given: Keys that the command gives.
    """
    limits = {
        key: value for key, value in composed.data.items() if key not in plain.data or plain.data[key] is None
    }
    parts = [part for part in composed.data.values() if isinstance(part, DictConfig) and "_target_" in part]
    with open_dict(composed):
        if "_target_" not in composed.backbone:
            composed.backbone = None
        most = composed.pop("most", {})
        settings = {name: OmegaConf.to_container(composed[name]) for name in ("method", "encoder")}
        # A section that is given counts with its keys.
        asked = tuple(f"{key}." for key in given if "." in key)
        for key, value in flatten(settings).items():
            word = re.split(r"[._]", key)[-1]
            if word not in most or f"{key}.".startswith(asked):
                continue
            if isinstance(value, int) and value > most[word]:
                OmegaConf.update(composed, key, most[word])
        for part in parts:
            part.update({key: value for key, value in limits.items() if key in part and part[key] is None})
        for group, taker in (("data", reader), ("partition", locate(composed.partition._target_))):
            for key in set(composed[group]) - set(plain[group]) - set(parameters_of(taker)):
                if f"{group}.{key}" not in given:
                    del composed[group][key]
        # The size differs from the plain one, so the preset has set it, not the command.
        if gives_arrays(reader) and composed.image.size != plain.image.size:
            composed.image.size = plain.data.get("size", composed.image.size)
        if "stages" in plain.partition and "partition" not in given:
            few = {"stages": max(composed.rounds, 1), "imbalance": 1}
            composed.partition.update({k: v for k, v in few.items() if f"partition.{k}" not in given})
        elif plain.partition.keys() == {"_target_"} and "partition.clients" not in given:
            composed.partition = plain.partition

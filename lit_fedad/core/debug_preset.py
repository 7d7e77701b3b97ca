"""Fits what ``debug=`` sets to the method and the data that it is composed with."""

import re
from collections.abc import Callable, Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lit_fedad.core.building import locate, parameters_of
from lit_fedad.core.nested import flatten
from lit_fedad.core.sizes import gives_arrays


def fit_preset(
    composed: DictConfig, plain: DictConfig, reader: Callable[..., Any], given: Collection[str]
) -> None:
    """Fits a debug preset to the method and to the data.

    Numbers of method and encoder become those that the preset's ``most`` has for the last word of their key (``epochs``
    of ``local_epochs``), where they are larger and the command does not give them: ``given`` has its keys.

    Keys of the data that only the preset names stay where the reader takes them; parts of the data take those that they
    have and that are null. Images in memory keep the size that the data's ``size`` says, if it does. Classes that come
    in stages still do, a stage a round, and images that one client holds (``method=centralised``) stay with it. A
    backbone that the command leaves out stays out.
    """
    limits = {
        key: value for key, value in composed.data.items() if key not in plain.data or plain.data[key] is None
    }
    parts = [part for part in composed.data.values() if isinstance(part, DictConfig) and "_target_" in part]
    with open_dict(composed):
        if "_target_" not in composed.backbone:
            composed.backbone = None
        most = composed.pop("most", {})
        settings = {
            name: OmegaConf.to_container(composed[name], resolve=True) for name in ("method", "encoder")
        }
        for key, value in flatten(settings).items():
            word = re.split(r"[._]", key)[-1]
            if word in most and key not in given and isinstance(value, int) and value > most[word]:
                OmegaConf.update(composed, key, most[word])
        for part in parts:
            part.update({key: value for key, value in limits.items() if key in part and part[key] is None})
        for group, taker in (("data", reader), ("partition", locate(composed.partition._target_))):
            for key in set(composed[group]) - set(plain[group]) - set(parameters_of(taker)):
                if f"{group}.{key}" not in given:
                    del composed[group][key]
        # The preset's size, not the command's.
        if gives_arrays(reader) and composed.image.size != plain.image.size:
            composed.image.size = plain.data.get("size", composed.image.size)
        if "stages" in plain.partition and "stages" not in composed.partition:
            few = {"clients": composed.partition.clients, "stages": max(composed.rounds, 1), "imbalance": 1}
            composed.partition = {**plain.partition, **few}
        elif plain.partition.keys() == {"_target_"} and "partition.clients" not in given:
            composed.partition = plain.partition

"""Finds settings of a command that contradict each other, which are refused, or that its run does not use."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.core.building import locate, parameters_of, takes
from lit_fedad.core.config import Config, chosen, unresolved
from lit_fedad.core.config_groups import config_groups, files_of
from lit_fedad.core.errors import UserError
from lit_fedad.core.nested import value_at
from lit_fedad.core.options import key_of
from lit_fedad.core.sizes import gives_arrays
from lit_fedad.core.typed_words import given_keys


def check_conflicts(config: Config, overrides: Sequence[str]) -> None:
    """Refuses settings of a command and its presets that contradict each other.

    Args:
        config: The composed configuration.
        overrides: Overrides of the command.

    Raises:
        UserError: Naming the setting, the preset that sets it, and what to give instead.
    """
    _check_presets(config, overrides)
    _check_form_of_images(overrides)


def _check_presets(config: Config, overrides: Sequence[str]) -> None:
    """Refuses settings of a preset for a group if the file that the command chooses for the group lacks them."""
    keys = {key.lstrip("~") for key in given_keys(overrides)}
    if not (keys & set(config_groups())) - {"method", "debug"}:
        return  # a method's own presets fit each other
    files = chosen(overrides)
    given_prefixes = tuple(f"{key}." for key in keys)
    for group, name in files.items():
        section = config.get(group)
        if name is None or not isinstance(section, Mapping) or "_target_" not in section:
            continue
        file_section = _file(files_of(group), name) | {"_target_": section["_target_"]}
        set_by_others = {
            k: v for k, v in section.items() if not any(o.startswith(f"{group}.{k}.") for o in given_prefixes)
        }
        not_taken = {
            key: value for key, value in set_by_others.items() if not _takes(file_section, key, value)
        }
        if not not_taken:
            continue
        if group == "task":
            locate(config["method"]["client"]["_target_"]).check_task(locate(section["_target_"]))
        method = _file(files_of("method"), str(files["method"]))
        setter = "method" if not_taken.keys() & method.get(group, {}).keys() else "experiment"
        sections = {stem: _file(files_of(group), stem) for stem in files_of(group)}
        fitting = [
            stem
            for stem, one in sections.items()  # some files set keys of other groups too, and have a section for each
            if all(_takes(one.get(group, one), *item) for item in not_taken.items())
        ]
        ways = [f"{group}={' or '.join(fitting)}"] if 0 < len(fitting) < 5 else []
        if not not_taken.keys() & file_section.keys():
            ways.append(" ".join(f"~{group}.{key}" for key in not_taken))
        raise UserError(
            f"{setter}={files.get(setter)} sets {' and '.join(f'{group}.{key}' for key in not_taken)}, which"
            f" {group}={name} does not take; give {', or '.join(ways or [f'another {group}'])}"
        )


_OF_IMAGES = re.compile(r"\$\{(?:oc\.select:)?((?:image|data)\.\w+)|\$\{pixels:(\w+)")
"""References to the sections that describe the images: ``${image.size}``, ``${pixels:mean}``."""


def _check_form_of_images(overrides: Sequence[str]) -> None:
    """Refuses size, channels or statistics of images that a command sets in a part that takes them from the images."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not re.fullmatch(r"(task|method|encoder|features)\..*(image_size|channels|inputs|mean|std)", key):
            continue
        config = unresolved([other for other in overrides if other is not override])
        as_written = value_at(config, key)
        if isinstance(as_written, str) and (reference := _OF_IMAGES.search(as_written)):
            name = reference[2]
            sections = [place for place in ("data", "data.normal") if name in (value_at(config, place) or ())]
            source = reference[1] or f"{(*sections, 'image')[0]}.{name}"
            raise UserError(f"{override}: it is that of the images everywhere; give {source}={value}")


def _takes(file_section: Mapping[str, Any], key: str, value: Any) -> bool:
    """Returns whether a setting fits a file's section.

    The section must take the key. If the value is a section without ``_target_``, the file must have such a section to
    be changed; if it has a ``_target_``, that must take the keys that the file gives for this section.
    """
    if key not in file_section:
        return "_target_" in file_section and key in parameters_of(locate(file_section["_target_"]))
    if not isinstance(value, Mapping):
        return True
    if "_target_" not in value:
        return file_section[key] is not None
    inner = file_section[key].keys() if isinstance(file_section[key], Mapping) else set()
    return inner - {"_target_", "_partial_"} <= parameters_of(locate(value["_target_"])).keys()


def _file(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """Reads a group's file, merged over the files of the group that it extends; empty if there is no such file."""
    if name not in files:
        return {}
    content = yaml.safe_load(files[name].read_text()) or {}
    bases = [base for base in content.pop("defaults", ()) if isinstance(base, str) and base != "_self_"]
    merged: dict[str, Any] = {}
    for base in bases:
        merged |= _file(files, base)
    return merged | content


_BY_REFERENCE = frozenset(
    ("backbone", "condensation", "distillation", "encoder", "features", "grid", "public", "warmup")
)
"""Sections and keys that a run uses only if another section refers to them (``${grid}``) or takes them."""

_OF_ANOMALIES = (
    "calibration", "evaluation.alone", "evaluation.alpha", "evaluation.pro_limit", "evaluation.spro_limit",
)  # fmt: skip
_OF_CLASSES = ("evaluation.client_test",)
"""Sections and keys that are used only in runs of one kind of task: anomaly detection or classification."""

_OF_WORKERS = ("simulation.address", "simulation.cpus", "simulation.gpus")
"""Keys that are used only in runs with Ray workers."""


def warn_of_unread(overrides: Sequence[str]) -> None:
    """Warns of overrides of a command that its run does not use, and of a task whose encoder its preset replaces."""
    for given in unread(overrides):
        warnings.warn(f"{given} has no effect: nothing of this run reads it", stacklevel=2)
    if replaced := replaced_encoder(overrides):
        warnings.warn(replaced, stacklevel=2)


def replaced_encoder(overrides: Sequence[str]) -> str | None:
    """Says if a task that a command chooses comes with an encoder that the run's preset replaces by its own.

    Nothing is said of a task that the preset chooses too, of frozen features, and where the command chooses an encoder.

    Args:
        overrides: Overrides of a configuration that can be composed.

    Returns:
        One line that names the task, the preset and both encoders; None where the task has its encoder.
    """
    others = [override for override in overrides if key_of(override) != "task"]
    if len(others) == len(overrides) or any(key_of(override) == "encoder" for override in others):
        return None
    files = chosen(overrides)
    task, encoder = files["task"], _encoder_of(files["task"])
    if encoder in (None, files["encoder"]) or files["features"] == "frozen" or chosen(others)["task"] == task:
        return None
    return (
        f"task={task} comes with encoder={encoder}, and experiment={files['experiment']} replaces it by"
        f" {files['encoder']}; give encoder={encoder} for the task's own"
    )


def _encoder_of(task: str | None) -> str | None:
    """Returns the encoder that a task's file chooses, or the nearest of the files that it extends; None without one."""
    files = files_of("task")
    entries = yaml.safe_load(files[task].read_text()).get("defaults", ()) if task in files else ()
    for entry in entries:
        if isinstance(entry, dict) and (key := next(iter(entry))).startswith("override /encoder"):
            return str(entry[key])
    bases = (entry for entry in entries if isinstance(entry, str) and entry != "_self_")
    return next((found for base in bases if (found := _encoder_of(base))), None)


def unread(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of a command that its run does not use.

    Args:
        overrides: Overrides of a configuration that can be composed.

    Returns:
        Overrides of sections that no part of the run refers to or takes as an argument, and overrides of sections that
        belong to the other kind of task, in their order.
    """
    sections = (*_BY_REFERENCE, *_OF_ANOMALIES, *_OF_CLASSES, *_OF_WORKERS)
    candidates = [override for override in overrides if _names(override, sections)]
    candidates = [word for word in candidates if not word.startswith("~") and not word.endswith("=null")]
    if not candidates:
        return []
    config = unresolved(overrides)
    used = _referred(config) | _taken(config) | _used_by_kind(config)
    return [override for override in candidates if not _names(override, used)]


def _used_by_kind(config: Config) -> set[str]:
    """Returns the keys that only some kinds of runs use, as far as this run uses them."""
    workers = {*_OF_WORKERS} if config["simulation"]["workers"] else set()
    if getattr(locate(config["task"]["_target_"]), "kind", None) == "classification":
        in_stages = not config["partition"]["_target_"].startswith("lit_fedad.data.strategies.")
        return workers | {*(_OF_CLASSES if in_stages else ())}
    used = workers | {*_OF_ANOMALIES}
    if "saturation" not in config["data"]:
        used.discard("evaluation.spro_limit")
    if gives_arrays(locate(config["data"]["_target_"])):  # images in memory have no masks
        used.discard("evaluation.pro_limit")
    return used


def _names(override: str, sections: Iterable[str]) -> bool:
    """Returns whether an override sets one of some sections, a part of it, or a section that contains it."""
    key = f"{key_of(override)}."
    return any(key.startswith(f"{name}.") or f"{name}.".startswith(key) for name in sections)


def _taken(config: Config) -> set[str]:
    """Returns the sections that are built for the task or the server, which takes them as arguments."""
    takers = {"backbone": config["task"], "public": config["method"]["server"]}
    return {name for name, taker in takers.items() if takes(taker, name)}


def _referred(config: Config) -> set[str]:
    """Returns the dotted keys that sections refer to, directly or through other keys."""
    referred: set[str] = set()
    pending: list[Any] = [section for name, section in config.items() if name not in _BY_REFERENCE]
    while pending:
        for reference in set(_references(pending.pop())) - referred:
            referred.add(reference)
            pending.append(value_at(config, reference))
    return referred


def _references(value: Any) -> Iterator[str]:
    """Yields the dotted keys in references (``${}``) anywhere in a nested value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _references(part)
    elif isinstance(value, str) and "${" in value:
        yield from re.findall(r"[a-z]\w*(?:\.\w+)*", value)

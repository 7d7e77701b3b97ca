"""Refuses overrides that Hydra misunderstands or a run does not use, and says in one line what Hydra refuses."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import OverrideParseException

from lit_fedad.core.building import nearest
from lit_fedad.core.config_groups import choices, config_groups
from lit_fedad.core.debug_preset import without_preset
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.nested import value_at
from lit_fedad.core.suggestions import instead
from lit_fedad.core.typed_words import advice

_EVERY_RUN_HAS = (
    "data", "partition", "task", "encoder", "federation", "tracking", "method", "image", "fabric",
)  # fmt: skip

RENAMED = {
    "feddymem_trained": "method=feddymem",
    "feddymem_drawn": "method=federated_bank federation=secure",
    "feddymem_noised": "method=federated_bank federation/privacy=central federation.privacy.epsilon=8",
    "feddymem_close": "method=feddymem with the settings of docs/lab/feddymem.md",
}
"""Settings that replace methods of version 0.2, by the name of the method."""

_NO_PRESET = (
    "the method's YAML brings no preset: its first line must be '# @package _global_', and its defaults need"
    " '- _self_' and '- /experiment: default'"
)


def check_given(overrides: Sequence[str]) -> None:
    """Refuses overrides that Hydra would misunderstand, and the removal of groups that every run has."""
    named = {override.lstrip("+") for override in overrides}
    if removed := [g for g in _EVERY_RUN_HAS if {f"{g}=null", f"~{g}"} & named]:
        raise UserError(f"{removed[0]}=null: every run has one; leave this out, or name another")
    for override in overrides:
        # Hydra looks for a file with the name of every key, so keys must not be too long for a file name.
        if not re.match(r"~|\+{0,2}[^=+-][^=]{0,250}=", override):
            raise UserError(f"'{override:.100}' is not of the form key=value")
        if re.match(r"[+~]*hydra[./=]", override):
            raise UserError(f"{override:.100}: Hydra starts nothing here; a run's folder is given by out=DIR")
        if re.fullmatch(r"\+*(data|public)\.root=(\"\"|'')?", override):
            raise UserError(f"{override}: an empty path, as of a shell variable that is not set; give one")
        _check_choice(override)


def _check_choice(override: str) -> None:
    """Refuses a choice of a group without such a file in the package: Hydra would read any file behind ``../``."""
    key, _, choice = override.lstrip("+").partition("=")
    group, name = key.partition("@")[0], choice.strip("'\"")
    if (path := group.replace(".", "/")) != group and path in config_groups() and name in choices(path):
        raise UserError(f"{override}: a file of a group is chosen with a slash; give {path}={name}")
    if group not in config_groups() or name in ("null", "???", *choices(group)):
        return
    if "," not in name or name.startswith("["):  # for a,b Hydra's own error says that these are two values
        raise UserError(_no_choice(group, name))


def check_read(overrides: Sequence[str], chosen: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuses a method without a preset, and settings of an encoder or a loss that the run does not use."""
    if "experiment" not in chosen and not any(o.startswith("~experiment") for o in overrides):
        raise UserError(_NO_PRESET)
    encoder = [override for override in overrides if re.match(r"[+~]*encoder[.=]", override)]
    if encoder and chosen.get("features") == "frozen":
        raise UserError(
            f"{encoder[0]}: features are frozen, and no encoder is trained on pixels; give features=train"
        )
    loss = [override for override in overrides if override.startswith("contrastive_loss=")]
    if loss and "warmup_loss" not in config["task"]:
        raise UserError(f"{loss[0]}: this task has a loss of its own; give task=contrastive, or leave it out")


def explain(
    error: Exception, overrides: Sequence[str], composed: Callable[[Sequence[str]], Mapping[str, Any]]
) -> str:
    """Shortens Hydra's message to one line.

    Args:
        error: The error of Hydra or OmegaConf.
        overrides: The overrides that it refuses.
        composed: Returns the unresolved configuration of other overrides; empty where it cannot be composed.
    """
    text = one_line(error)
    if match := re.search(r"UserError raised while resolving interpolation: (.*) full_key:", text):
        return match[1]
    if match := re.search(r"Error trying to access ([\w.]+): node `([\w.]+)` is not a container", text):
        return f"{match[2]} must be a section; give {match[1]}=..."
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        if key == "experiment" or "@method." in key:  # the latter if the first line of the YAML is missing
            return _NO_PRESET
        # The key itself is not suggested: it may exist once a preset chooses another file of the group.
        others = [other for other in overrides if other.lstrip("+~").partition("=")[0] != key]
        config = composed(without_preset(others))
        section = key.rpartition(".")[0]
        target = value_at(composed(others) or config, f"{section}._target_")
        return f"unknown key '{key}'{instead(key, config, target, choices(section.replace('.', '/')))}"
    if match := re.search(r"Interpolation key '([^']+)' not found full_key: (\S+)", text):
        return f"{match[2]} is that of '{match[1]}', which this configuration lacks; give one, or {match[2]}"
    if match := re.search(r"Error merging override (([^=]+)=(.).*)", text):
        return f"{match[1]}: {match[2].lstrip('+')} must be {'a section' if match[3] == '[' else 'a list'}"
    if match := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        return f"{match[1]}={match[2]}: a run has one value, and another run another; a list is [{match[2]}]"
    if match := re.search(r"Could not find '([^']+)'", text):
        group, _, name = match[1].rpartition("/")
        return _no_choice(group, name)
    if isinstance(error, OverrideParseException):
        override = str(error.override)
        return f"{override} cannot be read; {advice(override)}"
    return text


def _no_choice(group: str, name: str) -> str:
    """Returns the error message for a name that a group does not have."""
    if group == "data" and ("/" in name or Path(name).is_dir()):
        return f"data={name} is no data set; a folder is given by data.root={name}, with data=auto"
    if group == "method" and name in RENAMED:
        return f"method={name} has another name since version 0.3; give {RENAMED[name]}"
    if others := [f"{other}={name}" for other in config_groups() if name in choices(other)]:
        return f"{group} has no option '{name}'; did you mean {' or '.join(others)}?"
    return f"{group} has no option '{name}'{nearest(name, choices(group))}"

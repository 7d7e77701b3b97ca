"""Composes the configuration with Hydra into plain dictionaries; docs/configuration.md has the precedence."""

import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lit_fedad.core.bounds import RANGES, check_alpha, pair
from lit_fedad.core.building import check_keys, check_type, locate, nearest
from lit_fedad.core.debug_preset import fit_preset, kept_stages, without_preset
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.nested import flatten, value_at
from lit_fedad.core.own_files import by_name, own_folders, searched
from lit_fedad.core.sizes import register_resolvers
from lit_fedad.core.suggestions import instead
from lit_fedad.core.text import printable, redact
from lit_fedad.core.typed_words import advice, as_typed, given_keys

Config = dict[str, Any]

_EVERY_RUN_HAS = (
    "data", "partition", "task", "encoder", "federation", "tracking", "method", "image", "fabric",
)  # fmt: skip

TYPES: dict[str, Any] = {
    "image.size": int | list,
    "image.resize": int | None,
    "image.tile": int | None,
    "image.overlap": int | None,
    "image.page": int | None,
    "evaluation.alpha": float | list | str,
    "evaluation.client_test": typing.Literal["own", "balanced"],
    "calibration.share": float | None,
    "calibration.by": typing.Literal["product", "client"],
    "learning_rate_decay": typing.Literal["cosine", None],
}
"""Types of keys whose default value does not show their type."""

_NEEDED: dict[str, Any] = {
    **dict.fromkeys(("data", "partition", "task"), Mapping),
    **dict.fromkeys(("method.client", "method.server", "federation.sampler", "federation.channel"), Mapping),
    **dict.fromkeys(("method.name", "method.paper"), str),
    "federation.pool_bytes": int,
    "tracking.enabled": bool,
}
"""Types of keys that every run has in addition to those of ``config.yaml``; a mapping must have a ``_target_``."""

_TOO_LARGE = 1 << 63
"""Magnitude from which whole numbers do not fit into a run's files."""

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


def conf_folder() -> Path:
    """Returns the folder of the packaged configuration; in a checkout, the one at the top of the repository."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def config_groups() -> list[str]:
    """Lists the configuration groups, also those within groups: ``federation``, ``federation/robust``."""
    return list(_groups(conf_folder()))


@functools.cache
def _groups(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()))


def files_of(group: str) -> dict[str, Path]:
    """Returns a configuration group's files by name, with those of the user's own packages."""
    return by_name(group, (conf_folder(), *own_folders()))


def choices(group: str) -> list[str]:
    """Lists the names of a configuration group's files."""
    return list(files_of(group))


def _hydra() -> AbstractContextManager[None]:
    """Lets Hydra compose from the packaged configuration during a block."""
    return initialize_config_dir(str(conf_folder().resolve()), version_base="1.3")


def _composed(overrides: Sequence[str], **options: bool) -> DictConfig:
    """Composes with Hydra; to be called within `_hydra`.

    Raises:
        UserError: If a file of the configuration cannot be read, such as one that the user has added.
        HydraException, OmegaConfBaseException: If overrides cannot be composed.
    """
    try:
        return hydra_compose("config", [*searched(), *overrides], **options)
    except OmegaConfBaseException:
        raise
    except (yaml.YAMLError, ValueError) as error:
        cause = one_line(error)
        raise UserError(f"a file of the configuration cannot be read ({cause}); correct it") from None


def _with_stages(overrides: Sequence[str]) -> tuple[list[str], DictConfig | None]:
    """Adds the partition in stages that the debug preset keeps; to be called within `_hydra`.

    Returns:
        The overrides, and the configuration without the preset; None where the overrides have no preset.
    """
    if "debug" not in (given := given_keys(overrides)):
        return [*overrides], None
    plain = _composed(without_preset(overrides), return_hydra_config=True)
    return [*overrides, *kept_stages(plain, given)], plain


def defaults() -> tuple[dict[str, str | None], dict[str, str]]:
    """Reads the defaults of a run without overrides; torch is not imported for it.

    Returns:
        The choice of each configuration group, and the text of each top-level key; empty where it refers to others.
    """
    with _hydra():
        composed = _composed([], return_hydra_config=True)
    chosen = composed.hydra.runtime.choices
    top = typing.cast("Config", OmegaConf.to_container(composed, resolve=False))
    ordered = dict.fromkeys(["method", "data", *config_groups()])
    texts = {
        key: yaml.safe_dump(value).split("\n")[0] for key, value in top.items() if not isinstance(value, dict)
    }
    return (
        {group: chosen[group] for group in ordered if group in chosen},
        {key: "" if "${" in text else text for key, text in texts.items()},
    )


def compose(overrides: Sequence[str] = ()) -> Config:
    """Composes the configuration.

    Args:
        overrides: In Hydra's form: ``method=feddymem``, ``task.learning_rate=3e-4``.

    Returns:
        The resolved configuration as plain dictionaries.

    Raises:
        UserError: For a misspelt key or value; the error names the most similar valid one.
    """
    overrides = _removing(map(as_typed, overrides))
    _check_given(overrides)
    try:
        register_resolvers()
        with _hydra():
            whole, plain = _with_stages(overrides)
            composed = _composed(whole, return_hydra_config=True)
            with open_dict(composed):
                chosen = composed.pop("hydra").runtime.choices
            composed = _fit_protection(composed, whole, debug=plain is not None)
            if plain is not None:
                fit_preset(composed, plain, locate(composed.data._target_), given_keys(overrides))
            container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"'{error.full_key}' must be given: {error.full_key}=...") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(redact(_explain(error, overrides))) from None  # the cause may quote passwords
    config = typing.cast("Config", container)
    _check_read(overrides, chosen, config)
    check_root(config)
    _check_complete(config)
    return config


def chosen(overrides: Iterable[str]) -> dict[str, str | None]:
    """Returns the name of each group's file under overrides that can be composed."""
    with _hydra():
        whole, _ = _with_stages(_removing(map(as_typed, overrides)))
        composed = _composed(whole, return_hydra_config=True)
    return dict(composed.hydra.runtime.choices)


def _removing(overrides: Iterable[str]) -> list[str]:
    """Replaces ``group=null`` by ``~group``, by which Hydra removes a group; other keys are removed by ``key=null``."""
    empty = {f"{group}=null": f"~{group}" for group in config_groups()}
    return [empty.get(override.lstrip("+"), override) for override in overrides]


def unresolved(overrides: Iterable[str]) -> Config:
    """Composes the configuration without resolving its references (``${grid}``) and without checks.

    Raises:
        HydraException, OmegaConfBaseException: If it cannot be composed.
    """
    with _hydra():
        composed = _composed(_with_stages(_removing(map(as_typed, overrides)))[0])
    return typing.cast("Config", OmegaConf.to_container(composed, resolve=False))


def _check_given(overrides: Sequence[str]) -> None:
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


def _check_read(overrides: Sequence[str], chosen: Mapping[str, Any], config: Config) -> None:
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


def _fit_protection(composed: DictConfig, overrides: Sequence[str], debug: bool) -> DictConfig:
    """Composes again with the method's settings for secure sums or noise (``method.under``), if it has any."""
    under = composed.method.get("under")
    if under is None:
        return composed
    if not isinstance(under, DictConfig):
        raise UserError(f"method.under={under} must be a section, or null")
    privacy = composed.federation.get("privacy")
    noised = privacy is not None and privacy.get("epsilon") is not None
    kind = "noised" if noised else "secure" if composed.federation.get("secure_sum") is not None else None
    # The debug preset keeps its own number of rounds, which is smaller.
    settings = [s for s in (under.get(kind, ()) if kind else ()) if not (debug and s.startswith("rounds="))]
    if settings:
        composed = _composed([*settings, *overrides])
    with open_dict(composed):
        composed.method.under = f"{kind}: {' '.join(settings)}" if settings else None
    return composed


def check_root(config: Config) -> None:
    """Checks the keys that no target's signature describes against the keys and types of ``config.yaml``.

    Raises:
        UserError: Naming the first key that is not valid, or whose value has another type or is out of range.
    """
    root = _parsed((conf_folder() / "config.yaml").read_text())
    groups = set(config_groups())
    check_keys(config, groups | set(root) - {"defaults"}, "configuration")
    for name in sorted(groups & config.keys()):
        if not isinstance(config[name], Mapping | None):
            raise UserError(f"{name}={config[name]!r} must be a section")
    for name, default in root.items():
        if name in ("defaults", "fabric", "callbacks") or name not in config:
            continue
        section, defaults = (
            (config[name], default) if isinstance(default, dict) else ({name: config[name]}, {name: default})
        )
        if not isinstance(section, Mapping):
            raise UserError(f"{name}={section!r} must be a section")
        prefix = f"{name}." if isinstance(default, dict) else ""
        if name != "image":  # other keys of the image are arguments of its transform
            check_keys(section, set(defaults), name)
        for key in defaults.keys() & section.keys():
            # Keys that are null by default take paths.
            annotation = str | None if defaults[key] is None else type(defaults[key])
            check_type(section[key], TYPES.get(prefix + key, annotation), prefix + key)
    _check_callbacks(config.get("callbacks", {}))
    check_alpha(config.get("evaluation", {}).get("alpha", "auto"))
    for key, (least, most) in RANGES.items():
        value = value_at(config, key)
        numbers = pair(key, value) if isinstance(value, list) else () if value is None else (value,)
        if not all(isinstance(number, int | float) and least <= number <= most for number in numbers):
            bound = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
            raise UserError(f"{key}={value} must be {bound}")


def _check_complete(config: Config) -> None:
    """Checks that a composed configuration has the keys that every run needs, and values that its files can hold.

    Raises:
        UserError: Naming a key that was removed (``~key``), or whose value is of another type, too large or not UTF-8.
    """
    root = _parsed((conf_folder() / "config.yaml").read_text())
    for key in (*flatten({name: default for name, default in root.items() if name != "defaults"}), *_NEEDED):
        section, _, leaf = key.rpartition(".")
        holder = config.get(section, {}) if section else config
        if leaf not in holder:
            raise UserError(f"{key} is missing, and every run has one; give it a value")
        if (kind := _NEEDED.get(key)) is not Mapping:
            check_type(holder[leaf], kind or Any, key)
        elif not isinstance(holder[leaf], Mapping) or not isinstance(holder[leaf].get("_target_"), str):
            raise UserError(f"{key} must be a section with _target_")
    for key, value in flatten(config).items():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, int) and abs(part) >= _TOO_LARGE:
                raise UserError(f"{key}={part!s:.40} is too large a number")
            if isinstance(part, str) and re.search("[\ud800-\udfff]", part):
                raise UserError(
                    f"{key}={printable(part)}: is not UTF-8, which files of a run hold alone; rename it"
                )


@functools.cache
def _parsed(text: str) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", yaml.safe_load(text))


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Mapping):
        raise UserError(f"callbacks={callbacks!r} must be a section")
    for name, section in callbacks.items():
        if not isinstance(section, Mapping) or "_target_" not in section:
            raise UserError(f"callbacks.{name}={section!r} must be a section with _target_")


def _explain(error: Exception, overrides: list[str]) -> str:
    """Shortens Hydra's message to one line."""
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
        config = _composable(without_preset(others))
        section = key.rpartition(".")[0]
        target = value_at(_composable(others) or config, f"{section}._target_")
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
    return f"{group} has no option '{name}'{nearest(name, choices(group))}"


def _composable(overrides: list[str]) -> Config:
    """Returns the unresolved configuration; empty where it cannot be composed."""
    try:
        return unresolved(overrides)
    except (HydraException, OmegaConfBaseException):
        return {}

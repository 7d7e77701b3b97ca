"""Composes the configuration with Hydra into plain dictionaries; docs/configuration.md has the precedence."""

import typing
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lit_fedad.core.building import locate
from lit_fedad.core.config_groups import conf_folder, config_groups
from lit_fedad.core.config_schema import check_complete, check_root
from lit_fedad.core.debug_preset import fit_preset, kept_stages, without_preset
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.override_checks import check_given, check_read, explain
from lit_fedad.core.own_files import searched
from lit_fedad.core.sizes import register_resolvers
from lit_fedad.core.text import redact
from lit_fedad.core.typed_words import as_typed, given_keys

Config = dict[str, Any]


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
    check_given(overrides)
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
        raise UserError(
            redact(explain(error, overrides, _composable))
        ) from None  # the cause may quote passwords
    config = typing.cast("Config", container)
    check_read(overrides, chosen, config)
    check_root(config)
    check_complete(config)
    return config


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


def _composable(overrides: Sequence[str]) -> Config:
    """Returns the unresolved configuration; empty where it cannot be composed."""
    try:
        return unresolved(overrides)
    except (HydraException, OmegaConfBaseException):
        return {}


def unresolved(overrides: Iterable[str]) -> Config:
    """Composes the configuration without resolving its references (``${grid}``) and without checks.

    Raises:
        HydraException, OmegaConfBaseException: If it cannot be composed.
    """
    with _hydra():
        composed = _composed(_with_stages(_removing(map(as_typed, overrides)))[0])
    return typing.cast("Config", OmegaConf.to_container(composed, resolve=False))


def chosen(overrides: Iterable[str]) -> dict[str, str | None]:
    """Returns the name of each group's file under overrides that can be composed."""
    with _hydra():
        whole, _ = _with_stages(_removing(map(as_typed, overrides)))
        composed = _composed(whole, return_hydra_config=True)
    return dict(composed.hydra.runtime.choices)


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


def _removing(overrides: Iterable[str]) -> list[str]:
    """Replaces ``group=null`` by ``~group``, by which Hydra removes a group; other keys are removed by ``key=null``."""
    empty = {f"{group}=null": f"~{group}" for group in config_groups()}
    return [empty.get(override.lstrip("+"), override) for override in overrides]


def _with_stages(overrides: Sequence[str]) -> tuple[list[str], DictConfig | None]:
    """Adds the partition in stages that the debug preset keeps; to be called within `_hydra`.

    Returns:
        The overrides, and the configuration without the preset; None where the overrides have no preset.
    """
    if "debug" not in (given := given_keys(overrides)):
        return [*overrides], None
    plain = _composed(without_preset(overrides), return_hydra_config=True)
    return [*overrides, *kept_stages(plain, given)], plain


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


def _hydra() -> AbstractContextManager[None]:
    """Lets Hydra compose from the packaged configuration during a block."""
    return initialize_config_dir(str(conf_folder().resolve()), version_base="1.3")

"""Composes the configuration (Hydra), and builds objects from it; what wins over what: docs/configuration.md.

Beyond this module the configuration is plain dictionaries: ``_target_`` names a class or function, whose signature
is the schema of its section.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lit_fedad.core.bounds import RANGES, pair
from lit_fedad.core.debug_preset import fit_preset
from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import extra_of, install
from lit_fedad.core.text import redact, redacted
from lit_fedad.core.typed_words import advice, as_typed

Config = dict[str, Any]
T = TypeVar("T")

_EVERY_RUN_HAS = (
    "data",
    "partition",
    "task",
    "encoder",
    "federation",
    "tracking",
    "method",
    "image",
    "fabric",
)
# Keys that say where and how a run happens; of them only precision and cache.enabled decide a result.
_CIRCUMSTANCES = ("out", "tracking", "fabric", "simulation", "cache", "fresh", "callbacks")
# Keys of the evaluation that no training depends on.
_JUDGEMENT = ("alpha", "pictures", "batch_size")

TILING = ("tile", "overlap")
"""Keys of the image that say how it is cut into tiles."""

# Types of keys whose default value does not tell them.
_TYPES: dict[str, Any] = {
    "image.size": int | list,
    "image.resize": int | None,
    "image.tile": int | None,
    "image.overlap": int | None,
    "evaluation.alpha": float | list,
    "calibration.share": float | None,
    "calibration.by": typing.Literal["product", "client"],
}

RENAMED = {
    "feddymem_trained": "method=feddymem",
    "feddymem_drawn": "method=federated_bank federation=secure",
    "feddymem_noised": "method=federated_bank federation/privacy=central federation.privacy.epsilon=8",
    "feddymem_close": "method=feddymem with the settings of docs/lab/feddymem.md",
}
"""Methods of version 0.2 by what is given in their place."""

_NO_PRESET = "the method's YAML brings no preset: its defaults need '- _self_' and '- /experiment: small'"

# Names of types in error messages; a path is a string in the configuration.
_CONFIG_TYPES: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", Path: "str", types.NoneType: "null",
    list: "list", tuple: "list", Sequence: "list",
}  # fmt: skip


# Values that are no built object.
_PLAIN = (bool, int, float, str, types.NoneType, Mapping)


def conf_folder() -> Path:
    """Returns the packaged configuration; in a checkout, the one at the top of the repository."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def config_groups() -> list[str]:
    """Lists the configuration groups, those within groups too: ``federation``, ``federation/robust``."""
    folder = conf_folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir())


def choices(group: str) -> list[str]:
    """Lists the names of a configuration group's files."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def compose(overrides: Sequence[str] = ()) -> Config:
    """Composes the configuration.

    Args:
        overrides: In Hydra's form: ``method=feddymem``, ``task.learning_rate=3e-4``.

    Returns:
        The resolved configuration as plain dictionaries.

    Raises:
        UserError: For a misspelt key or value, naming the nearest valid one.
    """
    overrides = [as_typed(override) for override in overrides]
    named = {override.lstrip("+") for override in overrides}
    if removed := [g for g in _EVERY_RUN_HAS if {f"{g}=null", f"~{g}"} & named]:
        raise UserError(f"{removed[0]}=null: every run has one; leave this out, or name another")
    # Hydra removes a group by ~group only; every other key is removed by key=null.
    empty = {f"{group}=null": f"~{group}" for group in config_groups()}
    overrides = [empty.get(override.lstrip("+"), override) for override in overrides]
    # Without the debug preset: all groups, and what is said of data and images. Other keys may be the preset's own.
    plain = [override for override in overrides if re.match(r"(?!debug=)\w+=|\+*(data|image)\.", override)]
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"'{override}' is not of the form key=value")
    try:
        with initialize_config_dir(str(conf_folder().resolve()), version_base="1.3"):
            composed = hydra_compose("config", overrides, return_hydra_config=True)
            with open_dict(composed):
                chosen = composed.pop("hydra").runtime.choices
            composed = _fit_protection(composed, overrides, debug=bool(chosen.get("debug")))
            if chosen.get("debug"):
                fit_preset(composed, hydra_compose("config", plain), locate(composed.data._target_))
            missing = sorted(OmegaConf.missing_keys(composed))
            container = {} if missing else OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(redact(_explain(error, plain))) from None  # its cause quotes overrides, passwords too
    if missing:
        raise UserError(f"'{missing[0]}' must be given: {missing[0]}=...")
    config = typing.cast("Config", container)
    if "experiment" not in chosen and not any(o.startswith("~experiment") for o in overrides):
        raise UserError(_NO_PRESET)
    if chosen.get("features") == "frozen":
        _refuse_unused_encoder(overrides)
    _check_root(config)
    return config


def _fit_protection(composed: DictConfig, overrides: Sequence[str], debug: bool) -> DictConfig:
    """Composes anew with what the method brings for secure sums or noise (``method.under``), where there is some."""
    brought = composed.method.get("under")
    if not isinstance(brought, DictConfig):
        return composed
    privacy = composed.federation.get("privacy")
    noised = privacy is not None and privacy.get("epsilon") is not None
    kind = "noised" if noised else "secure" if composed.federation.get("secure_sum") is not None else None
    # The debug preset has fewer rounds than these.
    settings = [one for one in (brought[kind] if kind else ()) if not (debug and one.startswith("rounds="))]
    if settings:
        composed = hydra_compose("config", [*settings, *overrides])
    with open_dict(composed):
        composed.method.under = f"{kind}: {' '.join(settings)}" if settings else None
    return composed


def _refuse_unused_encoder(overrides: Sequence[str]) -> None:
    asked = [override for override in overrides if re.match(r"[+~]*encoder[.=]", override)]
    if asked:
        raise UserError(
            f"{asked[0]}: features are frozen, and no encoder is trained on pixels; give features=train"
        )


def identity(config: Config) -> str:
    """Computes a short hash of all keys that decide what a run trains: others may change when it is resumed."""
    decisive = {key: value for key, value in config.items() if key not in _CIRCUMSTANCES}
    # Cached features are in half precision: a run without the cache ends with other last digits.
    decisive["precision"] = str(config.get("fabric", {}).get("precision"))
    decisive["cached"] = config.get("cache", {}).get("enabled", True)
    image, data = config.get("image", {}), config.get("data") or {}
    # Without tiles, a split of its own or regions that saturate, a run is the same as before there were their keys.
    if image.get("tile") is None:
        decisive["image"] = {key: value for key, value in image.items() if key not in TILING}
    if data.get("split_seed") is None:
        decisive["data"] = {key: value for key, value in data.items() if key != "split_seed"}
    aside = _JUDGEMENT if "saturation" in data else (*_JUDGEMENT, "spro_limit")
    evaluation = {key: value for key, value in config.get("evaluation", {}).items() if key not in aside}
    return _hash({**decisive, "evaluation": evaluation})


def judgement(config: Config) -> str:
    """Computes a short hash of the keys that decide, beside those of `identity`, what a complete run's files say."""
    evaluation = config.get("evaluation", {})
    return _hash({key: evaluation.get(key) for key in _JUDGEMENT if key != "batch_size"})


def _hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(redacted(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a nested configuration by dotted key; an empty section is a value.

    Example:
        >>> flatten({"rounds": 3, "task": {"loss": {"margin": 0.5}}, "public": {}})
        {'rounds': 3, 'task.loss.margin': 0.5, 'public': {}}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        inner = flatten(value) if isinstance(value, Mapping) else {}
        values |= {f"{key}.{name}": leaf for name, leaf in inner.items()} or {str(key): value}
    return values


def build(node: Any, **given: Any) -> Any:
    """Builds the object that a configuration node describes.

    Args:
        node: A mapping with ``_target_`` (and ``_partial_: true`` for a factory), whose other keys are arguments;
            nested nodes are built first. None stays None.
        **given: Arguments that the configuration cannot hold, such as other objects.

    Raises:
        UserError: For a key that the target does not take, a value of the wrong type, or a key left out.
    """
    if node is None:
        return None
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"a section with _target_ is needed, not {node!r}")
    target = locate(node["_target_"])
    arguments = {k: v for k, v in node.items() if k not in ("_target_", "_partial_")}
    name = node["_target_"].rpartition(".")[2]
    _check_signature(target, name, arguments, given, partial_=bool(node.get("_partial_")))
    arguments = {k: _build_nested(v) for k, v in arguments.items()}
    if node.get("_partial_"):
        return partial(target, **arguments, **given)
    return target(**arguments, **given)


def takes(node: Mapping[str, Any], argument: str) -> bool:
    """Tells whether the target of a configuration node takes an argument of this name."""
    return argument in inspect.signature(locate(node["_target_"])).parameters


def call(target: Callable[..., T], section: Mapping[str, Any], name: str) -> T:
    """Calls a function or class with a section that has no ``_target_``.

    Raises:
        UserError: As `build`.
    """
    _check_signature(target, name, section, {}, partial_=False)
    return target(**section)


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if "_target_" in value else {k: _build_nested(v) for k, v in value.items()}
    return [_build_nested(v) for v in value] if isinstance(value, list) else value


def locate(path: str) -> Any:
    """Imports the class or function that a ``_target_`` names.

    Raises:
        UserError: If it does not exist.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        extra = extra_of(error.name or "") if isinstance(error, ImportError) else None
        advice = f"; {install(extra)}" if extra else ""
        raise UserError(f"_target_ '{path}' cannot be imported: {error}{advice}") from error


def _check_signature(
    target: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    given: Mapping[str, Any],
    partial_: bool,
) -> None:
    parameters = inspect.signature(target).parameters
    _check_keys(arguments, set(parameters) - set(given), name)
    for key, value in arguments.items():
        _check_type(value, _annotation(target, key), f"{name}.{key}")
    if not partial_:
        missing = [
            key
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty and key not in arguments and key not in given
        ]
        if missing:
            raise UserError(f"{name} needs '{missing[0]}'")


def _annotation(target: Callable[..., Any], key: str) -> Any:
    function = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    try:
        return typing.get_type_hints(function).get(key, Any)
    except (NameError, TypeError):
        return Any


def _check_type(value: Any, annotation: Any, where: str) -> None:
    """Refuses scalars, paths and lists of the wrong type; everything more complicated is checked by the target."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    allowed = typing.get_args(annotation) if union else (annotation,)
    if typing.get_origin(annotation) is typing.Literal:
        if value not in allowed[0].__args__:
            raise UserError(f"{where}={value!r} must be one of {list(allowed[0].__args__)}")
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}={value} must be a finite number")
    kinds = {_CONFIG_TYPES.get(typing.get_origin(a) or a) for a in allowed}
    if isinstance(value, Mapping) and "_target_" in value:
        return
    if None in kinds:
        classes = [typing.get_origin(a) or a for a in allowed]
        built = all(inspect.isclass(c) and c not in (Any, object) for c in classes)
        checked = tuple(c for c in classes if not getattr(c, "_is_protocol", False))
        if built and isinstance(value, _PLAIN) and not isinstance(value, checked):
            raise UserError(f"{where}={'null' if value is None else value} must be a section with _target_")
        return
    kind = _CONFIG_TYPES.get(type(value))
    if kind not in kinds and not (kind == "int" and "float" in kinds):
        raise UserError(f"{where}={value!r} must be {' or '.join(sorted(map(str, kinds)))}")


def _check_keys(mapping: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            raise UserError(f"{where} has no key '{key}'{_nearest(key, known)}")


def _nearest(key: str, known: typing.Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; valid keys: {', '.join(names)}"


def _check_root(config: Config) -> None:
    """Checks the keys that no target's signature describes against the keys and types of ``config.yaml``."""
    root = yaml.safe_load((conf_folder() / "config.yaml").read_text())
    groups = set(config_groups())
    _check_keys(config, groups | set(root) - {"defaults"}, "configuration")
    for name, default in root.items():
        if name in ("defaults", "fabric", "callbacks"):
            continue
        section, defaults = (
            (config[name], default) if isinstance(default, dict) else ({name: config[name]}, {name: default})
        )
        if not isinstance(section, Mapping):
            raise UserError(f"{name}={section!r} must be a section")
        prefix = f"{name}." if isinstance(default, dict) else ""
        if name != "image":  # whose other keys are the transform's
            _check_keys(section, set(defaults), name)
        for key in defaults.keys() & section.keys():
            default = defaults[key]
            # Where nothing is given, a path can be.
            annotation = str | None if default is None else type(default)
            _check_type(section[key], _TYPES.get(prefix + key, annotation), prefix + key)
    _check_callbacks(config["callbacks"])
    _check_alpha(config["evaluation"]["alpha"])
    for key, (least, most) in RANGES.items():
        section_name, _, leaf = key.rpartition(".")
        value = (config[section_name] if section_name else config).get(leaf)
        numbers = pair(key, value) if isinstance(value, list) else () if value is None else (value,)
        if not all(least <= number <= most for number in numbers):
            bound = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
            raise UserError(f"{key}={value} must be {bound}")


def _check_alpha(alpha: Any) -> None:
    for rate in alpha if isinstance(alpha, list) else [alpha]:
        if type(rate) is not float or not 0 < rate < 1:
            raise UserError(
                f"evaluation.alpha={alpha} must be a number above 0 and below 1, or a list of them"
            )
    if alpha == []:
        raise UserError("evaluation.alpha=[] must hold a number")


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Mapping):
        raise UserError(f"callbacks={callbacks!r} must be a section")
    for name, section in callbacks.items():
        if not isinstance(section, Mapping) or "_target_" not in section:
            raise UserError(f"callbacks.{name}={section!r} must be a section with _target_")


def _explain(error: Exception, overrides: list[str]) -> str:
    """Shortens Hydra's message to one line."""
    text = " ".join(str(error).split())
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found[1]
        if key == "experiment":
            return _NO_PRESET
        known = _flat_keys([o for o in overrides if o.lstrip("+~").partition("=")[0] != key])
        leaf = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        return f"unknown key '{key}'" + (f"; did you mean '{leaf[0]}'?" if leaf else "")
    if found := re.search(r"Interpolation key '([^']+)' not found full_key: (\S+)", text):
        return f"{found[2]} is that of '{found[1]}', which this configuration lacks; give one, or {found[2]}"
    if found := re.search(r"Could not find '([^']+)'", text):
        group, _, name = found[1].rpartition("/")
        if group == "method" and name in RENAMED:
            return f"method={name} has another name since version 0.3; give {RENAMED[name]}"
        return f"{group} has no option '{name}'{_nearest(name, choices(group))}"
    if isinstance(error, OverrideParseException):
        override = str(error.override)
        return f"{override} cannot be read; {advice(override)}"
    return text


def _flat_keys(overrides: list[str]) -> set[str]:
    """Dotted keys of all sections and values; none where the configuration cannot be composed."""
    try:
        with initialize_config_dir(str(conf_folder().resolve()), version_base="1.3"):
            composed = hydra_compose("config", overrides)
        container = typing.cast("Config", OmegaConf.to_container(composed, resolve=False))
    except (HydraException, OmegaConfBaseException):
        return set()
    return {known for key in flatten(container) for known in accumulate(key.split("."), "{}.{}".format)}

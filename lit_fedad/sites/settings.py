"""The settings of a site's operator: what may leave the site, whatever a coordinator asks, and keys for secure sums."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lit_fedad.contracts.disclosure import Disclosure, Kind, summed
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, given_bytes, write_secret
from lit_fedad.core.nested import flatten
from lit_fedad.privacy.keys import KEY_BYTES, KeyPair
from lit_fedad.sites.refusals import KINDS, Code, RefusalError

FLOORS: Mapping[str, float] = {
    "method.client.min_images": 2,
    "method.client.group": 5,
    "method.client.min_class_images": 5,
    "method.client.prototype_images": 1,
    "calibration.share": 0.05,
    "method.client.batch": 4,
    "method.client.condensation.batch": 4,
    "batch_size": 4,
}
"""Settings that protect images, with the smallest value that a federation may give them."""

CEILINGS: Mapping[str, float] = {
    "calibration.share": 0.5,
    "rounds": 1000,
    "task.momentum": 0.99,
    "method.client.bias": 3.0,
}
"""Settings that protect images, with the largest value that a federation may give them. Beyond, only a few images would
train, a site would answer without end, one batch would outweigh all others, or one image would make all synthetic
images."""

_RATE = re.compile(r"(task|method\.client)\.(\w+\.)*\w*(rate|lr)$")
_LEARNT = ("task.", "method.client.")
_PULLS = ("task.weight_decay", "method.client.mu", "method.client.lam", "method.client.alpha")
_MOST_RATE, _MOST_PULL = 1.0, 0.5
"""Largest learning rate, and largest share of their way by which a step pulls weights back to where they were. Beyond,
the message is the gradient of one batch, and no more what all images taught. A site whose floor for the batch is one
image allows that too."""

_FURTHEST = 100.0
"""Largest factor by which another number of a task or client may differ from its packaged value: a weight of a loss, a
temperature or a share of outliers scales gradients as a learning rate does. A number that is 0 in the package may be at
most 1, and one that is left out there counts as 1."""

COUNTED = (Kind.SUMS, Kind.WEIGHTS, Kind.CLASS_STATISTICS, Kind.MEAN_IMAGES, Kind.SYNTHETIC_IMAGES)
"""Kinds whose values come from several images, which can be counted."""

LOSS = summed("its loss")
"""What a site discloses with each training if its policy lets sums out or its operator has approved the run."""


@dataclass(frozen=True)
class Policy:
    """What a site's operator allows to leave the site.

    Attributes:
        allow: Kinds that may leave the site without an approval.
        images: Fewest images from which sums, weights, class statistics, mean and synthetic images, and counts of
            scores may come that leave without an approval.
        floors: Smallest values of settings, with or without an approval; `FLOORS` has those that are not given.
        ceilings: Largest values of settings, likewise; `CEILINGS` has those that are not given.
        vary: Settings that may differ from those of an approved federation.
        runs: Most runs without noise in which the site answers.
        megabytes: Most megabytes, of 2^20 bytes, of a coordinator's message.
        names: Whether the coordinator, and through it all sites, get the names of this site's products. If not,
            products are called by the site's name and a number.
    """

    allow: Sequence[str] = (Kind.COUNTS.value, Kind.SUMS.value, Kind.WEIGHTS.value)
    images: int = 5
    floors: Mapping[str, float] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    vary: Sequence[str] = ()
    runs: int = 20
    megabytes: int = 1024
    names: bool = True

    @classmethod
    def read(cls, content: object) -> Policy:
        """Reads the section ``policy`` of a ``site.yaml``.

        Raises:
            UserError: If a key is unknown or a value is invalid.
        """
        if not isinstance(content, Mapping) or not set(content) <= {f.name for f in fields(cls)}:
            raise UserError(f"policy: give {', '.join(f.name for f in fields(cls))}, and nothing else")
        policy = cls(**content)
        for name, given in (("allow", policy.allow), ("vary", policy.vary)):
            if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
                raise UserError(f"policy.{name}: give a list of names")
        kinds = [kind.value for kind in Kind]
        if unknown := set(policy.allow) - set(kinds):
            raise UserError(f"policy.allow: there is no '{min(unknown)}'; choose among {', '.join(kinds)}")
        for name in ("images", "runs", "megabytes"):
            if type(value := getattr(policy, name)) is not int or value < 1:
                raise UserError(f"policy.{name}={value} must be a whole number above 0")
        if type(policy.names) is not bool:
            raise UserError(f"policy.names={policy.names} must be true or false")
        for name, bounds in (("floors", FLOORS), ("ceilings", CEILINGS)):
            given = getattr(policy, name)
            known = isinstance(given, Mapping) and set(given) <= set(bounds)
            numbers = known and all(type(value) in (int, float) for value in given.values())
            if not numbers or any(math.isnan(value) for value in given.values()):
                raise UserError(f"policy.{name}: give numbers for {', '.join(bounds)}")
        return policy

    @property
    def content(self) -> dict[str, Any]:
        """The policy in the form that `read` takes, with every floor and ceiling."""
        bounds = {"floors": {**FLOORS, **self.floors}, "ceilings": {**CEILINGS, **self.ceilings}}
        return {**vars(self), "allow": list(self.allow), "vary": list(self.vary), **bounds}

    def check_bounds(self, config: Mapping[str, Any], packaged: Mapping[str, Any]) -> None:
        """Checks that no setting is beyond its floor or ceiling, and that no batch outweighs the others.

        Args:
            config: The offered configuration.
            packaged: The configuration of its choices with the packaged values (`overrides.packaged`).

        Raises:
            RefusalError: If a setting is beyond its bounds.
        """
        numbers = {key: value for key, value in flatten(config).items() if isinstance(value, (int, float))}
        for key, floor in {**FLOORS, **self.floors}.items():
            if (value := numbers.get(key, floor)) < floor:
                raise RefusalError(Code.FLOOR, floor, value, detail=key)
        for key, ceiling in {**CEILINGS, **self.ceilings}.items():
            if (value := numbers.get(key, ceiling)) > ceiling:
                raise RefusalError(Code.CEILING, ceiling, value, detail=key)
        if self.floors.get("batch_size", FLOORS["batch_size"]) <= 1:
            return
        rates = {key: abs(value) for key, value in numbers.items() if _RATE.match(key)}
        rate = max(rates.values(), default=0.0)
        if rate > _MOST_RATE:
            raise RefusalError(Code.CEILING, _MOST_RATE, rate, detail=max(rates, key=rates.__getitem__))
        for key in _PULLS:
            if rate * abs(pull := numbers.get(key, 0.0)) > _MOST_PULL:
                raise RefusalError(Code.CEILING, _MOST_PULL / rate, pull, detail=key)
        for key, usual in flatten(packaged).items():
            value = numbers.get(key, usual)
            left_out = usual is None and isinstance(value, float)
            if key.startswith(_LEARNT) and key not in rates and (left_out or isinstance(usual, float)):
                _check_near(1.0 if left_out else usual, value, key)

    def allows(self, disclosed: Disclosure, images: int) -> bool:
        """Tells whether a disclosure may leave the site without an approval.

        Args:
            disclosed: The disclosure.
            images: Fewest training images that are summed together at this site.
        """
        if disclosed.kind.value not in self.allow:
            return False
        fewest = images if disclosed.images is None else min(disclosed.images, images)
        return disclosed.noised or disclosed.kind not in COUNTED or fewest >= self.images

    def needs_more(self, disclosed: Disclosure) -> bool:
        """Tells whether an approval is not enough to let a disclosure out: ``allow`` must name images themselves."""
        return disclosed.kind is Kind.IMAGES and disclosed.kind.value not in self.allow


def _check_near(usual: float, value: float, key: str) -> None:
    """Refuses a number that is neither 0 nor within a factor of `_FURTHEST` of its usual value."""
    ceiling, floor = abs(usual) * _FURTHEST or 1.0, abs(usual) / _FURTHEST
    if abs(value) > ceiling:
        raise RefusalError(Code.CEILING, ceiling, value, detail=key)
    if 0 < abs(value) < floor:
        raise RefusalError(Code.FLOOR, floor, value, detail=key)


def not_allowed(disclosed: Disclosure, round: int, exchange: int) -> RefusalError:
    """Builds the refusal of a disclosure that may not leave the site, with the round and index of its exchange."""
    return RefusalError(Code.NOT_ALLOWED, KINDS.index(disclosed.kind), round, exchange, detail=disclosed.what)


KEY = "sum.key"
PUBLIC = "sum.pub"
REGISTRY = "key_registry"
"""Names of files in a site's folder: its private and public key for secure sums, and the public keys of all sites."""


def write_sum_key(folder: Path, name: str) -> None:
    """Makes a site's key pair for secure sums: ``sum.key``, which only its owner can read, and ``sum.pub``.

    Args:
        folder: The site's folder.
        name: Name of the site, which ``sum.pub`` holds before the public key.
    """
    pair = KeyPair()
    # First the public key: a failure must not leave a private key that no site knows.
    with atomic(folder / PUBLIC) as partial:
        partial.write_text(f"{name} {_text(pair.public)}\n")
    write_secret(folder / KEY, f"{_text(pair.private)}\n".encode())


@dataclass(frozen=True)
class KeyRegistry:
    """The public keys of all sites for secure sums, and the key pair of this site.

    Attributes:
        name: Name of this site.
        pair: The key pair of this site.
        keys: Public keys by the site's name.
    """

    name: str
    pair: KeyPair
    keys: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path, name: str) -> KeyRegistry | None:
        """Reads ``key_registry`` in a site's folder: the lines of all sites' ``sum.pub``, one after the other.

        Returns:
            The registry; None if there is none.

        Raises:
            UserError: If a line is not a name and a key, or this site's key is not among them.
        """
        path = folder / REGISTRY
        if not os.path.lexists(path):  # a broken link is an error: the site must not answer without masks
            return None
        keys: dict[str, bytes] = {}
        for number, line in enumerate(_read(path).splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2 or words[0] in keys:
                raise UserError(
                    f"{path}, line {number}: give the name of a site and its key, once (its {PUBLIC})"
                )
            keys[words[0]] = _key(words[1], f"{path}, line {number}")
        if len(set(keys.values())) < len(keys):
            raise UserError(f"{path}: two sites have the same key")
        pair = KeyPair(_key(_read(folder / KEY).strip(), str(folder / KEY)))
        if keys.get(name) != pair.public:
            raise UserError(
                f"{path}: site {name} is not in it with its own key; add the line of its {PUBLIC}"
            )
        return cls(name, pair, keys)

    def numbered(self, names: Sequence[str], client: int) -> dict[int, bytes]:
        """Returns public keys by client number.

        Args:
            names: Names of a run's sites by client number, as the coordinator gives them; not trusted.
            client: The client number of this site.

        Raises:
            RefusalError: If a site is not in the key registry or occurs twice, or if this site has another number.
        """
        if unknown := [name for name in names if name not in self.keys]:
            raise RefusalError(Code.NAMES, detail=f"site {unknown[0]} is not in this site's key registry")
        if len(set(names)) < len(names) or not 0 <= client < len(names) or names[client] != self.name:
            raise RefusalError(Code.NAMES)
        return {number: self.keys[name] for number, name in enumerate(names)}


def _read(path: Path) -> str:
    try:
        return given_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({type(error).__name__}); make it: lit-fedad site init"
        ) from error


def _key(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(f"{where}: is no key of {KEY_BYTES} bytes in base64")
    return key


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


@dataclass(frozen=True)
class SiteSettings:
    """The settings of a site.

    Attributes:
        name: Name of the site.
        folder: Folder with the site's log, states and reports.
        data: Overrides that describe its images: ``data=folders``, ``data.root=...``.
        own: Overrides of ``cache``, ``fabric``, ``calibration.group`` and ``image.page``.
        apart: Whether its products are its own, even if products of another site have the same names.
        key_registry: The keys for secure sums; a site that has them answers only in runs of secure sums.
        epsilon: Budget of differential privacy for all runs together: the site answers only in runs with noise that
            sites draw. None for no budget; then it answers in runs without noise too.
        stages: Its products by the stages in which their images arrive; empty if all are there from the start.
        policy: What may leave the site.
        coordinator: Address and authority of the coordinator, for the site's log.
    """

    name: str
    folder: Path
    data: Sequence[str]
    own: Sequence[str] = ()
    apart: bool = False
    key_registry: KeyRegistry | None = None
    epsilon: float | None = None
    stages: Sequence[Sequence[str]] = ()
    policy: Policy = field(default_factory=Policy)
    coordinator: str = ""

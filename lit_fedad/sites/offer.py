"""A federation as it is offered to a site: what its exchanges would take, and whether the operator has approved it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_fedad.contracts import Client, Exchange, Exchanges, Free, MessageSpec, disclosed_by
from lit_fedad.contracts.disclosure import Disclosure
from lit_fedad.core.building import build
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, forbidden_in_one_line
from lit_fedad.core.nested import flatten, hash_of
from lit_fedad.federation.chained_log import ChainedLog
from lit_fedad.federation.channel import LARGEST_BLOB
from lit_fedad.privacy.noised_sums import Noised
from lit_fedad.sites.messages import are_products
from lit_fedad.sites.overrides import OWN, OverrideError, compose_overrides, packaged
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import Policy, SiteSettings, not_allowed

APPROVED = "approved.jsonl"
"""File of a site's approvals, in its folder."""

OFFERED = "offer.json"
"""File of an offer: at the coordinator that of its federation, at a site the one that the site has refused last."""

_LONGEST = 1 << 20
"""Most bytes of the file of an offer."""


@dataclass(frozen=True)
class Offer:
    """What a coordinator offers: the configuration of a federation.

    Attributes:
        overrides: The overrides that make the configuration.
        classes: Names of the classes that the federation learns; none if it looks for anomalies.
    """

    overrides: Sequence[str]
    classes: Sequence[str] = ()

    def write(self, file: Path) -> None:
        """Writes the offer to a file.

        Raises:
            OSError: If it cannot be written.
        """
        content = {"overrides": list(self.overrides), "classes": list(self.classes)}
        with atomic(file) as partial:
            partial.write_text(json.dumps(content, indent=1))

    def composed(self, settings: SiteSettings) -> tuple[Config, str]:
        """Composes the configuration at a site, and the hash by which an approval names it.

        The hash covers all settings except those that the policy lets vary and those of the machine itself.

        Raises:
            RefusalError: If the configuration is invalid, or a setting is beyond its bounds.
        """
        policy = settings.policy
        try:
            config = compose_overrides(self.overrides, settings.own)
        except UserError as error:
            if isinstance(error, OverrideError) and error.number:
                raise RefusalError(Code.OVERRIDE, error.number, detail=str(error)) from error
            raise RefusalError(Code.CONFIGURATION, detail=str(error)) from error
        policy.check_bounds(config, packaged(self.overrides))
        flat = {
            key: value
            for key, value in flatten(config).items()
            if key.split(".")[0] not in OWN and key not in policy.vary
        }
        # With half as many digits, somebody could make two configurations with the same hash.
        return config, hash_of([flat, list(self.classes), config.get("data")], digits=32)

    @classmethod
    def read(cls, file: Path) -> Offer:
        """Reads an offer.

        Raises:
            UserError: If the file holds no offer.
        """
        try:
            with forbidden_in_one_line(file):
                whole = file.is_file() and file.stat().st_size <= _LONGEST
                content = json.loads(file.read_text()) if whole else None
            if not isinstance(content, dict) or set(content) != {"overrides", "classes"}:
                raise ValueError("no offer")
            lists = [value for value in content.values() if isinstance(value, list)]
            if len(lists) < len(content) or not all(isinstance(text, str) for one in lists for text in one):
                raise ValueError("no lists of texts")
            if not are_products(content["classes"]):
                raise ValueError("no names of classes")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{file}: holds no offer; take offer.json from the coordinator's operator; a site keeps one"
                " that it has refused"
            ) from error
        return cls(content["overrides"], content["classes"])


@dataclass(frozen=True)
class Taken:
    """One thing that an exchange takes of a site's images.

    Attributes:
        round: Round of the exchange; 1 stands for every round.
        index: Index of the exchange in the round.
        exchange: Name of the exchange.
        disclosed: What the exchange's message discloses.
        largest: Most bytes of the message; if its size is not bounded, those of a message with one of `each`.
        each: Name of the things of which the message may hold any number, such as images; empty if its size is bounded.
    """

    round: int
    index: int
    exchange: str
    disclosed: Disclosure
    largest: int
    each: str = ""

    @property
    def key(self) -> list[Any]:
        """What an approval holds of this: the names of exchange and kind, and the number of images."""
        return [self.exchange, self.disclosed.kind.value, self.disclosed.images]

    def within(self, approved: list[Any]) -> bool:
        """Tells whether this is what an approved `key` names, or the same over more images."""
        (*what, images), (*approved_what, least) = self.key, approved
        return what == approved_what and (
            images == least or (least is not None and (images is None or images > least))
        )


def taken_by(
    exchanges: Exchanges,
    client: Client,
    config: Config,
    smallest: int,
    hidden: bool = True,
    picture: Sequence[int] = (),
) -> list[Taken]:
    """Lists what the exchanges of a method take of a client's images.

    Args:
        exchanges: The exchanges.
        client: The client.
        config: The run's configuration.
        smallest: Number of images of the product of which the client has fewest.
        hidden: Whether the client's noise, if it adds some, hides single images.
        picture: Channels, height and width of the client's images; empty if they have no common size.
    """
    up = build(config["federation"]["channel"], "federation.channel").up

    def taken(exchange: Exchange, round: int, index: int) -> Iterator[Taken]:
        disclosing = exchange.inner if isinstance(exchange, Noised) and not hidden else exchange
        for disclosed in disclosed_by(disclosing, client):
            if disclosed.by_product:
                disclosed = replace(disclosed, images=smallest)
            largest, each = up.largest(spec := exchange.upload_spec(client)), ""
            if largest == LARGEST_BLOB:
                spec_of_one, each = _of_one(spec, picture)
                largest = up.largest(spec_of_one)
            yield Taken(round, index, exchange.name, disclosed, largest, each)

    setup = [
        part
        for index, exchange in enumerate(exchanges.setup)
        for part in taken(exchange, index + exchanges.first_round, 0)
    ]
    rounds = [part for index, exchange in enumerate(exchanges.rounds) for part in taken(exchange, 1, index)]
    return setup + rounds


def _of_one(spec: MessageSpec, picture: Sequence[int]) -> tuple[MessageSpec, str]:
    """Sets the unbounded size in a message's form to one, such as one image; returns the form and the size's name."""
    sides, unbounded = dict(zip(("channels", "height", "width"), picture, strict=False)), list[str]()

    def size(declared: int | Free) -> int | Free:
        if isinstance(declared, int) or declared.name in sides:
            return declared if isinstance(declared, int) else sides[declared.name]
        unbounded.extend([declared.name] * (declared.at_most is None))
        return declared if declared.at_most else 1

    spec_of_one = {name: replace(form, shape=tuple(map(size, form.shape))) for name, form in spec.items()}
    return spec_of_one, next(iter(unbounded), "")


class Approvals:
    """The federations that a site's operator has approved.

    Args:
        file: The file, to which lines are only added; absent before the first approval.
    """

    def __init__(self, file: Path) -> None:
        self.log = ChainedLog(file)

    def add(self, digest: str, method: str, taken: Sequence[Taken]) -> None:
        """Notes an approval.

        Args:
            digest: Hash of the federation (`Offer.composed`).
            method: Name of its method, for people who read the file.
            taken: What its exchanges take.
        """
        self.log.append(digest=digest, method=method, takes=[part.key for part in taken])

    def check(self, digest: str) -> list[list[Any]] | None:
        """Returns what an approved federation may take (`Taken.key`); None if no federation was ever approved.

        Raises:
            RefusalError: If other federations were approved, and not this one.
        """
        lines = self.log.entries()
        approved = [line.get("takes") for line in lines if line.get("digest") == digest]
        if approved and isinstance(approved[-1], list):
            return approved[-1]
        if lines:
            raise RefusalError(Code.NOT_APPROVED)
        return None


def judge(policy: Policy, taken: Sequence[Taken], images: int, approved: list[list[Any]] | None) -> None:
    """Refuses a federation that takes more than the policy and its approval let out.

    Args:
        policy: The policy of the site's operator.
        taken: What the federation's exchanges take.
        images: Fewest training images that are summed together.
        approved: What was approved (`Taken.key`); None if nothing was.

    Raises:
        RefusalError: If the federation takes more.
    """
    for part in taken:
        if policy.allows(part.disclosed, images):
            continue
        if policy.needs_more(part.disclosed) or not any(map(part.within, approved or ())):
            raise not_allowed(part.disclosed, part.round, part.index)

"""A federation as it is offered to a site: what it would take, exchange by exchange, and whether that is approved."""

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
from lit_fedad.core.files import atomic, told_forbidden
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
"""File of an offered federation: at the coordinator its own, at a site the one that it has refused last."""

_LONGEST = 1 << 20
"""Most bytes of an offer."""


@dataclass(frozen=True)
class Offer:
    """What a coordinator offers: the configuration of a federation.

    Attributes:
        overrides: Its overrides.
        classes: Names of the classes that it learns.
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
        """Composes the configuration at a site, with the hash that an approval binds.

        The hash is of all settings but those that may vary, and the machine's own.

        Raises:
            RefusalError: If the configuration is none, or a setting is beyond its bounds.
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
        # Of half as many digits two can be made that agree.
        return config, hash_of([flat, list(self.classes), config.get("data")], digits=32)

    @classmethod
    def read(cls, file: Path) -> Offer:
        """Reads an offer.

        Raises:
            UserError: If the file holds none.
        """
        try:
            with told_forbidden(file):
                whole = file.is_file() and file.stat().st_size <= _LONGEST
                content = json.loads(file.read_text()) if whole else None
            if not isinstance(content, dict) or set(content) != {"overrides", "classes"}:
                raise ValueError("no offer")
            lists = [value for value in content.values() if isinstance(value, list)]
            if len(lists) < len(content) or not all(isinstance(text, str) for own in lists for text in own):
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
    """One thing that an exchange takes.

    Attributes:
        round: Round of the exchange; 1 stands for every round.
        index: Its index in the round.
        exchange: Its name.
        disclosed: What its message tells.
        largest: Most bytes of the message, or of a message with one of `each`.
        each: What the message may hold any number of, such as images; empty where its size is bounded.
    """

    round: int
    index: int
    exchange: str
    disclosed: Disclosure
    largest: int
    each: str = ""

    @property
    def key(self) -> list[Any]:
        """What an approval binds: exchange, kind and number of images."""
        return [self.exchange, self.disclosed.kind.value, self.disclosed.images]

    def within(self, approved: list[Any]) -> bool:
        """Tells whether it is what was approved, or the same of more images."""
        (*what, images), (*other, least) = self.key, approved
        return what == other and (
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
        smallest: Images of the product of which the client has fewest.
        hidden: Whether the client's noise, where it adds some, hides single images.
        picture: Channels, height and width of the client's images.
    """
    up = build(config["federation"]["channel"]).up

    def of(exchange: Exchange, round: int, index: int) -> Iterator[Taken]:
        told = exchange.inner if isinstance(exchange, Noised) and not hidden else exchange
        for disclosed in disclosed_by(told, client):
            if disclosed.by_product:
                disclosed = replace(disclosed, images=smallest)
            largest, each = up.largest(spec := exchange.upload_spec(client)), ""
            if largest == LARGEST_BLOB:
                one, each = _of_one(spec, picture)
                largest = up.largest(one)
            yield Taken(round, index, exchange.name, disclosed, largest, each)

    setup = [
        part
        for place, one in enumerate(exchanges.setup)
        for part in of(one, place + exchanges.first_round, 0)
    ]
    rounds = [part for place, one in enumerate(exchanges.rounds) for part in of(one, 1, place)]
    return setup + rounds


def _of_one(spec: MessageSpec, picture: Sequence[int]) -> tuple[MessageSpec, str]:
    """Returns the form of a message with one of what it may hold any number of, such as one image, and its name."""
    sides, many = dict(zip(("channels", "height", "width"), picture, strict=False)), list[str]()

    def size(given: int | Free) -> int | Free:
        if isinstance(given, int) or given.name in sides:
            return given if isinstance(given, int) else sides[given.name]
        many.extend([given.name] * (given.at_most is None))
        return given if given.at_most else 1

    one = {name: replace(form, shape=tuple(map(size, form.shape))) for name, form in spec.items()}
    return one, next(iter(many), "")


class Approvals:
    """The federations that a site's operator has approved.

    Args:
        file: The file, which only grows; absent before the first.
    """

    def __init__(self, file: Path) -> None:
        self.log = ChainedLog(file)

    def add(self, digest: str, method: str, taken: Sequence[Taken]) -> None:
        """Notes an approval."""
        self.log.append(digest=digest, method=method, takes=[part.key for part in taken])

    def check(self, digest: str) -> list[list[Any]] | None:
        """Returns what an approved federation may take; None where nothing was approved at all.

        Raises:
            RefusalError: If others were approved, and not this one.
        """
        lines = self.log.entries()
        found = [line.get("takes") for line in lines if line.get("digest") == digest]
        if found and isinstance(found[-1], list):
            return found[-1]
        if lines:
            raise RefusalError(Code.NOT_APPROVED)
        return None


def judge(policy: Policy, taken: Sequence[Taken], images: int, approved: list[list[Any]] | None) -> None:
    """Refuses a federation that takes more than policy and approval let out.

    Raises:
        RefusalError: If it takes more.
    """
    for part in taken:
        if policy.allows(part.disclosed, images):
            continue
        if policy.needs_more(part.disclosed) or not any(map(part.within, approved or ())):
            raise not_allowed(part.disclosed, part.round, part.index)

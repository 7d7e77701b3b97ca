"""Messages between a coordinator and a site: a header of plain values, and one serialised message as payload.

Neither end trusts what it reads: every value has a type and a range, and an unknown key is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from lit_fedad.core.errors import UserError
from lit_fedad.core.text import printable
from lit_fedad.sites.refusals import MOST_NUMBERS, text_of

FORMAT = 7
"""Version of these messages: raise it when an older version could misread one of them."""

_LENGTH = struct.Struct(">I")  # bytes of the header, in front of it
_LONGEST_HEADER = 1 << 20  # bytes
LONGEST_START = _LENGTH.size + _LONGEST_HEADER
"""Most bytes of a message before its payload."""

LONGEST_SHARES = 64 << 20
"""Most bytes of keys and shares in a message of a secure sum: it has some hundred for each of the other sites."""

_LONGEST_TEXT = 500  # characters
MOST_ENTRIES = 1000  # of a list or dictionary, and so names of all sites' products
_MOST_SCALARS = 50  # each becomes several curves in the tracker; tasks and methods have at most ten
MOST_STEPS = 10**12
"""Most requests of a run: the names of the files with a site's states have twelve digits."""

_RUN = re.compile(r"[0-9a-f]{16}")  # ids of runs
_WORD = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)  # names of scalars
_MARK = re.compile(r"[\w.+-]{0,64}", re.ASCII)  # versions and hashes
_FORM = re.compile(r"|\d{1,4} classes and sets of anomalies \([0-9a-f]{8}\)")
QUESTIONS = ("scores", "calibration", "decisions", "further decisions")
"""Questions to sites about their test images and their calibration images."""

MOST_PRODUCTS = 200
"""Most products or classes of a site, or of all sites if a model tells them apart: each of them has sums of its own."""
_LONGEST_PRODUCT = 100  # characters of its name


class _Message:
    """A message: a header of plain values, which are the fields of a subclass, and one payload."""

    sender: ClassVar[str]
    payload: bytes

    def to_bytes(self) -> bytes:
        """Returns the message as bytes."""
        header = {"format": FORMAT, **asdict(self)}  # type: ignore[call-overload]
        del header["payload"]
        text = json.dumps(header).encode()
        return _LENGTH.pack(len(text)) + text + self.payload

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Reads a message.

        Raises:
            UserError: If the bytes hold no valid message.
        """
        try:
            (length,) = _LENGTH.unpack_from(blob)
            start = _LENGTH.size
            if not 0 < length <= min(_LONGEST_HEADER, len(blob) - start):
                raise ValueError("its header has another length")
            header = json.loads(blob[start : start + length])
            if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
                raise UserError(
                    f"{cls.sender} has another version of lit_fedad: install the same at all sites"
                )
            message = cls(**_checked(cls, header), payload=blob[start + length :])  # type: ignore[call-arg]
        except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{cls.sender} sent bytes that hold no message ({type(error).__name__})"
            ) from error
        message.check()
        return message

    def check(self) -> None:
        """Checks the ranges of the values, and that they fit together.

        Raises:
            UserError: If a value is out of range.
        """


@dataclass(frozen=True)
class Request(_Message):
    """A coordinator's request to one site.

    A site starts from the personal state that it had after step `base`, whatever it has done since: so a request may be
    sent twice, and a coordinator that went back to its checkpoint finds the older state.

    Attributes:
        kind: ``hello`` (who are you), ``play`` (an exchange), ``ask`` (a question), or the steps of a secure sum,
            ``offer`` and ``reveal``.
        run: The run, 16 hexadecimal digits.
        overrides: The federation's configuration, as choices and scalar values.
        client: The site's client number in this run.
        classes: Names of the classes that the federation learns; none if it looks for anomalies.
        products: Names of all sites' products, if the model tells them apart; none before sites have named theirs.
        round: Round of the context.
        exchange: Index of the exchange in the round.
        sums: Whether the message belongs to `Exchanges.leave_out` instead of that exchange.
        step: Number of this request in the run; the site stores its new state under this number.
        base: Step from whose state the site starts; 0 for the initial state.
        settled: States of steps before this one are not needed any more.
        keep: Whether the model that predicts is kept as personal state (`Pose.keep`).
        question: One of `QUESTIONS`; empty for other kinds, since the log would show such a request under its name.
        numbers: Numbers that belong to the question.
        names: Names of all clients' products; with ``offer``, names of the sites by client number.
        sealed: Number of bytes at the payload's beginning that are the envelopes of a secure sum.
        same: Hash of the server's message, if the site should still have it from its last request; empty if the
            payload holds the message.
        payload: The server's message, serialised.
    """

    kind: Literal["hello", "play", "ask", "offer", "reveal"]
    run: str
    overrides: list[str]
    client: int
    classes: list[str] = field(default_factory=list)
    products: list[str] = field(default_factory=list)
    round: int = 0
    exchange: int = 0
    sums: bool = False
    step: int = 0
    base: int = 0
    settled: int = 0
    keep: bool = False
    question: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    sealed: int = 0
    same: str = ""
    payload: bytes = b""

    sender: ClassVar[str] = "the coordinator"

    def check(self) -> None:
        """Checks ranges, that a question is one of `QUESTIONS`, and names of products; see `_Message.check`."""
        valid = (
            self.kind in ("hello", "play", "ask", "offer", "reveal")
            and _RUN.fullmatch(self.run) is not None
            and 0 <= self.client < 10_000
            and 0 <= self.settled <= self.base <= self.step < MOST_STEPS
            and abs(self.round) < 1 << 31
            and 0 <= self.exchange < 1000
            and 0 <= self.sealed <= len(self.payload)
            and not (self.same and self.payload)
            and (self.kind == "ask") == bool(self.question)
            and self.question in ("", *QUESTIONS)
            and are_products(self.products)
            and are_products(self.classes)
        )
        if not valid:
            raise UserError("the coordinator sent a request whose numbers are out of range")


@dataclass(frozen=True)
class Facts:
    """What a site says of itself and of the run; all sites of a run must agree in some of these facts.

    Attributes:
        version: Version of lit_fedad.
        torch: Version of torch.
        configuration: Hash of the composed configuration.
        backbone: Hash of the frozen backbone.
        initial: Hash of the client's initial weights.
        stages: Numbers of training images by product, for each stage in which images arrive; one stage if all are there
            from the start.
        held: Numbers of images by product, including those that the site keeps back for calibration.
        tested: Numbers of test images by product or class.
        anomalies: Names of the sets of semantic anomalies; none for other images.
        form: For semantic anomalies, number and hash of classes and sets: labels are indices into their list.
    """

    version: str = ""
    torch: str = ""
    configuration: str = ""
    backbone: str = ""
    initial: str = ""
    stages: list[dict[str, float]] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    tested: dict[str, float] = field(default_factory=dict)
    anomalies: list[str] = field(default_factory=list)
    form: str = ""

    @property
    def stage_sizes(self) -> list[int]:
        """Number of training images of each stage."""
        return [int(sum(stage.values())) for stage in self.stages]

    @property
    def size(self) -> int:
        """Number of training images."""
        return sum(self.stage_sizes)

    def of_product(self, product: str) -> int:
        """Returns the number of training images of a product."""
        return int(sum(stage.get(product, 0) for stage in self.stages))

    @classmethod
    def read(cls, content: Any) -> Facts:
        """Reads facts from plain values, which are not trusted.

        Raises:
            UserError: If a value is out of range.
            ValueError: If the keys are not those of the fields.
            TypeError: If a value is of another type.
        """
        facts = cls(**_checked(cls, content))
        facts.check()
        return facts

    def check(self) -> None:
        """Checks sizes, names, and that texts are versions or hashes; see `_Message.check`."""
        stages = (size for stage in self.stages for size in stage.values())
        sizes = (*stages, *self.held.values(), *self.tested.values())
        if not all(0 <= size < 1e9 and size == int(size) for size in sizes):
            raise UserError("the site sent sizes that are no numbers of images")
        if not all(map(are_products, (self.held, self.tested, self.anomalies, *self.stages))):
            raise UserError(f"the site sent names that are not those of at most {MOST_PRODUCTS} products")
        marks = (self.version, self.torch, self.configuration, self.backbone, self.initial)
        if not (all(map(_MARK.fullmatch, marks)) and _FORM.fullmatch(self.form)):
            raise UserError("the site sent texts that are no versions or hashes")


@dataclass(frozen=True)
class Reply(_Message):
    """A site's reply to a request.

    Attributes:
        step: Number of the request.
        code: Why the request failed (`lit_fedad.sites.refusals.Code`); 0 if it did not.
        numbers: The numbers that belong to the code. No text of an error leaves a site.
        scalars: Loss and other scalars of training.
        facts: The site's facts, in answer to ``hello``.
        payload: The client's message, serialised.
    """

    step: int = 0
    code: int = 0
    numbers: list[float] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    payload: bytes = b""

    @property
    def cause(self) -> str:
        """Why the request failed, in one line; empty if it did not."""
        return text_of(self.code, self.numbers) if self.code else ""

    sender: ClassVar[str] = "the site"

    def check(self) -> None:
        """Checks how many numbers a code has, and number and names of scalars; see `_Message.check`."""
        if len(self.scalars) > _MOST_SCALARS:
            raise UserError(f"the site sent {len(self.scalars)} scalars, at most {_MOST_SCALARS} are taken")
        if len(self.numbers) > MOST_NUMBERS or not all(_WORD.fullmatch(name) for name in self.scalars):
            raise UserError("the site sent more of an error than its number, or scalars without a name")


def are_products(names: Collection[str]) -> bool:
    r"""Tells whether texts can be names of products: different, printable, at most 100 characters, and not too many.

    Example:
        >>> [are_products(names) for names in (["nut", "M8 bolt"], ["nut", "nut"], ["a\n"], ["x" * 101])]
        [True, False, False, False]
    """
    return len(set(names)) == len(names) <= MOST_PRODUCTS and all(
        name.strip() and name.isprintable() and len(name) <= _LONGEST_PRODUCT for name in names
    )


def moment_in_words(round: object, asked: object) -> str:
    """Returns in words when in a run a request comes, by its round and its kind or question.

    A question after a round comes with the message and the number of the next. The steps of a secure sum name no round.

    Example:
        >>> asked = (0, "play"), (3, "play"), (1, "scores"), (3, "scores")
        >>> [moment_in_words(round, kind) for round, kind in asked]
        ['set-up', 'round 3', 'after set-up', 'after round 2']
        >>> moment_in_words(0, "reveal")
        'secure sum'
    """
    if not isinstance(round, int):
        return "-"
    if asked in ("offer", "reveal"):
        return "secure sum"
    asks = asked in QUESTIONS
    number = round - 1 if asks else round
    place = f"round {number}" if number > 0 else "set-up"
    return f"after {place}" if asks else place


def digest(message: bytes) -> str:
    """Computes the hash that names a message which is not sent again; empty for an empty message."""
    return hashlib.sha256(message).hexdigest() if message else ""


def _checked(kind: Any, header: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a header as the fields of a dataclass, checked by their declared types."""
    declared = {f.name: str(f.type) for f in fields(kind) if f.name != "payload"}
    if set(header) != set(declared):
        raise ValueError("other keys")
    return {name: _value(header[name], declared[name]) for name in declared}


def _value(value: Any, declared: str) -> Any:
    """Checks and returns a value of a declared type; lists and dictionaries have at most a thousand entries."""
    if declared == "Facts":
        return Facts.read(value)
    if declared == "str" or declared.startswith("Literal"):
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            raise TypeError("str")
        return printable(value)
    if declared == "float" and type(value) in (int, float):
        return float(value)
    if declared in ("int", "bool") and type(value).__name__ == declared:
        return value
    if type(value).__name__ != declared.partition("[")[0] or len(value) > MOST_ENTRIES:
        raise TypeError(declared)
    if isinstance(value, dict):
        return {_value(key, "str"): _value(entry, "float") for key, entry in value.items()}
    return [_value(entry, declared.removeprefix("list[").removesuffix("]")) for entry in value]

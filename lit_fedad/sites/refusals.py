"""Why a site does not answer: a number of a fixed list, and numbers. Nothing else of an error leaves the site."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from lit_fedad.contracts.disclosure import Kind
from lit_fedad.core.errors import UserError

KINDS = tuple(Kind)
MOST_NUMBERS = 4


class Code(IntEnum):
    """What was wrong. Numbers are those of the wire: a new one is added at the end."""

    NONE = 0
    FAILED = 1
    AGAIN = 2
    REQUEST = 3
    OVERRIDE = 4
    CONFIGURATION = 5
    NOT_ALLOWED = 6
    NOT_APPROVED = 7
    FLOOR = 8
    RUNS = 9
    EXCHANGE = 10
    QUERY = 11
    PRODUCT = 12
    CLASS = 13
    LEAVE_OUT = 14
    STATE = 15
    IMAGES = 16
    MODEL = 17
    REUSED = 18
    SECURE = 19
    REGISTRY = 20
    NAMES = 21
    MASK = 22
    PART = 23
    CLAIMED = 24
    COUNT = 25
    NOISE = 26
    PROMISE = 27
    BUDGET = 28
    LOG = 29
    FEW = 30
    MESSAGE = 31
    STAGES = 32
    REPEATED = 33
    NAMED = 34


_TEXTS = {
    Code.FAILED: "failed; entry {0} of its log (lit-fedad site log) says why",
    Code.AGAIN: "has not kept the server's message",
    Code.REQUEST: "cannot read the request: install the same version of lit_fedad at all sites",
    Code.OVERRIDE: "takes no override such as number {0} of the federation's",
    Code.CONFIGURATION: "cannot compose the federation's configuration; its log (lit-fedad site log) says why",
    Code.NOT_ALLOWED: (
        "does not let out {kind} (round {1}, exchange {2}): its operator decides (lit-fedad site review, site approve)"
    ),
    Code.NOT_APPROVED: (
        "has approved other federations, and not this one: its operator decides (lit-fedad site review, site approve)"
    ),
    Code.FLOOR: "has a floor of {0:g} for a setting that is {1:g} here: its operator decides (site.yaml, policy)",
    Code.RUNS: "has answered in {0} runs without noise, and its policy allows no more (site.yaml, policy.runs)",
    Code.EXCHANGE: "knows no exchange {1} of round {0}",
    Code.QUERY: "does not answer this query",
    Code.PRODUCT: "has a product that the coordinator does not know: begin again",
    Code.CLASS: "has a class that the coordinator does not know: give all of them by classes=",
    Code.LEAVE_OUT: "was asked for a model made of sums, which this method has not",
    Code.STATE: "has no state of step {0} of this run: its folder was cleared; begin another run",
    Code.IMAGES: "has other images than when this run began; give back what it had, or begin another run",
    Code.MODEL: "has another model than when this run began; give back what it had, or begin another run",
    Code.REUSED: "knows this run under another configuration; begin another run",
    Code.SECURE: "has a key registry, and answers in runs of secure sums alone: give federation=secure",
    Code.REGISTRY: "has no key registry for secure sums: docs/sites.md",
    Code.NAMES: "knows the sites of the run under other names or keys: compare registries",
    Code.MASK: "sends nothing without the masks of a secure sum",
    Code.PART: "has a part in no sum",
    Code.CLAIMED: (
        "gave its part of round {0} to the sum of other sites already: their difference would tell what one site sent;"
        " it answers with the same sites, or under noise"
    ),
    Code.COUNT: "has {1} images, and the coordinator counts {0}",
    Code.NOISE: "was asked for the sum of {0} sites, which holds less noise than that of {1}",
    Code.PROMISE: (
        "answers in runs alone whose sites draw noise for epsilon of at most {0:g}: give federation/privacy=distributed"
        " or dp_sgd, and federation.privacy.epsilon={0:g}"
    ),
    Code.BUDGET: "has epsilon {0:.4g} left, and this asks for {1:.4g}: its operator decides (docs/sites.md#noise)",
    Code.LOG: "cannot write its log, and answers nothing until it can",
    Code.FEW: "has {0} images to calibrate with, and its policy asks for {1}",
    Code.STAGES: "has stages that suit neither its images nor this run; its log (lit-fedad site log) says why",
    Code.REPEATED: "has answered {1} different messages in round {0}, and answers no other: begin another run",
    Code.NAMED: "has products whose names it does not tell; its log (lit-fedad site log) says why",
    Code.MESSAGE: "received a message of another form than the method declares",
}


class RefusalError(UserError):
    """A refusal of a site.

    Args:
        code: What was wrong.
        *numbers: The numbers that belong to it.
        detail: What the site's own operator reads beside it; never sent.
    """

    def __init__(self, code: Code, *numbers: float, detail: str = "") -> None:
        self.code, self.numbers = code, numbers[:MOST_NUMBERS]
        told = text_of(code, self.numbers)
        super().__init__(f"{told} ({detail})" if detail else told)


def text_of(code: int, numbers: Sequence[float]) -> str:
    """Returns what a coordinator's operator reads of a code; of one that this version does not know its number.

    Example:
        >>> text_of(Code.STATE, [3])
        'has no state of step 3 of this run: its folder was cleared; begin another run'
    """
    try:
        template = _TEXTS[Code(code)]
        whole = [int(number) if number == int(number) else number for number in numbers]
        kind = KINDS[int(numbers[0])].words if code == Code.NOT_ALLOWED else ""
        return template.format(*whole, kind=kind)
    except (ValueError, LookupError, OverflowError):
        return f"refuses for a reason that this version does not know (number {code})"

"""Codes of the reasons why a site does not answer.

A code and the few numbers that belong to it are all that leaves the site of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from lit_fedad.contracts.disclosure import Kind
from lit_fedad.core.errors import UserError

KINDS = tuple(Kind)
MOST_NUMBERS = 4


class Code(IntEnum):
    """What was wrong, with the text that the coordinator's operator reads.

    Messages hold the codes as numbers, so these never change: a new code is added at the end.
    """

    text: str

    def __new__(cls, number: int, text: str = "") -> Code:
        """Builds a code from its number and its text, in which ``{0}`` stands for the first number that is sent."""
        code = int.__new__(cls, number)
        code._value_, code.text = number, text
        return code

    NONE = 0
    FAILED = 1, "failed; entry {0} of its log (lit-fedad site log) says why"
    AGAIN = 2, "has not kept the server's message"
    REQUEST = 3, "cannot read the request: install the same version of lit_fedad at all sites"
    OVERRIDE = 4, "does not take override {0} of federation.yaml; its log (lit-fedad site log) says why"
    CONFIGURATION = 5, "cannot compose the federation's configuration; its log (lit-fedad site log) says why"
    NOT_ALLOWED = (
        6,
        "does not let out {kind} (round {1}, exchange {2}): its operator decides (lit-fedad site review, site"
        " approve)",
    )
    NOT_APPROVED = (
        7,
        "has approved other federations, and not this one: its operator decides (lit-fedad site review, site approve)",
    )
    FLOOR = (
        8,
        "has a floor of {0:g} for a setting that is {1:g} here: its operator decides (site.yaml, policy)",
    )
    RUNS = 9, "has answered in {0} runs without noise, and its policy allows no more (site.yaml, policy.runs)"
    EXCHANGE = 10, "knows no exchange {1} of round {0}"
    QUERY = 11, "does not answer this query"
    PRODUCT = 12, "has a product that the coordinator does not know: begin again"
    CLASS = 13, "has a class that the coordinator does not know: give all of them by classes="
    LEAVE_OUT = 14, "was asked for a model made of sums, which this method has not"
    STATE = 15, "has no state of step {0} of this run: its folder was cleared; begin another run"
    IMAGES = 16, "has other images than when this run began; give back what it had, or begin another run"
    MODEL = 17, "has another model than when this run began; give back what it had, or begin another run"
    REUSED = 18, "knows this run under another configuration; begin another run"
    SECURE = 19, "has a key registry, and answers in runs of secure sums alone: give federation=secure"
    REGISTRY = 20, "has no key registry for secure sums: docs/sites.md"
    NAMES = 21, "knows the sites of the run under other names or keys: compare registries"
    MASK = 22, "sends nothing without the masks of a secure sum"
    PART = 23, "has a part in no sum"
    CLAIMED = (
        24,
        "gave its part of round {0} to the sum of other sites already: their difference would tell what one site"
        " sent; it answers with the same sites, or under noise",
    )
    COUNT = 25, "has {1} images, and the coordinator counts {0}"
    NOISE = 26, "was asked for the sum of {0} sites, which holds less noise than that of {1}"
    PROMISE = (
        27,
        "answers in runs alone whose sites draw noise for epsilon of at most {0:g} at a delta of at most 1e-05: give"
        " federation/privacy=distributed or dp_sgd, and federation.privacy.epsilon={0:g}",
    )
    BUDGET = (
        28,
        "has epsilon {0:.4g} left, and this asks for {1:.4g}: its operator decides (docs/sites.md#noise)",
    )
    LOG = 29, "cannot write its log, and answers nothing until it can"
    FEW = (
        30,
        "has {0} images whose scores this would tell, and its policy asks for {1}: its operator decides (lit-fedad site"
        " review, site approve)",
    )
    MESSAGE = 31, "received a message of another form than the method declares"
    STAGES = 32, "has stages that suit neither its images nor this run; its log (lit-fedad site log) says why"
    REPEATED = 33, "has answered {1} different messages in round {0}, and answers no other: begin another run"
    NAMED = 34, "has products whose names it does not tell; its log (lit-fedad site log) says why"
    SUBSET = (
        35,
        "would train with other images than in earlier runs: a difference of what all sum would be of {0} images, and"
        " its policy asks for {1}; give seed and calibration.share of an earlier run, or have it add more images",
    )
    CEILING = (
        36,
        "has a ceiling of {0:g} for a setting that is {1:g} here: its operator decides (site.yaml, policy)",
    )
    GROUPS = (
        37,
        "has told means of other groups of the same images, and both together would tell single images: give seed and"
        " method of that run, and the sites in its order",
    )
    QUORUM = (
        38,
        "was asked for a sum of which {0} sites must finish, and {1} must in this run: at least three, and more than"
        " the share federation.secure_sum.quorum",
    )
    INVITED = 39, "was invited to two sums by one invitation: their shares together would unmask what it sent"
    PRODUCTS = (
        40,
        "has more products than a site brings to a federation; its log (lit-fedad site log) says why",
    )
    NUMBER = (
        41,
        "had another number among the sites when this run began: give it back its own file under keys, and its place in"
        " sites",
    )


class RefusalError(UserError):
    """A refusal of a site.

    Args:
        code: What was wrong.
        *numbers: The numbers that belong to it.
        detail: What the site's own operator reads in addition; it is never sent.
    """

    def __init__(self, code: Code, *numbers: float, detail: str = "") -> None:
        self.code, self.numbers = code, numbers[:MOST_NUMBERS]
        text = text_of(code, self.numbers)
        super().__init__(f"{text} ({detail})" if detail else text)


def text_of(code: int, numbers: Sequence[float]) -> str:
    """Returns what the coordinator's operator reads of a code; names its number if this version does not know it.

    Example:
        >>> text_of(Code.STATE, [3])
        'has no state of step 3 of this run: its folder was cleared; begin another run'
    """
    try:
        whole = [int(number) if number == int(number) else number for number in numbers]
        kind = KINDS[int(numbers[0])].words if code == Code.NOT_ALLOWED else ""
        return Code(code).text.format(*whole, kind=kind)
    except (ValueError, LookupError, OverflowError):
        return f"refuses for a reason that this version does not know (number {code})"

"""A federation in words: what it would take of a site, for the person who decides whether the site takes part."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lit_fedad.contracts.disclosure import Disclosure, Disclosures, Kind
from lit_fedad.core.config import Config
from lit_fedad.core.nested import flatten
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.accuracy import AccuracyEvaluator
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.calibration import CalibrationQuery
from lit_fedad.evaluation.decisions import DecisionsQuery
from lit_fedad.evaluation.semantic import SemanticEvaluator
from lit_fedad.report.naming import human_bytes, method_title
from lit_fedad.sites.offer import Offer, Taken, judge
from lit_fedad.sites.settings import COUNTED, LOSS, Policy, SiteSettings
from lit_fedad.sites.site_part import SitePart

MEANINGS = {
    Kind.COUNTS: "numbers of images, and of cases; by bin of a score they tell how unusual single images look",
    Kind.SUMS: "totals over all images; single images cannot be told apart in them, where many stand behind",
    Kind.WEIGHTS: "the numbers of a trained model; experts can at times tell whether an image was learnt from",
    Kind.CLASS_STATISTICS: "averages over the images of one class; of few images they describe each of them",
    Kind.PATCHES: "numbers that describe small parts of single images; experts can tell roughly what a part shows",
    Kind.SYNTHETIC_IMAGES: "pictures that a computer draws after the images of a class; they may resemble real ones",
    Kind.MEAN_IMAGES: "pictures that are averages of several real images; of alike images one may recognise them",
    Kind.IMAGES: "the images themselves",
}
"""Meaning of each kind, for a person who is not of the field."""

TERMS = {
    "feature": "numbers by which a network describes an image or a part of it",
    "patch": "a small part of an image",
    "covariance": "how numbers vary together over many images or parts",
    "variance": "how much a number varies",
    "quantile": "the number that a given share of all numbers is below",
    "logit": "numbers by which a model says how well an image fits each class",
    "score": "a number by which the model says how unusual an image is",
    "bin": "a narrow range of numbers, in which cases are counted",
    "label": "whether an image is normal or not, or its class",
}
"""Meaning of other words of the review."""


@dataclass(frozen=True)
class Review:
    """A federation as a site's operator reads it.

    Attributes:
        lines: The text.
        digest: Hash of the federation's settings, which an approval names.
        method: Name of the method.
        taken: What its exchanges take of the site's images.
        images: Fewest training images that are summed together.
    """

    lines: list[str]
    digest: str
    method: str
    taken: list[Taken]
    images: int

    def check(self, policy: Policy) -> None:
        """Checks that an approval is enough for all that the federation takes.

        Raises:
            RefusalError: If the federation takes what not even an approval lets out.
        """
        judge(policy, self.taken, self.images, [part.key for part in self.taken])


def review(settings: SiteSettings, offer: Offer) -> Review:
    """Describes what an offered federation would take of a site.

    Raises:
        RefusalError: If the site takes no part in such a federation, whatever its operator approves.
        UserError: If the site's images cannot be read.
    """
    policy = settings.policy
    config, digest = offer.composed(settings)
    part = SitePart(config, settings, 0, offer.classes)
    facts, model, least = part.facts, part.model, part.fewest()
    size, kept = facts.size, len(part.partition.calibration[0]) if part.partition.calibration else 0
    noise = part.noise(Path(), "")
    taken = part.taken(noise)
    kinds = {Kind.COUNTS, Kind.SUMS, *(part.disclosed.kind for part in taken)}
    lines = [
        f"Method {method_title(config['method'])},"
        f" {config['rounds']} round{'s' * (config['rounds'] != 1)}, asked by"
        f" {settings.coordinator or 'the coordinator'}.",
        f"This site, {settings.name}, would train with {size} images"
        f"{f' and set thresholds by {kept} others' if kept else ''}. It would send what follows to the coordinator,"
        " which merges it with that of other sites; they receive what comes of it. Names of files stay here.",
        "",
        f"- Once, at the beginning: numbers of its images by product or class, with these names, which the coordinator"
        f" tells all other sites: {', '.join({**facts.held, **facts.tested})}; versions and hashes of its software."
        f" {_allowed(policy, Kind.COUNTS)}",
        *(f"- {described(one, config['rounds'], least)} {verdict(policy, one, least)}." for one in taken),
        *_queries(part),
    ]
    if not (noise and noise.drawn_here) and any(
        weight.requires_grad for weight in model.client.task.parameters()
    ):
        sends_loss = policy.allows(LOSS, least)
        ending = "Allowed" if sends_loss else "Left out, unless you approve"
        lines.append(f"- With each training: its loss and other means over all images. {ending}.")
    lines += [
        "",
        "What these words mean:",
        *(f"- {kind.words}: {MEANINGS[kind]}." for kind in Kind if kind in kinds),
    ]
    text = " ".join(lines)
    lines += [f"- {term}: {meaning}." for term, meaning in TERMS.items() if re.search(rf"\b{term}", text)]
    lines += [
        "",
        "Test images: the coordinator chooses the model that looks at them; one that does not keep to the method can"
        " choose it so that answers tell what single test images show.",
    ]
    if config["federation"].get("secure_sum"):
        lines.append("Messages are masked: the coordinator sees the sum over all sites alone.")
    if noise:
        lines.append(f"Noise: {noise.words}.")
    if kinds & {Kind.WEIGHTS, Kind.CLASS_STATISTICS, Kind.SYNTHETIC_IMAGES}:
        lines.append(
            "Training images: a coordinator that does not keep to the method can send a model so that what comes back"
            " tells more of single images; noise bounds that (federation/privacy)."
        )
    lines += [*_varied(policy, config), f"Hash of all this: {digest}"]
    return Review(lines, digest, config["method"]["name"], taken, least)


def described(part: Taken, rounds: int, images: int) -> str:
    """Describes in a sentence what an exchange takes, for a person who does not know the method.

    Args:
        part: What the exchange takes.
        rounds: Number of rounds of the run.
        images: Fewest training images that are summed together.
    """
    disclosed = part.disclosed
    in_rounds = f"In each of {rounds} rounds" if rounds > 1 else "In the round"
    when = "Once, at the beginning" if part.round < 1 else in_rounds
    fewest = images if disclosed.images is None else min(disclosed.images, images)
    count = ""
    if disclosed.kind in COUNTED:
        many = f", each value of at least {fewest} images"
        count = many if fewest > 1 else ", a value may be of one image alone"
    noise = "; noise hides single images" if disclosed.noised else ""
    what = f"{disclosed.kind.words}: {disclosed.what}{count}{noise}"
    each = f" for each of its {part.each}" if part.each else ""
    return (
        f"{when} ({part.exchange}): {what}; the whole message has at most {human_bytes(part.largest)}{each}."
    )


def verdict(policy: Policy, part: Taken, images: int) -> str:
    """Returns in words whether a policy lets out what an exchange takes; `images` is as for `described`."""
    if policy.allows(part.disclosed, images):
        return "Allowed"
    if policy.needs_more(part.disclosed):
        return "REFUSED, unless policy.allow in site.yaml names images"
    few = f": of fewer than {policy.images} images" if part.disclosed.kind.value in policy.allow else ""
    return f"NEEDS YOUR APPROVAL{few}"


def _queries(part: SitePart) -> list[str]:
    """Describes, a line each, the questions that a site is asked about its test and calibration images."""
    policy, every, setup = (
        part.settings.policy,
        part.config["evaluation"]["every"],
        part.model.method.exchanges.setup,
    )
    rounds = "after each round" if every == 1 else f"after every {every} rounds, and after the last"
    when = f"At the beginning, and {rounds}" if setup else rounds.capitalize()
    asked: list[tuple[str, str, Disclosures]] = [(when, "scores", AccuracyEvaluator.discloses)]
    if part.images.kind != "classification":
        scorer = SemanticEvaluator if isinstance(part.images, SemanticSet) else AnomalyEvaluator
        asked = [
            (when, "scores", scorer.discloses),
            ("After the last round", "calibration", CalibrationQuery.discloses),
            ("After the last round", "decisions", DecisionsQuery.discloses),
        ]

    def end(question: str, disclosed: Disclosure) -> str:
        images = part.fewest_scored(question)
        few = disclosed.kind.value in policy.allow and 0 < images < policy.images
        return f"NEEDS YOUR APPROVAL: {images} images are few." if few else _allowed(policy, disclosed.kind)

    return [f"- {when}: {one.what}. {end(question, one)}" for when, question, told in asked for one in told]


def _varied(policy: Policy, config: Config) -> list[str]:
    """Lists the settings that may change without another approval, and names in ``policy.vary`` that are no setting."""
    settings, lines = flatten(config), []
    if known := [key for key in policy.vary if key in settings]:
        lines.append(f"Settings that may change without another approval: {', '.join(known)}.")
    for key in sorted({*policy.vary} - set(settings)):
        close = difflib.get_close_matches(key, settings, n=1, cutoff=0.5)
        meant = f"; did you mean '{close[0]}'?" if close else "."
        lines.append(f"policy.vary in site.yaml names '{key}', which is no setting of this federation{meant}")
    return lines


def _allowed(policy: Policy, kind: Kind) -> str:
    return "Allowed." if kind.value in policy.allow else "REFUSED by policy.allow in site.yaml."

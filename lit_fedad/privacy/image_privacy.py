"""Differential privacy of a run: the noise that its sums over images need, and the budget that is spent.

In closed form (Gaussian DP): a sum that one image changes by at most B, with noise N(0, (sigma B)^2), is mu-GDP with
``mu = 1 / sigma``; several such sums of the same images are ``sqrt(mu_1^2 + mu_2^2 + ...)``-GDP (Dong, Roth and Su,
JRSS B 2022, Corollary 3.3), even if each sum depends on the results of the previous ones.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from scipy.optimize import brentq
from scipy.special import log_ndtr

from lit_fedad.contracts import Client, Exchange, Exchanges, Method, image_sums_of, merges_sums
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import stored_bytes, write_secret
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.privacy.ledger import ROUNDING
from lit_fedad.privacy.noised_sums import Noise, noised
from lit_fedad.privacy.secure_aggregation import SecureSum, sending

KEY_FILE = "noise.key"
"""Name of the file in a run's folder that holds the secret from which its noise is drawn."""


@dataclass(frozen=True)
class Course:
    """The properties of a run on which its noise depends.

    Attributes:
        rounds: Number of training rounds.
        sizes: Number of images of each client.
        sampler: Samples the clients of a round.
        secure_sum: Settings of secure aggregation; None for none.
        staged: Whether data come in stages.
    """

    rounds: int
    sizes: Mapping[int, int]
    sampler: ClientSampler
    secure_sum: SecureSum | None = None
    staged: bool = False

    def check_stages(self) -> None:
        """Refuses data that come in stages.

        Raises:
            UserError: If the data come in stages.
        """
        if self.staged:
            raise UserError(
                "federation.privacy: data that come in stages are not accounted for; give a partition without stages"
            )


@dataclass(frozen=True)
class ImagePrivacy:
    """The settings of differential privacy at the level of an image.

    Neighbouring data sets differ in one unit: in one of them the images of this unit add nothing to the sums.

    Attributes:
        epsilon: Budget of the whole run; None for infinity, which is a run without clipping and noise.
        delta: Probability with which the guarantee may fail.
        where: Who adds the noise: with ``central`` the server adds it to the sum, with ``distributed`` each client adds
            a share of it, under secure sums.
        clip: Largest norm of what one image adds, in the units of `ImageSums`.
        noise: Noise multiplier sigma of every sum; None for the smallest that the budget allows for the run's sums.
        unit_images: Largest number of images that are protected together as one unit: 1 for an image, more for a
            patient or an object.
        seed: Seed of the noise, for experiments that must be repeatable. Anybody who knows it can remove the noise.
            None for a secret of the run.

    Raises:
        UserError: If a number is out of range.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    where: Literal["central", "distributed"] = "central"
    clip: float = 0.5
    noise: float | None = None
    unit_images: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        section = "federation.privacy"
        above(section, 0, epsilon=self.epsilon, delta=self.delta, clip=self.clip, noise=self.noise)
        within(section, 0, 0.1, delta=self.delta)
        at_least(section, 1, unit_images=self.unit_images)
        if self.epsilon is None and self.noise is not None:
            raise UserError("federation.privacy.noise needs a budget: give federation.privacy.epsilon too")

    @property
    def unit(self) -> str:
        """The unit that is protected, as words of a sentence."""
        return "image" if self.unit_images == 1 else f"group of up to {self.unit_images} images"

    def plan(self, method: Method, course: Course) -> Plan:
        """Plans the noise of a run, before anything runs.

        Raises:
            UserError: If an exchange cannot be noised, settings exclude each other, or the budget would be overdrawn.
        """
        assert self.epsilon is not None
        client, exchanges = method.client, method.exchanges.under_noise
        for exchange in sending(replace(method, exchanges=exchanges)):
            if image_sums_of(exchange, client) is None or not merges_sums(exchange, method.server):
                raise UserError(
                    f"federation.privacy: exchange '{exchange.name}' of {type(client).__name__} is no sum over images"
                    " whose parts can be bounded; give a method that docs/privacy.md names, or federation/privacy=null"
                )
        a_round = releases_of(exchanges.rounds, client)
        if a_round > 1:  # resumed with other clients, a round would put the same noise on another second sum
            raise UserError(
                f"federation.privacy: {type(client).__name__} sends {a_round} sums in a round, and only one can be"
                " noised; send them in one exchange, or give federation/privacy=null"
            )
        course.check_stages()
        carriers = 1
        if self.where == "distributed":
            if course.secure_sum is None or course.sampler.fraction < 1:
                raise UserError(
                    "federation.privacy.where=distributed: a client's share of the noise hides nothing alone, nor that"
                    " of some; give federation=secure and federation.sampler.fraction=1, or where=central"
                )
            carriers = course.secure_sum.quorum_of(len(course.sizes))
        # Every round counts for every image: sampling of clients does not reduce the number of releases.
        releases = releases_of(exchanges.setup, client) + course.rounds * a_round
        if releases == 0:
            raise UserError("federation.privacy: nothing is sent that noise could protect")
        noise = self.noise or math.sqrt(releases) / mu_of(self.epsilon, self.delta)
        plan = Plan(self, noise, releases, carriers, frozenset(course.sizes))
        plan.check(releases, "this run")
        return plan


@dataclass(frozen=True)
class Plan:
    """The noise of a run.

    Attributes:
        settings: The settings of differential privacy.
        sigma: Standard deviation of a sum's noise, in multiples of the largest change that one unit makes.
        releases: Number of noised sums in the whole run.
        carriers: Number of clients whose shares add up to the whole noise; 1 where the server adds it.
        clients: All clients of the run; None where every sum is over the same clients.
    """

    settings: ImagePrivacy
    sigma: float
    releases: int
    carriers: int = 1
    clients: frozenset[int] | None = field(default=None, repr=False)  # a site's ledger hashes the repr

    @property
    def noise(self) -> Noise:
        """The noise of every sum."""
        settings = self.settings
        carriers = self.carriers if settings.where == "distributed" else None
        deviation = self.sigma * settings.clip * settings.unit_images
        return Noise(settings.clip, deviation, carriers, self.clients)

    def epsilon(self, releases: int) -> float:
        """Computes the epsilon of so many noised sums."""
        return epsilon_of(math.sqrt(releases) / self.sigma, self.settings.delta)

    def check(self, releases: int, what: str) -> None:
        """Refuses a number of noised sums that would overdraw the budget.

        Args:
            releases: Number of noised sums in all, with those to come.
            what: What asks for them, for the error message.

        Raises:
            UserError: If their epsilon exceeds the budget.
        """
        budget, needed = self.settings.epsilon, self.epsilon(releases)
        assert budget is not None
        if needed > budget * ROUNDING:
            raise UserError(
                f"federation.privacy: {what} needs epsilon {needed:.4g} for {releases} noised sums, and the budget is"
                f" {budget:g}; give more noise, fewer rounds or a larger epsilon"
            )

    def released_in(self, exchanges: Sequence[Exchange], client: Client) -> int:
        """Counts the exchanges that release information about images."""
        return releases_of(exchanges, client)

    def noised(self, method: Method, key: bytes) -> Exchanges:
        """Wraps all exchanges of a method to add the noise; see `lit_fedad.privacy.noised_sums`."""
        return noised(method, self.noise, key)

    def summary(self, releases: int) -> dict[str, float | int | str | bool]:
        """Describes the budget that a run has spent, for its result."""
        settings = self.settings
        spent = {"epsilon": self.epsilon(releases), "noise": self.sigma, "sums": releases}
        return terms(settings) | spent | {"unit": settings.unit, "where": settings.where, "of": "sums"}


def terms(settings: Any) -> dict[str, float | int | str | bool]:
    """Describes the guarantee of privacy settings, of sums or of training, for a run's result."""
    promised = {"budget": settings.epsilon, "delta": settings.delta, "clip": settings.clip}
    return promised | {"secret": settings.seed is None}


def in_words(summary: dict[str, float | int | str | bool]) -> str:
    """Describes the content of `Plan.summary` in one line."""
    warning = "" if summary["secret"] else "; its noise has a known seed: a measurement, no protection"
    return (
        f"epsilon {summary['epsilon']:.4g} at delta {summary['delta']:g}, unit: {summary['unit']}"
        f" ({summary['where']} noise {summary['noise']:.3g} x clip {summary['clip']:g}, {summary['sums']}"
        f" {summary['of']}{warning})"
    )


def releases_of(exchanges: Sequence[Exchange], client: Client) -> int:
    """Counts the exchanges that release information about images."""
    sums = [image_sums_of(exchange, client) for exchange in exchanges]
    return sum(bool(one.shapes()) for one in sums if one is not None)


def noise_key(folder: Path, seed: int | None, images: str) -> bytes:
    """Returns the secret from which a run's noise is drawn; a resumed run draws the same noise for the same sum.

    Other images get other noise: with the same noise, the difference of two sums would be free of noise.

    Args:
        folder: The run's folder, in which the secret is stored until the run is complete.
        seed: A seed from which the secret is derived instead; None to draw the secret.
        images: Hash of images and partition.

    Raises:
        UserError: If the file was changed.
    """
    if seed is not None:
        return blake2b(f"noise {seed} {images}".encode(), digest_size=32).digest()
    path = folder / KEY_FILE
    if not path.exists():
        write_secret(path, secrets.token_bytes(32))
    key = stored_bytes(path)
    if len(key) != 32:
        raise UserError(f"{path}: is no key of 32 bytes; restore it from a copy, or begin another run")
    return blake2b(images.encode(), key=key, digest_size=32).digest()


def delta_of(epsilon: float, mu: float) -> float:
    """Computes the smallest delta of a mu-GDP release (Dong, Roth and Su, Corollary 2.13).

    ``delta = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2)``.

    Args:
        epsilon: Epsilon, at least 0.
        mu: mu, at least 0.
    """
    if mu == 0:
        return 0.0
    likely, unlikely = log_ndtr(-epsilon / mu + mu / 2), log_ndtr(-epsilon / mu - mu / 2)
    return max(0.0, math.exp(likely) - math.exp(epsilon + unlikely))


def epsilon_of(mu: float, delta: float) -> float:
    """Computes the smallest epsilon of a mu-GDP release at a delta.

    Args:
        mu: mu, at least 0.
        delta: delta, in (0, 1).

    Example:
        >>> round(epsilon_of(1.0, 1e-5), 3)
        4.377
    """
    if delta_of(0.0, mu) <= delta:
        return 0.0
    # The search ends at the epsilon of the tail bound P(Z > t) <= exp(-t^2 / 2), which is never too small.
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12))


def mu_of(epsilon: float, delta: float) -> float:
    """Computes the largest mu whose epsilon at a delta is no larger than the given one.

    Args:
        epsilon: Epsilon, above 0.
        delta: delta, in (0, 1).

    Example:
        >>> [round(mu_of(epsilon, 1e-5), 3) for epsilon in (1, 2, 4, 8)]
        [0.268, 0.502, 0.925, 1.666]
    """
    upper = 1.0
    while delta_of(epsilon, upper) < delta:
        upper *= 2
    root = float(brentq(lambda mu: delta_of(epsilon, mu) - delta, 0.0, upper, xtol=1e-13, rtol=1e-13))
    return root * (1 - 1e-9)  # the root may be too large in its last digit

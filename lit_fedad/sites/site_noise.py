"""The noise that a site draws itself: its secret never leaves the site, nor does more than the budget pays for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from lit_fedad.contracts import Client, Exchange, Exchanges, Method
from lit_fedad.core.building import build
from lit_fedad.core.config import Config
from lit_fedad.experiment.build import Model
from lit_fedad.privacy.dp_sgd import TrainingPlan, TrainingPrivacy
from lit_fedad.privacy.image_privacy import Course, ImagePrivacy, Plan, in_words, noise_key
from lit_fedad.privacy.ledger import ROUNDING, Ledger
from lit_fedad.privacy.protection import promised
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.sites.refusals import Code, RefusalError

_HIDING, _DELTA = 10.0, 1e-5
"""Largest epsilon, of all runs together, of noise that hides single images, and the largest delta that it holds at: at
a larger one the same noise has a smaller epsilon."""


@dataclass(frozen=True)
class Asked:
    """All that a site's answer follows from, beside its images.

    Attributes:
        configuration: Hash of the run's configuration.
        round: Round of the exchange.
        exchange: Its index in the round.
        message: Hash of the server's message.
        state: Hash of the personal state that it starts from.
    """

    configuration: str
    round: int
    exchange: int
    message: str
    state: str


class SiteNoise:
    """A site's noise in one run with differential privacy.

    The coordinator is not trusted to ask once. What is asked again has the same answer with the same noise, and tells
    nothing new. What is asked in another way has other noise, since the difference of two answers with the same noise
    would show both without; and it is paid for from the budget, as an answer of its own.

    Args:
        plan: The noise that the run needs.
        folder: The site's folder of this run.
        images: Hash of the site's images.
        ledger: What the site has spent in all its runs.

    Attributes:
        mechanism: Hash of the noise: releases under another one are paid for apart.
    """

    def __init__(self, plan: Plan | TrainingPlan, folder: Path, images: str, ledger: Ledger) -> None:
        self.plan, self._folder, self._images, self._ledger = plan, folder, images, ledger
        # Before the run's sites are known (`share`): a site that is started again comes to the same.
        self.mechanism = blake2b(repr(plan).encode(), digest_size=8).hexdigest()

    def check(self) -> None:
        """Checks that the site has left what the whole run asks for.

        Raises:
            BudgetError: If it has not.
        """
        if self.drawn_here:
            self._ledger.check(self._folder.name, self.mechanism, self.plan.epsilon(self.plan.releases))

    @property
    def drawn_here(self) -> bool:
        """Whether this site draws the noise, and not the coordinator."""
        return not is_central(self.plan.settings)

    @property
    def hides(self) -> bool:
        """Whether it hides single images, with all that other runs have released under theirs."""
        if not self.drawn_here or self.plan.settings.delta > _DELTA:
            return False
        others = self._ledger.others(self._folder.name, self.mechanism)
        return others + self.plan.epsilon(self.plan.releases) <= _HIDING * ROUNDING

    @property
    def words(self) -> str:
        """Says in words what noise it is, and whether the site counts it."""
        said = in_words(self.plan.summary(self.plan.releases))
        none = "; with what this site has sent in other runs it hides no single image, and counts as none"
        return said + none * (self.drawn_here and not self.hides)

    def share(self, secure: SecureSum, sites: int) -> None:
        """Sets the share of the noise that this site adds, where all sites together add it."""
        if isinstance(self.plan, Plan) and self.plan.settings.where == "distributed":
            self.plan = replace(self.plan, carriers=secure.quorum_of(sites))

    def check_sum(self, clients: Sequence[int]) -> None:
        """Checks that a sum holds the whole noise.

        Raises:
            UserError: If they are too few.
        """
        if isinstance(self.plan, Plan) and len(clients) < self.plan.carriers:
            raise RefusalError(Code.NOISE, len(clients), self.plan.carriers)

    def exchanges(self, method: Method, asked: Asked) -> Exchanges:
        """Puts the noise around the exchanges of a method."""
        key = blake2b(self._digest(asked).encode(), key=self._secret, digest_size=32).digest()
        return self.plan.noised(method, key)

    @property
    def _secret(self) -> bytes:
        return noise_key(self._folder, None, self._images)

    def _digest(self, asked: Asked) -> str:
        """Hashes what is asked, the size of its noise, and the secret.

        Two sizes of the same noise would tell what they hide; under another secret, which a cleared folder has, the
        answer is another one.
        """
        return blake2b(repr((asked, self.plan)).encode(), key=self._secret, digest_size=16).hexdigest()

    def pay(self, exchange: Exchange, client: Client, asked: Asked) -> None:
        """Notes what is asked for, before it is answered.

        Raises:
            UserError: If that overdraws the budget, or the noise would hide no single image any more, or nothing can be
                noted.
        """
        if not self.plan.released_in([exchange], client):
            return
        answer, run = self._digest(asked), self._folder.name
        paid = self._ledger.released(run, self.mechanism)
        if answer in paid:
            return
        self.plan.check(len(paid) + 1, "this request")
        epsilon, delta = 0.0, 0.0  # of noise that the coordinator draws the site cannot tell
        if self.drawn_here:
            epsilon, delta = self.plan.epsilon(len(paid) + 1), self.plan.settings.delta
            if self.hides:  # as which the run was let in: more answers than planned may not change it
                Ledger(self._ledger.log.file, _HIDING).check(run, self.mechanism, epsilon)
        self._ledger.spend(run, self.mechanism, epsilon, delta, answer, self._images)


def is_central(privacy: ImagePrivacy | TrainingPrivacy | None) -> bool:
    """Tells whether the coordinator draws the noise of a run, and not its sites."""
    return isinstance(privacy, ImagePrivacy) and privacy.where == "central"


def planned(config: Config, model: Model, sizes: Mapping[int, int]) -> Plan | TrainingPlan | None:
    """Plans the noise of a run without stages, for one site; None where it has none.

    Args:
        config: The run's configuration.
        model: The model.
        sizes: Images of the site, by its number; of none at a coordinator, which finds out before any site is asked
            whether the method can be noised: sites would refuse it one by one, and tell no cause.

    Raises:
        UserError: If the run cannot keep its promise.
    """
    if (privacy := promised(config)) is None:
        return None
    federation = config["federation"]
    secure, sampler = build(federation.get("secure_sum")), build(federation["sampler"])
    return privacy.plan(model.method, Course(config["rounds"], sizes, sampler, secure))


def check_promise(config: Config, most: float | None) -> None:
    """Checks that a run promises what a site's operator asks for.

    Args:
        config: The run's configuration.
        most: Largest epsilon, of noise that sites draw themselves; None where the operator asks for nothing.

    Raises:
        UserError: If the run promises less.
    """
    if most is None:
        return
    privacy = promised(config)
    if (
        privacy is None
        or privacy.epsilon is None
        or privacy.epsilon > most
        or privacy.delta > _DELTA
        or is_central(privacy)
    ):
        raise RefusalError(Code.PROMISE, most)

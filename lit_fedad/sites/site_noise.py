"""The noise that a site draws itself: its secret stays at the site, and the privacy budget pays for every answer."""

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
"""Largest epsilon, over all runs together, at which noise counts as hiding single images, and the largest delta for
it. Without a bound on delta the epsilon says little: at a larger delta the same noise has a smaller epsilon."""


@dataclass(frozen=True)
class Asked:
    """What determines a site's answer, in addition to its images.

    Attributes:
        configuration: Hash of the run's configuration.
        round: Round of the exchange.
        exchange: Index of the exchange in the round.
        message: Hash of the server's message.
        state: Hash of the personal state from which the answer starts.
    """

    configuration: str
    round: int
    exchange: int
    message: str
    state: str


class SiteNoise:
    """A site's noise in one run with differential privacy.

    The coordinator is not trusted to ask only once. If it repeats a request, it gets the same answer with the same
    noise, which tells nothing new. If it changes the request, the noise is another one: the same noise would cancel in
    the difference of the two answers. Such an answer is paid for from the budget like any other.

    Args:
        plan: The noise that the run needs.
        folder: The site's folder for this run.
        images: Hash of the site's images.
        ledger: The privacy that the site has spent in all its runs.

    Attributes:
        mechanism: Hash of the noise: the ledger counts releases under other noise separately.
    """

    def __init__(self, plan: Plan | TrainingPlan, folder: Path, images: str, ledger: Ledger) -> None:
        self.plan, self._folder, self._images, self._ledger = plan, folder, images, ledger
        # Computed before `share` changes the plan, so that a site that is started again gets the same hash.
        self.mechanism = blake2b(repr(plan).encode(), digest_size=8).hexdigest()

    def check(self) -> None:
        """Checks that the site's remaining budget pays for the whole run.

        Raises:
            BudgetError: If it does not.
        """
        if self.drawn_here:
            self._ledger.check(self._folder.name, self.mechanism, self.plan.epsilon(self.plan.releases))

    @property
    def drawn_here(self) -> bool:
        """Whether this site draws the noise, and not the coordinator."""
        return not is_central(self.plan.settings)

    @property
    def hides(self) -> bool:
        """Whether the noise hides single images, together with all that other runs have released under their noise."""
        if not self.drawn_here or self.plan.settings.delta > _DELTA:
            return False
        others = self._ledger.others(self._folder.name, self.mechanism)
        return others + self.plan.epsilon(self.plan.releases) <= _HIDING * ROUNDING

    @property
    def words(self) -> str:
        """Says in words which noise it is, and whether the site counts it as noise."""
        text = in_words(self.plan.summary(self.plan.releases))
        none = "; with what this site has sent in other runs it hides no single image, and counts as none"
        return text + none * (self.drawn_here and not self.hides)

    def share(self, secure: SecureSum, sites: int) -> None:
        """Sets the share of the noise that this site adds, if all sites together add the noise.

        Args:
            secure: The secure sum that adds the shares up.
            sites: Number of the run's sites.
        """
        if isinstance(self.plan, Plan) and self.plan.settings.where == "distributed":
            self.plan = replace(self.plan, carriers=secure.quorum_of(sites))

    def check_sum(self, clients: Sequence[int]) -> None:
        """Checks that a sum over these clients holds the whole noise.

        Raises:
            RefusalError: If they are too few.
        """
        if isinstance(self.plan, Plan) and len(clients) < self.plan.carriers:
            raise RefusalError(Code.NOISE, len(clients), self.plan.carriers)

    def exchanges(self, method: Method, asked: Asked) -> Exchanges:
        """Returns the exchanges of a method with this site's noise around them."""
        key = blake2b(self._digest(asked).encode(), key=self._secret, digest_size=32).digest()
        return self.plan.noised(method, key)

    @property
    def _secret(self) -> bytes:
        return noise_key(self._folder, None, self._images)

    def _digest(self, asked: Asked) -> str:
        """Hashes the request, the plan of its noise and the site's secret: by this hash the ledger knows an answer.

        The plan is hashed because the same noise in two sizes would tell what it hides. The secret is hashed because
        the site draws other noise once its folder was cleared: that answer is another one.
        """
        return blake2b(repr((asked, self.plan)).encode(), key=self._secret, digest_size=16).hexdigest()

    def pay(self, exchange: Exchange, client: Client, asked: Asked) -> None:
        """Notes an answer in the ledger before it is given, unless the same answer was paid for before.

        Raises:
            UserError: If it overdraws the budget, if the noise would not hide single images any more, or if the ledger
                cannot be written.
        """
        if not self.plan.released_in([exchange], client):
            return
        answer, run = self._digest(asked), self._folder.name
        paid = self._ledger.released(run, self.mechanism)
        if answer in paid:
            return
        self.plan.check(len(paid) + 1, "this request")
        epsilon, delta = 0.0, 0.0  # noise that the coordinator draws costs nothing: the site cannot check it
        if self.drawn_here:
            epsilon, delta = self.plan.epsilon(len(paid) + 1), self.plan.settings.delta
            if self.hides:  # the run was let in because of this; more answers than planned must not change it
                Ledger(self._ledger.log.file, _HIDING).check(run, self.mechanism, epsilon)
        self._ledger.spend(run, self.mechanism, epsilon, delta, answer, self._images)


def is_central(privacy: ImagePrivacy | TrainingPrivacy | None) -> bool:
    """Tells whether the coordinator draws the noise of a run instead of its sites."""
    return isinstance(privacy, ImagePrivacy) and privacy.where == "central"


def planned(config: Config, model: Model, sizes: Mapping[int, int]) -> Plan | TrainingPlan | None:
    """Plans the noise of a run without stages, for one site; returns None if the run has no noise.

    Args:
        config: The run's configuration.
        model: The model.
        sizes: Number of the site's images, by its client number. A coordinator gives none: it only finds out whether
            the method can be noised, before it asks sites, which would refuse one by one and tell no cause.

    Raises:
        UserError: If the run cannot keep the privacy that it promises.
    """
    if (privacy := promised(config)) is None:
        return None
    federation = config["federation"]
    secure, sampler = (
        build(federation.get("secure_sum"), "federation.secure_sum"),
        build(federation["sampler"], "federation.sampler"),
    )
    return privacy.plan(model.method, Course(config["rounds"], sizes, sampler, secure))


def check_promise(config: Config, max_epsilon: float | None) -> None:
    """Checks that a run promises the privacy for which a site's operator asks.

    Args:
        config: The run's configuration.
        max_epsilon: Largest epsilon, with noise that the sites draw; None if the operator asks for nothing.

    Raises:
        RefusalError: If the run promises less privacy.
    """
    if max_epsilon is None:
        return
    privacy = promised(config)
    if (
        privacy is None
        or privacy.epsilon is None
        or privacy.epsilon > max_epsilon
        or privacy.delta > _DELTA
        or is_central(privacy)
    ):
        raise RefusalError(Code.PROMISE, max_epsilon)

"""Adds secure sums and differential privacy to the rounds of a federation."""

from __future__ import annotations

import warnings

from lit_fedad.contracts import Context
from lit_fedad.core.building import build
from lit_fedad.core.config import Config
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.loop import Federation
from lit_fedad.privacy.dp_sgd import TrainingPrivacy
from lit_fedad.privacy.image_privacy import Course, ImagePrivacy
from lit_fedad.privacy.secure_aggregation import Parties, SecureSum, Summing


def protect(
    federation: Federation,
    secure_sum: SecureSum | None = None,
    privacy: ImagePrivacy | TrainingPrivacy | None = None,
    noise_key: bytes = b"",
) -> Federation:
    """Adds secure sums and noise to a federation's exchanges, before it runs.

    Args:
        federation: The federation, which is changed in place.
        secure_sum: Settings of secure aggregation, with which the server receives only sums; None for none.
        privacy: Settings of differential privacy; None for none. Without a budget nothing is noised, with a warning.
        noise_key: The secret from which noise is drawn.

    Returns:
        The same federation.

    Raises:
        UserError: If an exchange needs single messages, or cannot be noised, or the budget would be overdrawn.
    """
    method, sampler, clients = federation.method, federation.sampler, federation.clients
    if secure_sum is not None:
        sampled = sampler.sample(clients, Context(federation.seed, min(1, federation.rounds)))
        secure_sum.check(method, federation.channel, federation.receiver.robust, len(clients), len(sampled))
        if isinstance(federation.transport, LocalTransport):
            federation.transport.parties = Parties(federation.fabric, federation.mine)
    if privacy is not None and privacy.epsilon is None:
        warnings.warn(
            "federation.privacy has no budget, so nothing is noised and nothing promised; give"
            " federation.privacy.epsilon, such as 4",
            stacklevel=2,
        )
    elif privacy is not None:
        sizes = {client: federation.data.sizes[client] for client in clients}
        course = Course(federation.rounds, sizes, sampler, secure_sum, federation.staged)
        plan = privacy.plan(method, course)
        federation.plan, federation.exchanges = plan, plan.noised(method, noise_key)
    if secure_sum is not None:
        federation.summing = Summing(secure_sum, federation.collecting)
    return federation


def is_protected(config: Config) -> bool:
    """Returns whether a configuration asks for secure sums or differential privacy."""
    federation = config["federation"]
    return bool(federation.get("secure_sum") or federation.get("privacy"))


def promised(config: Config) -> ImagePrivacy | TrainingPrivacy | None:
    """Returns the settings of differential privacy that a run guarantees; None without a budget."""
    privacy: ImagePrivacy | TrainingPrivacy | None = build(
        config["federation"].get("privacy"), "federation.privacy"
    )
    return None if privacy is None or privacy.epsilon is None else privacy

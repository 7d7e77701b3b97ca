"""The sampling of a round's clients, and the policy for failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch

from lit_fedad.contracts import Context
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError


@dataclass(frozen=True)
class ClientSampler:
    """A sampler of the clients of a round, with a policy for failures.

    Attributes:
        fraction: Share of the clients in a training round, in (0, 1]; set-up exchanges include all clients.
        min_clients: Smallest number of clients that a round samples, and that must finish it.
        on_failure: ``"fail"`` stops the run at the first client that fails; ``"skip"`` leaves that client out of the
            round as long as `min_clients` remain.
        resample_every: Number of consecutive rounds with the same clients.
        deadline: Time limit of a client in an exchange, in seconds, after which it has failed; None for no limit.
    """

    fraction: float = 1.0
    min_clients: int = 1
    on_failure: Literal["fail", "skip"] = "fail"
    resample_every: int = 1
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError(f"federation.sampler.fraction={self.fraction} must be in (0, 1]")
        at_least("federation.sampler", 1, min_clients=self.min_clients, resample_every=self.resample_every)
        above("federation.sampler", 0, deadline=self.deadline)
        if self.on_failure not in ("fail", "skip"):
            raise UserError(f"federation.sampler.on_failure='{self.on_failure}' must be 'fail' or 'skip'")

    def sample(self, clients: Sequence[int], context: Context) -> list[int]:
        """Samples the clients of a round.

        Args:
            clients: All clients that hold data.
            context: Seed and round.

        Returns:
            Client numbers, ascending.

        Raises:
            UserError: If there are fewer clients than `min_clients`.
        """
        if len(clients) < self.min_clients:
            raise UserError(
                f"federation.sampler.min_clients={self.min_clients}, but only {len(clients)} clients take part"
            )
        if context.round <= 0:
            return sorted(clients)
        return sorted(self._order(clients, context)[: self._count(clients)])

    def spares(self, clients: Sequence[int], context: Context) -> list[int]:
        """Lists the clients that are not sampled, in the order in which they replace clients that fail.

        Args:
            clients: All clients that hold data.
            context: Seed and round.
        """
        return [] if context.round <= 0 else self._order(clients, context)[self._count(clients) :]

    def _count(self, clients: Sequence[int]) -> int:
        return max(self.min_clients, round(self.fraction * len(clients)))

    def _order(self, clients: Sequence[int], context: Context) -> list[int]:
        first = replace(context, round=context.round - (context.round - 1) % self.resample_every)
        order = torch.randperm(len(clients), generator=first.generator("participation"))
        return [clients[i] for i in order.tolist()]

    @property
    def skips(self) -> bool:
        """Whether a client that fails is left out."""
        return self.on_failure == "skip"

    def check_failures(self, failures: Mapping[str, str], round: int) -> None:
        """Checks whether a run continues when clients fail.

        Args:
            failures: Causes by the client's name, as it is written in a sentence.
            round: Round number, for the message.

        Raises:
            UserError: If the policy is to fail.
        """
        if failures and not self.skips:
            raise UserError(f"round {round}, {_named(failures)}")

    def check_finished(self, finished: int, left_out: Mapping[str, str], round: int) -> None:
        """Checks whether enough clients finished an exchange.

        Args:
            finished: Number of clients whose messages can be merged.
            left_out: Causes by the name of each client that did not finish.
            round: Round number, for the message.

        Raises:
            UserError: If there are fewer than `min_clients`.
        """
        if left_out and finished < self.min_clients:
            raise UserError(
                f"round {round}: {finished} clients finished, federation.sampler.min_clients={self.min_clients};"
                f" {_named(left_out)}"
            )


_MAX_NAMED = 5  # clients that a message names


def _named(failures: Mapping[str, str]) -> str:
    """Names the first clients that failed, with their causes, each cause once, and counts the others."""
    by_cause: dict[str, list[str]] = {}
    for client, cause in islice(failures.items(), _MAX_NAMED):
        by_cause.setdefault(cause, []).append(client)
    shown = [f"{', '.join(clients)}: {cause}" for cause, clients in by_cause.items()]
    return "; ".join(shown) + (f"; and {more} more" if (more := len(failures) - _MAX_NAMED) > 0 else "")

"""Optimisers of a server that takes the mean change of its clients for a gradient (Reddi et al., ICLR 2021, Alg. 2)."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from lit_fedad.core.bounds import above, below_one, within

Rule = Literal["adagrad", "adam", "yogi"]


class Adaptive(torch.optim.Optimizer):
    """FedAdagrad, FedAdam and FedYogi: ``x -= eta m / (sqrt(v) + tau)``, without bias correction.

    The first moment is ``m = beta_1 m + (1 - beta_1) g``. The second moment v begins at tau^2 and becomes ``v + g^2``
    (adagrad), ``beta_2 v + (1 - beta_2) g^2`` (adam) or ``v - (1 - beta_2) g^2 sign(v - g^2)`` (yogi).

    Args:
        params: The weights.
        lr: Learning rate eta.
        beta1: Share of the last m.
        beta2: Share of the last v; unused by adagrad.
        tau: Degree of adaptivity.
        rule: How v is updated by the squared gradients.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        rule: Rule = "adam",
    ) -> None:
        section = "method.server.server_optimizer"
        above(section, 0, lr=lr, tau=tau)
        below_one(section, beta1=beta1, beta2=beta2)
        within(section, 0, 1e9, tau=tau)  # its square is kept in single precision
        self.rule = rule
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["m"] = torch.zeros_like(weight)
                    state["v"] = torch.full_like(weight, group["tau"] ** 2)
                state["m"].lerp_(weight.grad, 1 - group["beta1"])
                state["v"] = self._second_moment(state["v"], weight.grad.square(), group["beta2"])
                weight -= group["lr"] * state["m"] / (state["v"].sqrt() + group["tau"])

    def _second_moment(self, v: Tensor, squares: Tensor, beta: float) -> Tensor:
        if self.rule == "adagrad":
            return v + squares
        if self.rule == "adam":
            return beta * v + (1 - beta) * squares
        return v - (1 - beta) * squares * (v - squares).sign()

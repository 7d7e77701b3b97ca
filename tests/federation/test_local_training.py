"""Optimisers that are kept between rounds."""

import torch
from torch import nn

from lit_fedad.federation.client_runner import resume_optimizer


def stepped(optimizer, weight, times=1):
    for _ in range(times):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().clone()


def parameter():
    return nn.Parameter(torch.zeros(2))


def test_moments_are_those_of_the_last_round_and_the_rate_is_that_of_this_one():
    first, second = parameter(), parameter()
    before = torch.optim.SGD([first], lr=1.0, momentum=0.5)
    stepped(before, first)
    after = torch.optim.SGD([second], lr=0.1, momentum=0.5)
    resume_optimizer(after, before.state_dict())
    # The second gradient of 1 meets a momentum of 1: 0.1 * (0.5 * 1 + 1).
    torch.testing.assert_close(stepped(after, second), torch.full((2,), -0.15))


def test_another_kind_of_optimiser_begins_anew():
    first, second, fresh = parameter(), parameter(), parameter()
    before = torch.optim.SGD([first], lr=1.0, momentum=0.5)
    stepped(before, first)
    after = torch.optim.Adam([second], lr=0.1)
    resume_optimizer(after, before.state_dict())
    assert torch.equal(stepped(after, second, 3), stepped(torch.optim.Adam([fresh], lr=0.1), fresh, 3))

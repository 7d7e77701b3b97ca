"""Inversions that are easier than the attack, and whose answer is known: where the attack stops working."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_fedad.audits.inversion_attack import Attack
from lit_fedad.contracts import Context
from lit_fedad.contracts.randomness import generator
from lit_fedad.experiment.figures.embedding import loader_of
from lit_fedad.tasks.memory_bank import MemoryBank

BANKS = (1, 4, 16, 60)
"""Numbers of images behind the banks that are inverted."""


class Control(NamedTuple):
    """An inversion with a known answer.

    Attributes:
        name: What was inverted.
        images: Reconstructions in [0, 1] [n, ch, H, W].
        true: The images behind it [m, ch, H, W].
    """

    name: str
    images: Tensor
    true: Tensor


def positive_controls(attack: Attack, private: Tensor) -> Iterator[Control]:
    """Inverts what few images of the attacked client give, by the same search.

    Of a memory, the features of one image position by position, then banks of 1, 4, 16 and 60 images, as far as the
    client has so many; of weights, the gradient of one image of known class. Images that are sent need no search.

    Args:
        attack: The attack, which has been run.
        private: The client's images in [0, 1] [n, ch, H, W], in its own order.
    """
    order = torch.randperm(len(private), generator=generator(attack.options.seed, "positive control"))
    if attack.target == "weights":
        with attack.run.display.progress("Positive control") as progress:
            found = attack.invert_one_gradient(int(order[0]), progress)
        yield Control("gradient of one image", found.images.cpu(), private[order[:1]])
    if attack.target != "memory":
        return
    task, run = attack.run.model.task, attack.run
    assert isinstance(task, MemoryBank)
    with run.display.progress("Positive controls") as progress:
        one = private[order[:1]]
        with torch.no_grad():
            features = attack.encode(one.to(task.device))[0]
        yield Control(
            "one image, by position", attack.search_features(features, True, 1, progress).images.cpu(), one
        )
        held = torch.tensor(run.data.partition.clients[attack.client])
        for size in (size for size in BANKS if size <= len(private)):
            chosen = order[:size]
            loader = loader_of(run.data.module.train, held[chosen], run.data)
            context = Context(attack.options.seed, 0, attack.client)
            bank = task.reduce_memory(loader, context, None).memory.float()
            images = min(size, attack.options.images)
            found = attack.search_features(bank, attack.ordered, images, progress)
            yield Control(f"bank of {size} image{'s' * (size > 1)}", found.images.cpu(), private[chosen])

"""Condensation steps a second of one FedVCK client: all classes in one forward pass, against class by class."""

import time
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.condensation.batch_statistics import apply, record
from lit_fedad.condensation.condense import Condensation, RealBatch
from lit_fedad.condensation.kernels import class_mmd, mmd
from lit_fedad.models.convnets import ConvNet
from lit_fedad.models.diff_augment import Draw, diff_augment, draw

STEPS, BATCH, RATE, MOMENTUM = 6, 256, 0.2, 0.5


def batched(
    encoder: ConvNet, start: Tensor, counts: Sequence[int], real: Tensor, sizes: Sequence[int], fabric: Fabric
) -> list[float]:
    """The loss curve of the library."""

    def distance(batch: RealBatch, images: Tensor) -> Tensor:
        features, statistics = record(encoder, batch.images, batch.times)
        return class_mmd(features, apply(encoder, images, statistics), batch.times, batch.sizes, counts)

    condense = Condensation(STEPS, RATE, MOMENTUM, batch=BATCH)
    chances = [torch.ones(size) for size in sizes]
    return condense(start, counts, real, chances, distance, torch.Generator().manual_seed(0), fabric)[1]


def class_by_class(
    encoder: ConvNet, start: Tensor, counts: Sequence[int], real: Tensor, sizes: Sequence[int]
) -> list[float]:
    """The same, plainly: statistics of all real images, then each class's real and synthetic ones by themselves."""
    draws = torch.Generator().manual_seed(0)
    synthetic = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([synthetic], lr=RATE, momentum=MOMENTUM)
    losses = []
    for _ in range(STEPS):
        batches = [
            pile[torch.multinomial(torch.ones(len(pile)), BATCH, replacement=True, generator=draws)]
            for pile in real.split(list(sizes))
        ]
        drawn = draw(len(counts), draws)
        views = [_augmented(batch, drawn, label) for label, batch in enumerate(batches)]
        _, statistics = record(encoder, torch.cat(views))
        loss = torch.zeros(())
        for label, (view, images) in enumerate(zip(views, synthetic.split(list(counts)), strict=True)):
            with torch.no_grad():
                features = apply(encoder, view, statistics)
            loss = loss + mmd(features, apply(encoder, _augmented(images, drawn, label), statistics))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _augmented(images: Tensor, drawn: Draw, label: int) -> Tensor:
    return diff_augment(images, drawn, torch.full((len(images),), label))


def main() -> None:
    """Prints steps a processor second (other processes disturb the clock), of clients with classes large and small."""
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    for side, inputs, percent in ((28, 3, 1), (32, 3, 2)):  # PathMNIST, CIFAR-10
        encoder = ConvNet(side, inputs=inputs).requires_grad_(False).eval()
        for sizes in ([1000, 1000, 1000], [1000, 100, 20]):
            real = torch.randn(sum(sizes), inputs, side, side)
            counts = [max(5, size * percent // 100) for size in sizes]
            start = torch.randn(sum(counts), inputs, side, side)
            spent, curves = [], []
            for run in (
                lambda: batched(encoder, start, counts, real, sizes, fabric),  # noqa: B023
                lambda: class_by_class(encoder, start, counts, real, sizes),  # noqa: B023
            ):
                began = time.process_time()
                curves.append(run())
                spent.append(time.process_time() - began)
            apart = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
            print(
                f"{side} px, classes of {sizes} images: {STEPS / spent[0]:.2f} steps a second, class by class"
                f" {STEPS / spent[1]:.2f}: {spent[1] / spent[0]:.2f} times; losses differ by up to {apart:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Training images of a run in [0, 1], as its task sees them: what attacks are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.sample import ImageSet
from lit_fedad.experiment.finished_run import FinishedRun


def private_images(run: FinishedRun, number: int, at_most: int | None = None) -> Tensor:
    """Reads a client's training images in [0, 1] [n, ch, H, W], as its task sees them."""
    return pixels(run, run.data.partition.clients[number][:at_most])


def pixels(run: FinishedRun, positions: Sequence[int]) -> Tensor:
    """Reads training images in [0, 1] [n, ch, H, W], as the run's task sees them."""
    images = run.data.images
    if isinstance(images, LabelledSet):
        return images.train_images[list(positions)] / 255
    mean, std = channel_statistics(run)
    paths = [images.train[index].path for index in positions]
    return (torch.stack([run.data.transform.image(path) for path in paths]) * std + mean).clamp(0, 1)


def channel_statistics(run: FinishedRun) -> tuple[Tensor, Tensor]:
    """Finds the mean and deviation that images are normalised by, each [ch, 1, 1]."""
    images = run.data.images
    source = run.data.transform if isinstance(images, ImageSet) else images
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return mean, std

"""Images that clients keep back from training, so that decisions are calibrated on images no detector has seen."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import Sample


def image_groups(
    samples: Sequence[Sample | LabelledImage], group: str | None, key: str = "calibration.group"
) -> list[str]:
    """Returns the name of each image's group: images of one group are never divided between training and calibration.

    Args:
        samples: The images.
        group: Regular expression: what it finds in an image's path is the group's name; None where every image is a
            group of its own.
        key: Key that gives the expression, for messages.

    Raises:
        UserError: If the expression is none, or a path lacks it, or the images have no paths.
    """
    if group is None:
        return [str(number) for number in range(len(samples))]
    try:
        matches = [re.search(group, str(sample.path)) for sample in samples if isinstance(sample, Sample)]
    except re.error as error:
        raise UserError(f"{key}='{group}' is no regular expression: {error}") from error
    if len(matches) < len(samples):
        raise UserError(f"{key}='{group}': these images are no files; leave it out")
    if lost := next((sample for sample, match in zip(samples, matches, strict=True) if match is None), None):
        raise UserError(f"{key}='{group}' is not found in {lost.path}")  # type: ignore[union-attr]
    return [match.group(0) for match in matches if match is not None]


def hold_out(
    partition: Partition,
    images: Images,
    share: float,
    seed: int,
    group: str | None = None,
    least: int = 0,
) -> Partition:
    """Moves a share of each client's training images to `Partition.calibration`.

    The share is taken from every product of a client, or of each of its stages, as evenly as whole groups allow. At
    least one group of each product, and of each stage, stays in training.

    Args:
        partition: Training indices by client; returned as it is where it holds images out already.
        images: The training images.
        share: Share of the images, in [0, 1).
        seed: Seed of the draw.
        group: Regular expression: images whose paths it finds the same text in (an object, a patient) stay together.
            None where every image is a group of its own.
        least: Images of each client, for which the share grows up to a half.

    Raises:
        UserError: If the expression is none, or the images have no paths to look for it.
    """
    groups = image_groups(images.train, group)
    if not share or partition.calibration:
        return partition
    stages, calibration = [], []
    for client, client_stages in enumerate(partition.by_stage):
        draw = numpy_generator(seed, "hold-out", client)
        grown = max(share, min(0.5, least / max(1, sum(map(len, client_stages)))))
        held_out = [_held_out(stage, images.train, groups, grown, draw) for stage in client_stages]
        stages.append([sorted(set(stage) - out) for stage, out in zip(client_stages, held_out, strict=True)])
        calibration.append(tuple(sorted(chain.from_iterable(held_out))))
    if partition.stages is None:
        remaining = Partition.of_clients(stage for (stage,) in stages)
        remaining = replace(remaining, reserved=partition.reserved)
    else:
        remaining = Partition.in_stages(stages, partition.reserved, partition.schedule)
    return replace(remaining, calibration=tuple(calibration))


def _held_out(
    indices: Sequence[int],
    samples: Sequence[Sample | LabelledImage],
    groups: Sequence[str],
    share: float,
    draw: np.random.Generator,
) -> set[int]:
    by_product: dict[str, dict[str, list[int]]] = {}
    for index in indices:
        by_product.setdefault(samples[index].category, {}).setdefault(groups[index], []).append(index)
    reserved: set[int] = set()
    due = 0.0
    for members in by_product.values():
        due += share * sum(map(len, members.values()))
        names = list(members)
        for number in draw.permutation(len(names))[:-1]:
            together = members[names[number]]
            if len(reserved) + len(together) / 2 > due:
                break
            reserved.update(together)
    return reserved

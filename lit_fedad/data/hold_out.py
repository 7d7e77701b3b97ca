"""Images that clients keep back from training, so that decisions are calibrated on images no detector has seen."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import Sample

_SEARCH = """
import json, re, sys
group, paths = json.load(sys.stdin)
try:
    found = [match and match.group() for match in (re.search(group, path) for path in paths)]
except (re.error, OverflowError, RecursionError, MemoryError) as error:
    found = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""
_LONGEST, _LONGEST_S = 1000, 60.0


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
        UserError: If the expression is none, or a path lacks it, or the images have no paths; also if it is not
            found or missed within a minute.
    """
    if group is None:
        return [str(number) for number in range(len(samples))]
    paths = [str(sample.path) for sample in samples if isinstance(sample, Sample)]
    if len(paths) < len(samples):
        raise UserError(f"{key}='{group}': these images are no files; leave it out")
    found = _searched(group, paths, key)
    if lost := next((path for path, name in zip(paths, found, strict=True) if name is None), None):
        raise UserError(f"{key}='{group}' is not found in {lost}")
    return [name for name in found if name is not None]


def _searched(group: str, paths: Sequence[str], key: str) -> list[str | None]:
    """Returns what an expression finds in each path.

    A run's folder may come from anybody, and its expression may try without end. So a process of its own searches,
    which can be ended.
    """
    if not isinstance(group, str) or len(group) > _LONGEST:
        raise UserError(f"{key}: give a regular expression of at most {_LONGEST} characters")
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps([group, paths]),
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=True,
        )  # fmt: skip
        found: list[str | None] | str = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{key}='{group}' is still searched for after {_LONGEST_S:g} s; give one without repeats of repeats"
        ) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        found = type(error).__name__
    if isinstance(found, str):
        raise UserError(f"{key}='{group}' is no regular expression: {found}")
    return found


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

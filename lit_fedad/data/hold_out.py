"""Images that clients keep back from training, so that decisions are calibrated on images no detector has seen."""

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import Sample, grouped

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

    An expression that is found in each path below the folder of all images is not looked for above it: what lies there
    tells no images apart, and changes with the place of the set.

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
    names = _searched(group, _below(paths), key)
    if None in names:
        names = _searched(group, paths, key)
    if lost := next((path for path, name in zip(paths, names, strict=True) if name is None), None):
        raise UserError(f"{key}='{group}' is not found in {lost}")
    if len(names) > 1 and len(set(names)) == 1:
        warnings.warn(
            f"{key}='{group}' finds '{names[0]}' in each of {len(names)} paths, such as {paths[0]}: all are one group",
            stacklevel=3,
        )
    return [name for name in names if name is not None]


def _below(paths: Sequence[str]) -> list[str]:
    """Paths below the folder that holds all of them, with the slash before."""
    whole = [Path(path).absolute() for path in paths]
    above = os.path.commonpath([path.parent for path in whole]).rstrip(os.sep) if whole else ""
    return [str(path)[len(above) :] for path in whole]


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
        texts: list[str | None] | str = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{key}='{group}' is still searched for after {_LONGEST_S:g} s; give one without repeats of repeats"
        ) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        texts = type(error).__name__
    if isinstance(texts, str):
        raise UserError(f"{key}='{group}' is no regular expression: {texts}")
    return texts


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
    least one group of each product, and of each stage, stays in training. A group that several clients, stages or
    products have is held out in all of them or in none.

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
    held_out = _held_groups(partition.by_stage, images.train, groups, share, seed, least)
    stages = [
        [sorted(index for index in set(stage) if groups[index] not in held_out) for stage in client_stages]
        for client_stages in partition.by_stage
    ]
    calibration = tuple(
        tuple(sorted(index for index in set(chain.from_iterable(client_stages)) if groups[index] in held_out))
        for client_stages in partition.by_stage
    )
    if partition.stages is None:
        remaining = Partition.of_clients(stage for (stage,) in stages)
        remaining = replace(remaining, reserved=partition.reserved)
    else:
        remaining = Partition.in_stages(stages, partition.reserved, partition.schedule)
    return replace(remaining, calibration=calibration)


def _held_groups(
    by_stage: Sequence[Sequence[Sequence[int]]],
    samples: Sequence[Sample | LabelledImage],
    groups: Sequence[str],
    share: float,
    seed: int,
    least: int,
) -> set[str]:
    """Draws the groups that are held out by whoever holds images of them; see `hold_out`."""
    cells = [[_by_product(stage, samples, groups) for stage in client_stages] for client_stages in by_stage]
    every = [cell for client in cells for stage in client for cell in stage]
    left = list(map(len, every))  # groups that stay in training, of each product in a stage of a client
    places = grouped((name, place) for place, cell in enumerate(every) for name in cell)
    held_out, trained = set[str](), set[str]()
    for client, stages in enumerate(cells):
        draw = numpy_generator(seed, "hold-out", client)
        client_share = max(share, min(0.5, least / max(1, sum(map(len, by_stage[client])))))
        for stage in stages:
            whole = Counter(name for cell in stage for name, images in cell.items() for _ in images)
            size, due = sum(number for name, number in whole.items() if name in held_out), 0.0
            for cell in stage:
                due += client_share * sum(map(len, cell.values()))
                names = list(cell)
                for name in (names[number] for number in draw.permutation(len(names))):
                    if name in held_out or name in trained or any(left[place] < 2 for place in places[name]):
                        continue
                    if size + whole[name] / 2 > due:
                        break
                    held_out.add(name)
                    size += whole[name]
                    for place in places[name]:
                        left[place] -= 1
            trained.update(whole.keys() - held_out)
    return held_out


def _by_product(
    indices: Sequence[int], samples: Sequence[Sample | LabelledImage], groups: Sequence[str]
) -> list[dict[str, list[int]]]:
    """Lists images by group, for each product."""
    by_product = grouped((samples[index].category, index) for index in indices)
    return [grouped((groups[index], index) for index in of_product) for of_product in by_product.values()]

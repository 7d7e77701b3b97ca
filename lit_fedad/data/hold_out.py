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

_SEARCH_CODE = """
import json, re, sys
group, paths = json.load(sys.stdin)
try:
    found = [match and match.group() for match in (re.search(group, path) for path in paths)]
except (re.error, OverflowError, RecursionError, MemoryError) as error:
    found = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""
_MAX_LENGTH, _MAX_SECONDS = 1000, 60.0  # characters of an expression, duration of its search


def image_groups(
    samples: Sequence[Sample | LabelledImage], group: str | None, key: str = "calibration.group"
) -> list[str]:
    """Returns the name of each image's group: images of one group are never divided between training and calibration.

    The expression is first searched for in paths relative to the folder of all images, and in whole paths only if one
    of these lacks it: the folders above tell no images apart, and change where the set is moved.

    Args:
        samples: The images.
        group: Regular expression: what it finds in an image's path is the group's name; None where every image is a
            group of its own.
        key: Key that gives the expression, for messages.

    Raises:
        UserError: If it is no regular expression, a path lacks it, the images have no paths, or the search takes
            longer than a minute.
    """
    if group is None:
        return [str(number) for number in range(len(samples))]
    paths = [str(sample.path) for sample in samples if isinstance(sample, Sample)]
    if len(paths) < len(samples):
        advice = "give another partition" if key == "partition.group" else "leave it out"
        raise UserError(f"{key}='{group}': these images are no files; {advice}")
    names = _search(group, _relative(paths), key)
    if None in names:
        names = _search(group, paths, key)
    if unmatched := next((path for path, name in zip(paths, names, strict=True) if name is None), None):
        raise UserError(f"{key}='{group}' is not found in {unmatched}")
    if len(names) > 1 and len(set(names)) == 1:
        warnings.warn(
            f"{key}='{group}' finds '{names[0]}' in each of {len(names)} paths, such as {paths[0]}: all are one group",
            stacklevel=3,
        )
    return [name for name in names if name is not None]


def _relative(paths: Sequence[str]) -> list[str]:
    """Returns paths relative to the folder that holds all of them, with a leading slash."""
    absolute = [Path(path).absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in absolute]).rstrip(os.sep) if absolute else ""
    return [str(path)[len(common) :] for path in absolute]


def _search(group: str, paths: Sequence[str], key: str) -> list[str | None]:
    """Returns what an expression finds in each path.

    The expression may come from the folder of somebody else's run, and its search may never end. So a child process
    searches, which is killed after a minute.
    """
    if not isinstance(group, str) or len(group) > _MAX_LENGTH:
        raise UserError(f"{key}: give a regular expression of at most {_MAX_LENGTH} characters")
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _SEARCH_CODE],
            input=json.dumps([group, paths]),
            capture_output=True,
            text=True,
            timeout=_MAX_SECONDS,
            check=True,
        )  # fmt: skip
        texts: list[str | None] | str = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{key}='{group}' is still searched for after {_MAX_SECONDS:g} s; give one without repeats of repeats"
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
        least: Number of images to hold out of each client: the share grows to reach it, up to a half.

    Raises:
        UserError: As `image_groups`.
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
    """Draws the groups that every client holds out if it has images of them; see `hold_out`."""
    # For each client and stage: images by group, for each product.
    cells = [[_by_product(stage, samples, groups) for stage in client_stages] for client_stages in by_stage]
    all_cells = [cell for client in cells for stage in client for cell in stage]
    remaining = list(map(len, all_cells))  # number of groups that stay in training, of each cell
    cells_of = grouped((name, position) for position, cell in enumerate(all_cells) for name in cell)
    held_out, trained = set[str](), set[str]()
    for client, stages in enumerate(cells):
        rng = numpy_generator(seed, "hold-out", client)
        client_share = max(share, min(0.5, least / max(1, sum(map(len, by_stage[client])))))
        for stage in stages:
            group_sizes = Counter(name for cell in stage for name, images in cell.items() for _ in images)
            held_size, target = sum(number for name, number in group_sizes.items() if name in held_out), 0.0
            for cell in stage:
                target += client_share * sum(map(len, cell.values()))
                names = list(cell)
                for name in (names[number] for number in rng.permutation(len(names))):
                    if (
                        name in held_out
                        or name in trained
                        or any(remaining[position] < 2 for position in cells_of[name])
                    ):
                        continue
                    if held_size + group_sizes[name] / 2 > target:
                        break
                    held_out.add(name)
                    held_size += group_sizes[name]
                    for position in cells_of[name]:
                        remaining[position] -= 1
            trained.update(group_sizes.keys() - held_out)
    return held_out


def _by_product(
    indices: Sequence[int], samples: Sequence[Sample | LabelledImage], groups: Sequence[str]
) -> list[dict[str, list[int]]]:
    """Lists images by group, for each product."""
    by_product = grouped((samples[index].category, index) for index in indices)
    return [grouped((groups[index], index) for index in of_product) for of_product in by_product.values()]

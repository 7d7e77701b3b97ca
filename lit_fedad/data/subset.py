"""Random subsets of an image set, drawn for each product independently."""

import difflib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.data.hold_out import image_groups
from lit_fedad.data.sample import ImageSet, Sample, grouped

T = TypeVar("T")


def resplit(images: ImageSet, seed: int | None) -> ImageSet:
    """Redraws which normal images of each product are for training, and which for testing.

    Both numbers stay as they were, and anomalous images stay test images. Afterwards, normal training and test images
    of a product are exchangeable, which a set's own split need not be: it may have been made by day, camera or patient.
    Images that belong together (views of one object, images of one patient) may then fall on both sides.

    Args:
        images: The set with its own split.
        seed: Seed of the draw, which for a product does not depend on the others; None keeps the split.

    Returns:
        The set, with products and defects at their old positions. The normal images of a product keep their order, in
        which former training images come before former test images.
    """
    if seed is None:
        return images
    all_samples = (*images.train, *images.test)
    pools = grouped((sample.category, sample) for sample in all_samples if not sample.label)
    training: dict[str, Iterator[Sample]] = {}
    testing: dict[str, Iterator[Sample]] = {}
    for product, pool in pools.items():
        size = sum(sample.category == product for sample in images.train)
        chosen = numpy_generator(seed, "split", product).permutation(len(pool))
        training[product] = iter([pool[position] for position in sorted(chosen[:size])])
        testing[product] = iter([pool[position] for position in sorted(chosen[size:])])
    return ImageSet(
        images.name,
        tuple(next(training[sample.category]) for sample in images.train),
        tuple(sample if sample.label else next(testing[sample.category]) for sample in images.test),
    )


def split_normals(images: ImageSet, train_share: float, seed: int, group: str | None = None) -> ImageSet:
    """Makes test images of a random share of the training images, for sets that have no normal test images.

    Args:
        images: The set.
        train_share: Share that stays for training; of two or more images at least one trains, and at least one tests.
        seed: Seed of the draw, which for a product does not depend on the others.
        group: Regular expression: images whose paths it finds the same text in (a patient) stay on one side. Groups
            with an anomalous image are for testing; of the others, whole groups train until they hold the share. None
            where every image is a group of its own.

    Raises:
        UserError: The share is out of range, the expression is none, a path lacks it, or no image is left to train or
            to test.
    """
    if not 0 < train_share < 1:
        raise UserError(f"train_share={train_share}: give a number between 0 and 1")
    trained: set[Sample] = set()
    for pool in by_product(images.train):
        num_test = min(len(pool) - 1, max(1, round((1 - train_share) * len(pool))))
        defective = [sample for sample in images.test if sample.label and sample.category == pool[0].category]
        names = image_groups([*pool, *defective], group, "data.group")
        samples_of = grouped(zip(names, pool, strict=False))
        anomalous = set(names[len(pool) :])
        groups = [pile for name, pile in samples_of.items() if name not in anomalous]
        left = len(pool) - num_test
        for number in numpy_generator(seed, "train share", pool[0].category).permutation(len(groups)):
            if len(groups[number]) <= left:
                trained.update(groups[number])
                left -= len(groups[number])
        if trained.isdisjoint(pool):
            raise UserError(
                f"data.group='{group}': no group of normal images is left to train on, each has an anomalous image or"
                f" holds more than {left} of {len(pool)} normal ones; give one that tells more groups apart, or none"
            )
    train = tuple(sample for sample in images.train if sample in trained)
    test = (*(sample for sample in images.train if sample not in trained), *images.test)
    if not test:
        raise UserError(f"{images.name}: a single image cannot be trained on and tested; give at least two")
    return ImageSet(images.name, train, test)


def subset(
    images: ImageSet, train_per_product: int | None = None, test_per_product: int | None = None, seed: int = 0
) -> ImageSet:
    """Draws at most so many images of each product.

    Args:
        images: The whole set; the test images of a product lie next to each other.
        train_per_product: At most this many training images of each product; None takes all.
        test_per_product: At most this many test images of each product: half of them good and half spread
            evenly over the defects, filled up from the other half where there are too few. None takes all.
        seed: Seed of the draw. The subset of a product does not depend on the other products.

    Returns:
        The subset, in the order of the whole.

    Raises:
        UserError: A limit is below 1.
    """
    at_least("data", 1, train_per_product=train_per_product, test_per_product=test_per_product)
    train = [_some(samples, train_per_product, seed) for samples in by_product(images.train)]
    test = [_balanced(samples, test_per_product, seed) for samples in by_product(images.test)]
    return ImageSet(images.name, tuple(chain(*train)), tuple(chain(*test)))


def limited_by(cut: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a decorator that gives a reader the keywords of a function that draws a subset, and applies it.

    Args:
        cut: The function; its first parameter takes what the reader returns, the others are the keywords.
    """
    limits = [
        limit.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for limit in list(inspect.signature(cut).parameters.values())[1:]
    ]

    def decorate(read: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(read)
        def reader(*arguments: Any, **options: Any) -> T:
            given = {limit.name: options.pop(limit.name) for limit in limits if limit.name in options}
            return cut(read(*arguments, **options), **given)

        # The signature of a reader is the schema of its section in the configuration.
        signature = inspect.signature(read)
        parameters = [*signature.parameters.values(), *limits]
        reader.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        reader.__annotations__ = {
            **read.__annotations__,
            **{limit.name: limit.annotation for limit in limits},
        }
        return reader

    return decorate


limited = limited_by(subset)
"""Gives a reader of an `ImageSet` the keywords of `subset`: ``train_per_product``, ``test_per_product``, ``seed``."""


def by_product(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Groups samples by product, products in order of first appearance."""
    return list(grouped((sample.category, sample) for sample in samples).values())


def _shuffled(samples: list[Sample], seed: int, purpose: str) -> list[Sample]:
    rng = numpy_generator(seed, purpose, samples[0].category, samples[0].defect)
    return [samples[i] for i in rng.permutation(len(samples))]


def _some(samples: list[Sample], limit: int | None, seed: int) -> list[Sample]:
    """Draws a random subset of at most ``limit`` samples, in their old order."""
    chosen = set(_shuffled(samples, seed, "train subset")[:limit])
    return [sample for sample in samples if sample in chosen]


def _balanced(samples: list[Sample], limit: int | None, seed: int) -> list[Sample]:
    """Draws a random subset of at most ``limit`` samples: half good, half taken evenly from the defects."""
    if limit is None:
        return samples
    by_defect = grouped((sample.defect, sample) for sample in samples)
    piles = {defect: _shuffled(pile, seed, "test subset") for defect, pile in by_defect.items()}
    good = piles.pop("good", [])
    dealt = [sample for deal in zip_longest(*piles.values()) for sample in deal if sample is not None]
    num_good = min(len(good), max(limit // 2, limit - len(dealt)))
    chosen = {*good[:num_good], *dealt[: limit - num_good]}
    return [sample for sample in samples if sample in chosen]


def choose_products(products: Sequence[str | int] | None, known: Sequence[str], where: Path) -> list[str]:
    """Checks the requested products against those of the set.

    Args:
        products: Names in the order wanted; None takes all. A number stands for its name.
        known: Every product of the set, at least one.
        where: The file or folder that holds them, for messages.

    Returns:
        Names of products, each once.

    Raises:
        UserError: A product is unknown (naming the nearest) or listed twice, or the list is empty.

    Example:
        >>> choose_products(["pcb2", "pcb1"], ["candle", "pcb1", "pcb2"], Path("VisA"))
        ['pcb2', 'pcb1']
    """
    if products is None:
        return list(known)
    names = [str(name) for name in ([products] if isinstance(products, str) else products)]
    if not names:
        raise UserError("products: the list is empty; name at least one product, or leave it out")
    for name, count in Counter(names).items():
        require_known(name, known, f"{where}: no product '{name}'")
        if count > 1:
            raise UserError(f"products: {name} is listed twice; remove one")
    return names


def require_known(word: str, known: Collection[str], problem: str) -> None:
    """Refuses a word that is not known, and names the nearest known word.

    Raises:
        UserError: The word is not known.
    """
    if word not in known:
        nearest = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)
        raise UserError(problem + (f"; the nearest is '{nearest[0]}'" if nearest else "; there are none"))

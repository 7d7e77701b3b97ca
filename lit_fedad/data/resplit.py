"""Another split of a set's normal images into training and test images."""

from collections import defaultdict

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.sample import ImageSet, Sample


def resplit(images: ImageSet, seed: int | None) -> ImageSet:
    """Redraws which normal images of each product train, and which test.

    As many as before do either, and anomalous images stay test images. After it, normal training and test images of a
    product are exchangeable, which a set's own split need not be: it may have been made by day, camera or patient.
    What belongs together (views of one object, images of one patient) can then come to both sides.

    Args:
        images: The set with its own split.
        seed: Seed of the draw, which for a product does not depend on the others; None keeps the split.

    Returns:
        The set, products and defects in their old places; images of one place in their old order, those that trained
        before those that tested.
    """
    if seed is None:
        return images
    pools: dict[str, list[Sample]] = defaultdict(list)
    for sample in (*images.train, *images.test):
        if not sample.label:
            pools[sample.category].append(sample)
    sizes = {product: sum(sample.category == product for sample in images.train) for product in pools}
    drawn: dict[str, tuple[list[Sample], list[Sample]]] = {}
    for product, pool in pools.items():
        chosen = numpy_generator(seed, "split", product).permutation(len(pool))
        parts = sorted(chosen[: sizes[product]]), sorted(chosen[sizes[product] :])
        drawn[product] = [pool[place] for place in parts[0]], [pool[place] for place in parts[1]]
    training = {product: iter(train) for product, (train, _) in drawn.items()}
    testing = {product: iter(test) for product, (_, test) in drawn.items()}
    return ImageSet(
        images.name,
        tuple(next(training[sample.category]) for sample in images.train),
        tuple(sample if sample.label else next(testing[sample.category]) for sample in images.test),
    )

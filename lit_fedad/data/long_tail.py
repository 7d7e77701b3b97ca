"""Long-tailed class sizes, cut out of sets that have enough of every class."""

import math
from collections.abc import Sequence

from lit_fedad.errors import UserError


def long_tail(sizes: Sequence[int], imbalance: float) -> list[int]:
    """Computes how many images each class keeps under an exponential profile.

    n_c = n_max (1 / IF)^(c / (C - 1)), rounded down, and never more than class c has. This is the profile of LDAM
    (Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019), which
    GLDP's experiments use.

    Args:
        sizes: Images of the C classes, from head to tail; n_max is the largest.
        imbalance: Imbalance factor IF, the ratio of the first class to the last; 1 keeps every image.

    Raises:
        UserError: ``imbalance`` is below 1, or a class would be left empty.

    Example:
        >>> long_tail([5000] * 10, imbalance=100)
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    if not imbalance >= 1:
        raise UserError(f"partition imbalance={imbalance}: give at least 1, which keeps every image")
    largest = max(sizes)
    last = max(len(sizes) - 1, 1)
    kept = []
    for number, size in enumerate(sizes):
        # Round-off must not take an image where the profile is whole, as 960 / 32^(4/5) = 60.
        kept.append(min(size, math.floor(largest / imbalance ** (number / last) + 1e-9)))
        if not kept[-1]:
            remedy = f"lower imbalance to at most {largest}" if size else "give it some or leave it out"
            raise UserError(
                f"partition imbalance={imbalance}: class {number} of size {size} is left without images; {remedy}"
            )
    return kept

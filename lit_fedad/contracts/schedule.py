"""Learning rates that fall over the rounds."""

import math


def cosine_decay(round: int, rounds: int) -> float:
    """Computes the factor of a round's learning rates, ``(1 + cos(pi (t - 1) / T)) / 2`` in round t of T.

    Args:
        round: Round t; before round 1 the factor is 1.
        rounds: Number of rounds T; after them the factor is 0.

    Example:
        >>> [round(cosine_decay(t, 2), 3) for t in (0, 1, 2, 3)]
        [1.0, 1.0, 0.5, 0.0]
    """
    done = min(max(round - 1, 0) / max(rounds, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * done))

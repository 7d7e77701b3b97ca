"""Places of features in the plane, found by t-SNE."""

import numpy as np
from numpy.typing import ArrayLike
from sklearn.manifold import TSNE


def tsne_layout(features: ArrayLike) -> np.ndarray:
    """Lays features out in the plane with t-SNE.

    On one machine the same features always have the same places. On CPUs of different kinds they need not: t-SNE
    amplifies differences in rounding until groups lie elsewhere. Only neighbourhoods mean something.

    Args:
        features: [n, D] with n >= 4; up to about 2,000 take well under a minute.

    Returns:
        Places [n, 2].
    """
    points = np.asarray(features, dtype=np.float32)
    perplexity = min(30.0, len(points) / 4)
    init = "pca" if np.ptp(points, axis=0).any() else "random"  # equal features have no principal component
    return np.asarray(TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(points))

import numpy as np
from sklearn.neighbors import NearestNeighbors

from lit_fedad.experiment.figures.embedding import tsne_layout

GROUPS = np.repeat([0, 1], 30)
FEATURES = np.random.default_rng(0).normal(size=(60, 8)) + 50 * np.eye(8)[GROUPS]


def test_neighbours_stay_neighbours():
    """Where the two groups lie is decided by rounding; that they do not mix is not."""
    places = tsne_layout(FEATURES)
    assert places.shape == (60, 2)
    nearest = NearestNeighbors(n_neighbors=3).fit(places).kneighbors(return_distance=False)
    assert (GROUPS[nearest] == GROUPS[:, None]).mean() > 0.95


def test_the_same_features_always_have_the_same_places():
    np.testing.assert_array_equal(tsne_layout(FEATURES[:20]), tsne_layout(FEATURES[:20].copy()))


def test_equal_features_have_places():
    """Their principal components would crash the interpreter."""
    assert np.isfinite(tsne_layout(np.ones((40, 8)))).all()


def test_a_single_feature_has_places_too():
    assert np.isfinite(tsne_layout(FEATURES[:12, :1])).all()

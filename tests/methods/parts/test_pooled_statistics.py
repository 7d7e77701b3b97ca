"""What the server checks of pooled statistics, counts of slots and quantiles, and what it cannot pool."""

from types import SimpleNamespace

import pytest
import torch
from helpers.summed_bank import summed_bank

from lit_fedad.contracts import Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.parts.pooled_statistics import (
    PooledStatistics,
    PooledThreshold,
    check_slots,
    pool_channels,
)


def test_statistics_of_more_vectors_than_the_images_have_are_refused():
    exchange = PooledStatistics(vectors_per_image=16, shrinkage=0.1)
    exchange.validate(None, 0, Update({"count": torch.tensor(32)}, 2))
    with pytest.raises(UserError, match="counts 33 vectors, but its images have 32"):
        exchange.validate(None, 0, Update({"count": torch.tensor(33)}, 2))


@pytest.mark.parametrize(
    ("count", "quantiles", "said"),
    [
        # 2 images x 16 patches x 3 neighbours
        (97, [0.0, 1.0, 1.0], "counts 97 vectors, but its images have 96"),
        (96, [0.0, 2.0, 1.0], "quantiles do not ascend"),
    ],
)
def test_distances_that_cannot_be_are_refused(count, quantiles, said):
    exchange, server = PooledThreshold(neighbours=3), SimpleNamespace(counts_per_image=16)
    possible = {"count": torch.tensor(96), "quantiles": torch.tensor([0.0, 0.5, 0.5])}
    exchange.validate(server, 0, Update(possible, 2))
    with pytest.raises(UserError, match=said):
        exchange.validate(
            server, 0, Update({"count": torch.tensor(count), "quantiles": torch.tensor(quantiles)}, 2)
        )


@pytest.mark.parametrize(
    ("counts", "images", "fewest", "said"),
    [
        ([20.0, 13.0, 0.0], [2, 2, 0], None, "counts 33 vectors, but its images have 32"),
        ([1.0, 1.0, 0.0], [1, 1, 0], None, "slots count 2 patches, too few"),
        ([1.0, 0.0, 0.0], [1, 0, 0], 2, "slots count 1 patches, too few"),
        ([20.0, 12.0, 0.0], [3, 1, 0], None, "a slot counts more than the client's 2 images"),
        ([20.0, 12.0, 0.0], [2, 1, 1], None, "or than its patches"),
    ],
)
def test_slots_that_no_images_fill_are_refused(counts, images, fewest, said):
    """Two images of 16 patches at most, and three slots."""
    check_slots(
        {"counts": torch.tensor([20.0, 12.0, 0.0]), "image_counts": torch.tensor([2, 1, 0])}, 2, 16, 16
    )
    with pytest.raises(UserError, match=said):
        check_slots({"counts": torch.tensor(counts), "image_counts": torch.tensor(images)}, 2, 16, 16, fewest)


def test_slots_may_be_of_fewer_images_than_the_client_has():
    check_slots({"counts": torch.tensor([2.0, 0.0, 0.0])}, 2, 2, 16, min_images=1)
    with pytest.raises(UserError, match="too few for its images"):
        check_slots({"counts": torch.tensor([2.0, 0.0, 0.0])}, 2, 2, 16)


def test_second_moments_are_not_pooled_by_channel():
    with pytest.raises(UserError, match=r"task\.whiten needs second moments"):
        pool_channels(summed_bank())
    assert pool_channels(summed_bank(whiten=None)).name == "statistics"

"""Second moments: equal to NumPy's on all rows, whatever the batches and the parts."""

import numpy as np
import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, MomentSets, check_covariance, symmetric, upper_triangle


@pytest.fixture
def rows():
    """Correlated vectors far from zero, with channels of very different variance."""
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(6, 6, generator=draw)
    scale = torch.tensor([1e-3, 0.1, 1.0, 3.0, 10.0, 0.0])
    return (torch.randn(500, 6, generator=draw) @ mix) * scale + 5


def close(found, rows, rtol=1e-6):
    expected = np.cov(rows.double().numpy().T, bias=True)
    assert found.count == len(rows)
    np.testing.assert_allclose(found.mean, rows.double().mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.covariance, expected, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_are_those_of_all_rows_whatever_the_batches(rows, batch):
    close(Moments.of(rows.split(batch), 6), rows)


@pytest.mark.parametrize("sizes", [[500], [1, 499], [100] * 5, [0, 300, 200]])
def test_the_union_is_that_of_all_rows_in_any_order(rows, sizes):
    parts = [Moments.of([part] if len(part) else [], 6) for part in rows.split(sizes)]
    close(Moments.union(parts), rows)
    close(Moments.union(parts[::-1]), rows)


def test_the_union_of_sets_is_that_of_each_set(rows):
    """Of three clients, one lacks the second set, and all lack the third; in messages, empty sets have no rows.

    The last set has one row in all.
    """
    sizes = ([100, 50, 0, 1], [20, 0, 0, 0], [10, 319, 0, 0])
    cuts = [part.split(own) for own, part in zip(sizes, rows.split([151, 20, 329]), strict=True)]
    sent = [MomentSets.of([Moments.of([part], 6) for part in parts], 6).message() for parts in cuts]
    assert [len(message["mean"]) for message in sent] == [3, 1, 2]
    found = list(MomentSets.union([MomentSets.of_message(message) for message in sent]))
    close(found[0], torch.cat([parts[0] for parts in cuts]), rtol=1e-5)
    close(found[1], torch.cat([parts[1] for parts in cuts]), rtol=1e-5)
    torch.testing.assert_close(found[3].mean, rows[150].double(), rtol=1e-6, atol=0)
    assert not found[3].covariance.any()
    assert found[2].count == 0
    assert not found[2].mean.any()
    assert not found[2].covariance.any()


@pytest.mark.parametrize("size", [0, 1, 300, 500])
def test_what_is_left_without_a_part_is_that_of_the_other_rows(rows, size):
    whole, part = Moments.of([rows], 6), Moments.of([rows[:size]], 6)
    left = whole.without(part)
    close(left, rows[size:], rtol=1e-5) if size < 500 else close(Moments.union([left, part]), rows)


def test_a_single_row_that_is_left_is_the_mean(rows):
    left = Moments.of([rows[:3]], 6).without(Moments.of([rows[1:3]], 6))
    assert left.count == 1
    torch.testing.assert_close(left.mean, rows[0].double(), rtol=1e-4, atol=1e-4)
    assert Moments.union([Moments.none(6), left]).mean.equal(left.mean)


def test_scaling_is_that_of_the_rows(rows):
    scale = torch.tensor([0.5, 2.0, 1.0, 3.0, 10.0, 0.1])
    close(Moments.of([rows], 6).scaled(scale), rows / scale)


def test_no_row_counts_nothing():
    nothing = Moments.of([], 3)
    assert nothing.count == 0
    assert not nothing.covariance.any()
    assert Moments.union([nothing, nothing]).count == 0
    with pytest.raises(ValueError, match="no moments"):
        Moments.union([])


def test_the_upper_triangle_holds_all_of_a_symmetric_matrix(rows):
    covariance = Moments.of([rows], 6).covariance
    triangle = upper_triangle(covariance)
    assert triangle.shape == (21,)
    assert torch.equal(symmetric(triangle, 6), covariance.triu() + covariance.triu(1).T)


def test_a_matrix_with_a_negative_direction_is_no_covariance():
    check_covariance(torch.diag(torch.tensor([1.0, 0.0, -1e-6])).double())
    with pytest.raises(UserError, match="negative variance"):
        check_covariance(torch.diag(torch.tensor([1.0, 0.0, -0.1])).double())

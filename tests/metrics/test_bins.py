"""Bins: in the order of the scores, as fine as documented, independent of the data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins, as_scores, distinct_bins

any_float32 = st.floats(width=32, allow_nan=False)
some_bins = st.builds(
    LogBins,
    mantissa_bits=st.integers(0, 12),
    min_exponent=st.integers(-126, -1),
    max_exponent=st.integers(0, 128),
)


@given(st.lists(any_float32, min_size=2, max_size=50), some_bins)
def test_bins_follow_the_order_of_the_scores(values, bins):
    index = bins.index(torch.tensor(sorted(values)))
    assert (index.diff() >= 0).all()
    assert index.min() >= 0
    assert index.max() < bins.count


@given(any_float32, any_float32, some_bins)
def test_a_bin_is_as_narrow_as_documented(a, b, bins):
    index = bins.index(torch.tensor([a, b]))
    if index[0] == index[1]:
        low, high = sorted([abs(a), abs(b)])
        tiny = high < 2.0**bins.min_exponent
        huge = low >= 2.0**bins.max_exponent and np.sign(a) == np.sign(b)
        assert tiny or huge or (np.sign(a) == np.sign(b) and high - low < low * 2.0**-bins.mantissa_bits)


@given(any_float32)
def test_negative_scores_mirror_positive_ones(value):
    plus, minus = DEFAULT_BINS.index(torch.tensor([value, -value])).tolist()
    assert plus + minus == DEFAULT_BINS.count - 1


@pytest.mark.parametrize("bins", [LogBins(0, -3, 2), LogBins(3, -2, 0), LogBins(1, 0, 1)])
def test_the_largest_score_of_a_bin_is_in_it_and_the_next_score_is_not(bins):
    """Also of the bin around zero."""
    index = torch.arange(bins.count - 1)
    last = bins.upper(index)
    assert bins.index(last).tolist() == index.tolist()
    assert bins.index(torch.nextafter(last, torch.tensor(torch.inf))).tolist() == (index + 1).tolist()


def test_neighbours_a_thousandth_apart_part():
    scores = torch.tensor([30.0, 30.0 * (1 + 2**-9), -30.0, -30.0 * (1 + 2**-9), 1e-9, 2e-9, 1e7])
    assert DEFAULT_BINS.index(scores).unique().numel() == scores.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_every_dtype_lands_where_its_float32_value_does(dtype):
    scores = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    assert torch.equal(DEFAULT_BINS.index(scores), DEFAULT_BINS.index(scores.float()))


def test_strided_scores():
    scores = torch.arange(12.0).view(3, 4)
    assert torch.equal(DEFAULT_BINS.index(scores.T), DEFAULT_BINS.index(scores.T.contiguous()))


@pytest.mark.parametrize("read", [as_scores, DEFAULT_BINS.index, distinct_bins])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_is_refused(read, dtype):
    scores = torch.ones(40, dtype=dtype)
    scores[17] = torch.nan
    with pytest.raises(UserError, match="NaN"):
        read(scores)


@given(st.lists(any_float32, max_size=50))
def test_distinct_bins_are_ranks(values):
    index, count = distinct_bins(torch.tensor(values))
    expected = np.unique(np.float32(values), return_inverse=True)
    assert count == len(expected[0])
    np.testing.assert_array_equal(index.numpy(), expected[1])

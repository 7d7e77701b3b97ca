from decimal import ROUND_FLOOR, Decimal

import pytest
from helpers.refusals import refusal
from hypothesis import given
from hypothesis import strategies as st

from lit_fedad.core.errors import UserError
from lit_fedad.data.stage_strategies import long_tail

# Worked out with a pocket calculator: 5000 / 10^(c / 9), 5000 / 50^(c / 9), 5000 / 100^(c / 9).
BY_HAND = {
    10: [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500],
    50: [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100],
    100: [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50],
}


@pytest.mark.parametrize(("imbalance", "kept"), BY_HAND.items())
def test_profiles_of_cifar10(imbalance, kept):
    assert long_tail([5000] * 10, imbalance) == kept


@given(
    largest=st.integers(100, 6000),
    classes=st.integers(2, 120),
    imbalance=st.integers(1, 100) | st.floats(1, 100),
)
@pytest.mark.slow
def test_profile_agrees_with_decimal_arithmetic(largest, classes, imbalance):
    kept = long_tail([largest] * classes, imbalance)
    for number, count in enumerate(kept):
        exact = largest / Decimal(imbalance) ** (Decimal(number) / (classes - 1))
        assert count == int((exact + Decimal("1e-9")).to_integral_value(ROUND_FLOOR))


@pytest.mark.parametrize("base", [3, 5, 6, 7])
def test_whole_profiles_lose_nothing_to_round_off(base):
    assert long_tail([10 * base**5] * 6, base**5) == [10 * base**power for power in range(5, -1, -1)]


def test_an_imbalance_of_one_keeps_every_image():
    assert long_tail([7, 3, 5], 1) == [7, 3, 5]
    assert long_tail([4], 100) == [4]


def test_no_class_keeps_more_than_it_has():
    # The profile of n_max = 100, which is the second class's size, is 100, 31.6, 10.
    assert long_tail([60, 100, 4], 10) == [60, 31, 4]


@pytest.mark.parametrize(
    ("sizes", "imbalance", "message"),
    [
        ([5, 5], 0.5, r"imbalance=0\.5: give at least 1"),
        ([5, 5], float("nan"), "imbalance=nan: give at least 1"),
        ([30, 9, 20], 50, "class 2 of size 20 is left without images; lower imbalance to at most 30"),
        ([30, 0, 20], 1, "class 1 of size 0 is left without images; give it some or leave it out"),
    ],
)
def test_faults_are_one_line(sizes, imbalance, message):
    with refusal(message):
        long_tail(sizes, imbalance)


def test_the_advised_imbalance_is_the_largest_that_works():
    assert long_tail([30, 20, 20], 30)[-1] == 1
    with pytest.raises(UserError):
        long_tail([30, 20, 20], 30.1)

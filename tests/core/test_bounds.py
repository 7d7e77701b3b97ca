import math

import pytest

from lit_fedad.core.bounds import above, at_least, below_one, within
from lit_fedad.core.errors import UserError


@pytest.mark.parametrize("number", [0, -1, math.nan])
def test_what_is_below_a_bound_is_named(number):
    with pytest.raises(UserError, match=f"^task.slots={number} must be at least 1$"):
        at_least("task", 1, grid=3, slots=number)


def test_a_bound_itself_is_at_least_but_not_above():
    at_least("task", 1, slots=1)
    with pytest.raises(UserError, match=r"task\.slots=1 must be above 1"):
        above("task", 1, slots=1)


@pytest.mark.parametrize("number", [-0.1, 1.1, math.nan, math.inf])
def test_an_interval_is_closed(number):
    within("task", 0, 1, low=0, high=1)
    with pytest.raises(UserError, match=r"task\.share=.* must be in \[0, 1\]"):
        within("task", 0, 1, share=number)


@pytest.mark.parametrize("number", [-0.1, 1, math.nan])
def test_a_momentum_is_below_one(number):
    below_one("task", momentum=0, relation_momentum=0.999)
    with pytest.raises(UserError, match=rf"^task\.momentum={number} must be at least 0 and below 1$"):
        below_one("task", momentum=number)


def test_what_is_not_given_passes():
    at_least("task", 1, slots=None)
    above("task", 1, slots=None)
    within("task", 0, 1, share=None)
    below_one("task", momentum=None)

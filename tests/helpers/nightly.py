"""Which methods a matrix plays in CI; the others it plays at night, with ``make test-nightly``."""

import pytest

IN_CI = {"fadngs", "feddymem", "fedvck", "gldp", "federated_bank", "fedavg", "local", "scaffold"}
"""The four papers' methods, sums, and those whose clients keep everything, nothing, or a state beside their weights.

Every method is played in CI on its own task (`end_to_end/test_pairs.py`) and under forged uploads.
"""


def by_method(cases):
    """Returns cases, each a method or a tuple that begins with one, as parameters; those of other methods nightly."""
    return [_at_night(case) for case in cases]


def _at_night(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[] if values[0] in IN_CI else pytest.mark.nightly)

"""Which methods a matrix plays in CI; the others it plays at night, with ``make test-nightly``."""

import pytest

IN_CI = {"fadngs", "feddymem", "fedvck", "gldp", "federated_bank", "fedavg", "local", "scaffold"}
"""The four papers' methods, sums, and those whose clients keep everything, nothing, or a state beside their weights.

Every method is played in CI on its own task (`end_to_end/test_pairs.py`).
"""


def by_method(cases, *marks):
    """Returns cases as parameters; a case is a method, a command or a tuple that begins with one.

    Those of other methods than `IN_CI` are nightly.
    """
    return [_at_night(case, marks) for case in cases]


def _at_night(case, marks):
    values = case if isinstance(case, tuple) else (case,)
    method = values[0].partition(" ")[0]
    return pytest.param(*values, marks=[*marks] if method in IN_CI else [*marks, pytest.mark.nightly])

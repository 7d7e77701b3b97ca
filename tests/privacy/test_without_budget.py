"""Differential privacy without a budget protects nothing, and says so."""

from types import SimpleNamespace

import pytest

from lit_fedad.privacy.dp_sgd import TrainingPrivacy
from lit_fedad.privacy.image_privacy import ImagePrivacy
from lit_fedad.privacy.protection import protect


@pytest.mark.parametrize("privacy", [ImagePrivacy(), TrainingPrivacy()])
def test_a_run_without_budget_is_told_that_nothing_is_promised(privacy):
    federation = SimpleNamespace(method=None, sampler=None, clients=[])
    with pytest.warns(UserWarning, match=r"nothing is noised .* give federation\.privacy\.epsilon"):
        assert protect(federation, privacy=privacy) is federation

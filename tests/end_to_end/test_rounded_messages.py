"""Runs whose messages are rounded: what a method checks of them still holds."""

import pytest

from lit_fedad.core.config import compose
from lit_fedad.experiment.train import train


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize(
    ("method", "federation"),
    [
        ("federated_bank", "half"),
        ("federated_bank", "byte"),
        ("federated_padim", "half"),
    ],
)
def test_covariances_of_few_vectors_stay_covariances(tmp_path, method, federation):
    given = ["debug=seconds", "tracking=off", "evaluation.pictures=0", f"out={tmp_path / 'run'}"]
    result = train(compose([f"method={method}", f"federation={federation}", *given]), quiet=True)
    assert not result["refused"]
    assert not result["failures"]

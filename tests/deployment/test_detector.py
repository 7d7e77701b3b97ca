"""A client's detector as a module and as a graph."""

import math

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Context, Prediction
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import Detector, trace
from lit_fedad.errors import UserError
from lit_fedad.methods.local import LocalClient


@pytest.fixture
def make_detector(make_task, make_loader):
    """A detector of 8 channels with a bank of its own images."""

    def make(threshold=1.0, **overrides):
        client = LocalClient(make_task(**overrides))
        client.task.prepare(make_loader(), Context(seed=0, round=0))
        return Detector(client, ImageTransform(32), threshold)

    return make


def test_the_graph_takes_any_number_of_images(make_detector):
    detector = make_detector(threshold=0.7)
    program = trace(detector, ImageTransform(32))
    for size in (1, 2, 7):
        pixels = torch.rand(size, 3, 32, 32)
        with torch.no_grad():
            found = program.module()(pixels)
        normalised = (pixels - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
            [0.229, 0.224, 0.225]
        ).view(3, 1, 1)
        live = detector.client.task.predict_step({"image": normalised})
        torch.testing.assert_close(found["image_score"], live.image_score, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["anomaly_map"], live.anomaly_map, rtol=1e-5, atol=1e-6)
        assert found["decision"].tolist() == (found["image_score"] > 0.7).tolist()


def test_decisions_part_at_the_threshold_as_the_run_has_it(make_detector):
    """A threshold between two single-precision numbers keeps its side; no number is not normal."""
    below, above = np.float32(1), np.nextafter(np.float32(1), np.float32(2))
    threshold = (float(below) + float(above)) / 2
    score = torch.tensor([below, above, math.nan])
    for limit, expected in ((threshold, [False, True, True]), (float(above), [False, False, True])):
        assert make_detector(limit).outputs(Prediction(score))["decision"].tolist() == expected


def test_a_prediction_that_branches_on_values_is_one_line(make_detector):
    class Branches(LocalClient):
        def predict_step(self, batch, batch_idx=0):
            return super().predict_step(batch) if batch["image"].sum() > 0 else Prediction(batch["image"])

    detector = make_detector()
    detector.client = Branches(detector.client.task)
    with pytest.raises(UserError, match=r"^Branches: its prediction cannot be exported \(") as caught:
        trace(detector, ImageTransform(32))
    assert "\n" not in str(caught.value)

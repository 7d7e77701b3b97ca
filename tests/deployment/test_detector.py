"""A client's detector as a module and as a graph."""

import math

import pytest
import torch
from helpers.refusals import refusal
from helpers.tiny_pyramid import TinyPyramid

from lit_fedad.contracts import Context, Prediction
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import Detector, trace
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.methods.local import LocalClient
from lit_fedad.metrics.conformal import DecisionRule, ScoreCounts
from lit_fedad.tasks.simplenet import SimpleNet


@pytest.fixture
def make_detector(make_task, make_loader):
    """A detector of 8 channels with a bank of its own images."""

    def make(threshold=1.0, **overrides):
        client = LocalClient(make_task(**overrides))
        client.task.refresh(make_loader(), Context(seed=0, round=0), first=True)
        rule = DecisionRule("drawn", ScoreCounts.of(torch.tensor([threshold])), 0.5)
        return Detector(client, ImageTransform(32), rule)

    return make


@pytest.mark.slow
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


class Frozen(TinyPyramid):
    """A backbone that computes no gradients, as those of timm."""

    forward = torch.no_grad()(TinyPyramid.forward)


@pytest.mark.slow
def test_what_computes_without_gradients_twice_over_is_read_back(tmp_path):
    """PyTorch writes graphs within the graph for it, and cannot read empty ones."""
    task = SimpleNet(Frozen(), grid=4, image_size=32, hidden=6)
    task.load_statistics(torch.zeros(8), torch.ones(8))
    rule = DecisionRule("drawn", ScoreCounts.of(torch.ones(1)), 0.5)
    detector = Detector(LocalClient(task), ImageTransform(32), rule)
    FORMATS["pt2"].save(trace(detector, ImageTransform(32)), tmp_path / "detector.pt2")
    pixels = torch.rand(3, 3, 32, 32)
    found, live = FORMATS["pt2"].load(tmp_path / "detector.pt2")(pixels), torch.no_grad()(detector)(pixels)
    torch.testing.assert_close(found, live)


def test_decisions_part_at_the_threshold_as_the_run_has_it(make_detector):
    """The last number of the threshold's bin is normal, the next is not; no number is not normal."""
    detector = make_detector(1.0)
    limit = detector.threshold.clone()
    score = torch.stack([limit, torch.nextafter(limit, torch.tensor(2.0)), torch.tensor(math.nan)])
    found = detector.outputs(Prediction(score))
    assert found["decision"].tolist() == [False, True, True]
    assert found["p_value"].tolist() == [1.0, 0.5, 0.5]


@pytest.mark.slow
def test_a_prediction_that_branches_on_values_is_one_line(make_detector):
    class Branches(LocalClient):
        def predict_step(self, batch, batch_idx=0):
            return (
                super().predict_step(batch)
                if batch["image"].sum() > 0
                else Prediction(batch["image"].mean((1, 2, 3)))
            )

    detector = make_detector()
    detector.client = Branches(detector.client.task)
    with refusal(r"^Branches: its prediction cannot be exported \("):
        trace(detector, ImageTransform(32))

"""Metric states of stages, as they cross."""

import numpy as np
import torch

from lit_fedad.contracts import Context
from lit_fedad.data.stream import Timetable
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, Judged
from lit_fedad.evaluation.state_messages import IMAGE_BINS
from lit_fedad.federation.channel import Link, Plain
from lit_fedad.metrics.anomaly import AnomalyMetrics


def state(scores, labels, maps=None, masks=None):
    metrics = AnomalyMetrics(pixel=maps is not None)
    pixels = {} if maps is None else {"anomaly_maps": maps, "masks": masks}
    metrics.update(torch.tensor(scores), torch.tensor(labels), **pixels)
    return metrics


def server(stages):
    return AnomalyStreamEvaluator({}, Timetable([stages], stages), [np.ones((stages, 1))], common=False)


def crossed(answer, stages):
    link, question = Link(Plain()), server(stages)
    blob = link.pack(
        question.pack(Judged(answer[0], [], {}, answer)), question.spec(), Context(0, 1), "a site"
    )
    return question.unpack(link.unpack(blob, question.spec(), "a site")).stages


def test_each_stage_arrives_as_it_was_and_stages_to_come_are_empty():
    draw = torch.Generator().manual_seed(0)
    maps, masks = torch.rand(2, 8, 8, generator=draw), torch.zeros(2, 8, 8, dtype=torch.bool)
    masks[1, :3, :3] = True
    first, second = state([0.5, 2.0], [0, 1], maps, masks), state([3.0, 1.0], [0, 1], maps * 2, masks)
    *found, third = crossed([first, second], stages=3)
    for own, there in zip(found, (first, second), strict=True):
        scores = torch.cat(there.image_scores)
        expected = IMAGE_BINS.upper(IMAGE_BINS.index(scores).long()).sort().values
        assert torch.equal(torch.cat(own.image_scores).sort().values, expected)
        assert float(own.compute_local()["i_auroc"]) == float(there.compute_local()["i_auroc"])
        for name in ("normal", "anomalous", "region", "normal_images", "image"):
            assert torch.equal(getattr(own, name), getattr(there, name))
    assert not len(torch.cat(third.image_scores))


def test_without_masks_only_image_scores_cross():
    (one, two) = crossed([state([1.0, 4.0], [0, 1]), state([4.0, 1.0], [0, 1])], stages=2)
    assert not one.pixel
    assert [float(own.compute_local()["i_auroc"]) for own in (one, two)] == [1.0, 0.0]

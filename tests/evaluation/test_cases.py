"""The maps that are kept while images are scored, batch by batch."""

import numpy as np
import torch

from lit_fedad.evaluation.predict import Cases, Predicted
from lit_fedad.report.heatmaps import pick_cases


def test_the_maps_of_all_images_that_are_drawn_are_kept_and_few_others():
    rng = np.random.default_rng(0)
    for _ in range(100):
        number, each = rng.integers(1, 30), int(rng.integers(1, 6))
        labels = rng.integers(0, 2, number).tolist()
        scores = torch.from_numpy(rng.integers(0, 4, number)).float()  # many are equal
        cases, predicted = Cases(labels, each, {0: 1}), Predicted.empty(number)
        for index in torch.arange(number).split(4):
            predicted.scores[index] = scores[index]
            cases.add(predicted, index, index[:, None, None].float())
        assert predicted.maps.keys() >= set(pick_cases(scores, labels, each, each))
        assert len(predicted.maps) <= 4 * each
        assert {index: int(kept) for index, kept in predicted.maps.items()} == {i: i for i in predicted.maps}

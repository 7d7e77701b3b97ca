"""Accuracy of predictions that look at no image, against the arithmetic of single images."""

import math

import pytest
import torch

from lit_fedad.metrics.classification import CONSTANTS, constant_accuracies
from lit_fedad.report.closing import CONSTANT_LABELS


def test_against_counting_image_by_image():
    counts = torch.tensor([[4, 1, 0], [0, 2, 7], [3, 3, 3]])
    tests = [[0, 0, 1, 2], [1, 2, 2], [0, 1, 1, 2, 2, 2]]  # labels of each client's test images
    weights = torch.stack([torch.tensor(labels).bincount(minlength=3) for labels in tests])
    found = constant_accuracies(counts, weights)
    assert tuple(found) == CONSTANTS == tuple(CONSTANT_LABELS)

    def accuracy(guesses):
        return sum(sum(k == g for k in own) / len(own) for own, g in zip(tests, guesses, strict=True)) / 3

    assert found["client_largest"] == pytest.approx(accuracy([0, 2, 0]))  # of equal classes the first
    assert found["global_largest"] == pytest.approx(accuracy([2, 2, 2]))  # 7, 6 and 10 images in all
    random = [(2 / 4 + 1 / 4) / 2, (1 / 3 + 2 / 3) / 2, 1 / 3]
    assert found["random"] == pytest.approx(sum(random) / 3)


def test_clients_without_training_or_test_images_are_left_out():
    counts, weights = torch.tensor([[5, 1], [0, 0], [1, 5]]), torch.tensor([[1, 1], [1, 1], [0, 0]])
    assert constant_accuracies(counts, weights)["client_largest"] == 0.5
    nobody = constant_accuracies(torch.zeros(2, 3), torch.ones(2, 3))
    assert all(math.isnan(value) for value in nobody.values())

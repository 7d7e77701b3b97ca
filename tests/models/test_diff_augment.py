"""Each operation against NumPy and SciPy, image by image; draws, groups and gradients."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from lit_fedad.models.diff_augment import OPERATIONS, Draw, diff_augment, draw

COLOUR, CROP, CUTOUT, FLIP, SCALE, ROTATE = range(6)
LARGEST = 1 - 2**-24  # the largest number that torch.rand gives


def colour(image, numbers):
    image = image + (numbers[0] - 0.5)
    grey = image.mean(0)
    image = grey + (image - grey) * 2 * numbers[1]
    return image.mean() + (image - image.mean()) * (0.5 + numbers[2])


def crop(image, numbers):
    side = image.shape[1]
    largest = int(side * 0.125 + 0.5)
    down, across = (int(number * (2 * largest + 1)) - largest for number in numbers[:2])
    out = np.zeros_like(image)
    for row in range(side):
        for column in range(side):
            if 0 <= row + down < side and 0 <= column + across < side:
                out[:, row, column] = image[:, row + down, column + across]
    return out


def cutout(image, numbers):
    side, out = image.shape[1], image.copy()
    square = int(side * 0.5 + 0.5)
    top, left = (int(number * (side + 1 - square % 2)) - square // 2 for number in numbers[:2])
    out[:, max(top, 0) : top + square, max(left, 0) : left + square] = 0
    return out


def flip(image, numbers):
    return image[:, :, ::-1] if numbers[0] < 0.5 else image


def resample(image, matrix):
    """Bilinearly; the matrix acts on (row, column) about the centre, beyond the border lie zeros."""
    centre = np.full(2, (image.shape[1] - 1) / 2)
    offset = centre - matrix @ centre
    return np.stack(
        [
            ndimage.affine_transform(channel, matrix, offset, order=1, mode="grid-constant")
            for channel in image
        ]
    )


def scale(image, numbers):
    across, down = 1 / 1.2 + np.asarray(numbers[:2]) * (1.2 - 1 / 1.2)
    return resample(image, np.diag([down, across]))


def rotate(image, numbers):
    angle = np.deg2rad(30 * numbers[0] - 15)
    return resample(image, np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]))


REFERENCES = (colour, crop, cutout, flip, scale, rotate)


def augment(images, operation, numbers):
    """One operation; numbers [B, 3] for each image."""
    count = len(images)
    return diff_augment(images, Draw(torch.full((count,), operation), numbers), torch.arange(count))


def extremes():
    """All draws of smallest, middle and largest numbers."""
    return torch.cartesian_prod(*[torch.tensor([0.0, 0.5, LARGEST])] * 3)


@pytest.mark.parametrize("side", [7, 28, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", range(6))
def test_each_operation_is_that_of_independent_arithmetic(operation, channels, side):
    torch.manual_seed(0)
    numbers = torch.cat([extremes(), torch.rand(20, 3)])
    images = torch.randn(len(numbers), channels, side, side)
    expected = [
        REFERENCES[operation](image, chance)
        for image, chance in zip(images.double().numpy(), numbers.double().numpy(), strict=True)
    ]
    actual = augment(images, operation, numbers).double().numpy()
    np.testing.assert_allclose(actual, np.stack(expected), rtol=0, atol=2e-5)


def test_saturation_does_nothing_to_a_lone_channel():
    numbers = torch.tensor([[0.5, 0.1, 0.5]])
    grey, coloured = torch.randn(1, 1, 8, 8), torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(augment(grey, COLOUR, numbers), grey)
    assert not torch.allclose(augment(coloured, COLOUR, numbers), coloured, atol=0.1)


def test_a_mixed_batch_is_its_images_one_by_one():
    torch.manual_seed(0)
    images, drawn = torch.randn(40, 3, 16, 16), draw(40)
    assert drawn.operation.unique().tolist() == list(range(6))
    alone = [
        diff_augment(image[None], Draw(operation[None], numbers[None]), torch.tensor([0]))
        for image, operation, numbers in zip(images, *drawn, strict=True)
    ]
    torch.testing.assert_close(diff_augment(images, drawn, torch.arange(40)), torch.cat(alone))


@pytest.mark.parametrize("operation", range(6))
def test_a_group_is_treated_alike_and_only_it(operation):
    torch.manual_seed(0)
    image = torch.randn(3, 16, 16)
    numbers = torch.tensor([[0.1, 0.2, 0.9], [0.8, 0.7, 0.3]])
    drawn = Draw(torch.tensor([operation, operation]), numbers)
    a, b, c = diff_augment(image.repeat(3, 1, 1, 1), drawn, torch.tensor([1, 0, 1]))
    torch.testing.assert_close(a, c)  # places in a batch may round differently
    assert not torch.allclose(a, b, atol=0.01)


@pytest.mark.slow
def test_gradients_reach_the_images_through_every_operation():
    torch.manual_seed(0)
    images = torch.randn(6, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    drawn = Draw(torch.arange(6), torch.tensor([[0.2, 0.7, 0.6]]).repeat(6, 1))
    assert torch.autograd.gradcheck(lambda x: diff_augment(x, drawn, torch.arange(6)), images)


def test_draws_are_uniform_and_follow_their_generator():
    operation, numbers = draw(6000, torch.Generator().manual_seed(0))
    assert operation.dtype == torch.int64
    assert numbers.shape == (6000, 3)
    assert (operation.bincount(minlength=len(OPERATIONS)) - 1000).abs().max() < 120  # 4 standard deviations
    assert torch.equal(numbers, draw(6000, torch.Generator().manual_seed(0)).numbers)
    assert not torch.equal(numbers, draw(6000, torch.Generator().manual_seed(1)).numbers)


def test_without_a_generator_the_global_one_draws():
    torch.manual_seed(0)
    first, second = draw(5), draw(5)
    torch.manual_seed(0)
    assert torch.equal(draw(5).numbers, first.numbers)
    assert not torch.equal(first.numbers, second.numbers)

"""Views of whole batches against torchvision, image by image with the same parameters."""

import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from lit_fedad.models import contrastive_views
from lit_fedad.models.contrastive_views import (
    ContrastiveViews,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    crop_resize,
    draw_boxes,
    rotations,
)

ADJUSTMENTS = ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue"]
IDENTITY = {"crop_scale": (1, 1), "ratio": (1, 1), "flip": 0, "jitter_probability": 0, "greyscale": 0}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def seeded(seed, images, **settings):
    torch.manual_seed(seed)
    return ContrastiveViews(**settings)(images)


@pytest.fixture
def images():
    """Random, quantised (ties between channels), grey, black and white images."""
    torch.manual_seed(0)
    plain = [torch.rand(8, 3, 1, 1).expand(8, 3, 24, 24), torch.zeros(1, 3, 24, 24), torch.ones(1, 3, 24, 24)]
    return torch.cat(
        [
            torch.rand(20, 3, 24, 24),
            torch.randint(3, (20, 3, 24, 24)) / 2,
            torch.rand(4, 1, 24, 24).expand(4, 3, 24, 24),
            *plain,
        ]
    )


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(32, 32), (20, 33)])
def test_crops_are_those_of_torchvision(size, antialias):
    torch.manual_seed(0)
    images = torch.rand(40, 3, *size)
    boxes = draw_boxes(40, size, (0.05, 1.0), (0.5, 2.0))
    boxes[0] = torch.tensor([0, 0, *size])
    boxes[1] = torch.tensor([size[0] - 1, size[1] - 1, 1, 1])
    mirrored = torch.arange(40) % 2 == 0
    for image, box, mirror, crop in zip(
        images, boxes, mirrored, crop_resize(images, boxes, mirrored), strict=True
    ):
        expected = tvf.resized_crop(image, *box.tolist(), size=list(size), antialias=antialias)
        close(crop, tvf.horizontal_flip(expected) if mirror else expected)


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (adjust_brightness, tvf.adjust_brightness, 0.0, 2.0),
        (adjust_contrast, tvf.adjust_contrast, 0.0, 2.0),
        (adjust_saturation, tvf.adjust_saturation, 0.0, 2.0),
        (adjust_hue, tvf.adjust_hue, -0.5, 0.5),
    ],
)
def test_adjustments_are_those_of_torchvision(images, ours, theirs, low, high):
    amounts = torch.linspace(low, high, len(images))[torch.randperm(len(images))]
    before = images.clone()
    adjusted = ours(images, amounts)
    assert torch.equal(images, before)
    for image, amount, result in zip(images, amounts.tolist(), adjusted, strict=True):
        close(result, theirs(image, amount))


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.2, 1.5)])
def test_boxes_are_distributed_as_those_of_torchvision(ratio):
    torch.manual_seed(0)
    transform, image = v2.RandomResizedCrop(64, scale=(0.2, 1.0), ratio=ratio), torch.zeros(3, 64, 64)
    params = [transform.make_params([image]) for _ in range(4000)]
    ours = draw_boxes(4000, (64, 64), (0.2, 1.0), ratio)
    for column, name in enumerate(["top", "left", "height", "width"]):
        assert ks_2samp(ours[:, column].numpy(), [drawn[name] for drawn in params]).pvalue > 0.01


def test_boxes_keep_to_their_limits():
    torch.manual_seed(0)
    top, left, height, width = draw_boxes(20_000, (96, 128), (0.2, 0.6), (3 / 4, 4 / 3)).double().T
    assert min(top.min(), left.min()) == 0
    assert (top + height).max() == 96
    assert (left + width).max() == 128
    # Rounding to pixels moves a side by half a pixel at most.
    area, whole = height * width, 96 * 128
    slack = (height + width) / 2 + 0.25
    assert (area + slack >= 0.2 * whole).all()
    assert (area - slack <= 0.6 * whole).all()
    assert area.min() < 0.21 * whole
    assert area.max() > 0.59 * whole
    assert ((width + 0.5) / (height - 0.5) >= 3 / 4).all()
    assert ((width - 0.5) / (height + 0.5) <= 4 / 3).all()


def test_a_box_that_never_fits_is_cut():
    boxes = draw_boxes(50, (8, 64), scale=(1.0, 1.0), ratio=(1.0, 1.0))  # asks for 23 x 23
    assert (boxes[:, [0, 2, 3]] == torch.tensor([0, 8, 23])).all()
    assert boxes[:, 1].min() >= 0
    assert (boxes[:, 1] + 23).max() <= 64


def test_neutral_settings_give_the_images_back():
    images = torch.rand(16, 3, 32, 32)
    views = seeded(0, images, **IDENTITY)
    torch.testing.assert_close(views, images, atol=2e-6, rtol=0)
    assert views.data_ptr() != images.data_ptr()


def test_each_image_is_cropped_by_its_own_box():
    image = torch.rand(3, 32, 32)
    views = seeded(
        3, image.expand(32, 3, 32, 32), **{**IDENTITY, "crop_scale": (0.2, 1), "ratio": (3 / 4, 4 / 3)}
    )
    torch.manual_seed(3)
    boxes = draw_boxes(32, (32, 32), (0.2, 1), (3 / 4, 4 / 3))
    assert len(boxes.unique(dim=0)) == 32
    for view, box in zip(views, boxes.tolist(), strict=True):
        close(view, tvf.resized_crop(image, *box, size=[32, 32]))


def test_flip_and_greyscale_come_as_often_as_asked():
    images = torch.rand(3, 4, 4).expand(4000, 3, 4, 4)
    flipped = seeded(0, images, **{**IDENTITY, "flip": 0.3})
    grey = seeded(0, images, **{**IDENTITY, "greyscale": 0.2})
    is_flipped = (flipped - images.flip(3)).abs().amax((1, 2, 3)) < 1e-5
    is_grey = (grey - tvf.rgb_to_grayscale(images, 3)).abs().amax((1, 2, 3)) < 1e-5
    close(flipped[~is_flipped], images[~is_flipped])
    close(grey[~is_grey], images[~is_grey])
    assert is_flipped.float().mean().item() == pytest.approx(0.3, abs=0.03)  # four standard deviations
    assert is_grey.float().mean().item() == pytest.approx(0.2, abs=0.026)


def test_jitter_factors_are_uniform_and_as_frequent_as_asked():
    images = torch.full((4000, 3, 2, 2), 0.5)  # no factor up to 1.4 clips
    views = seeded(0, images, **{**IDENTITY, "jitter": (0.4, 0, 0, 0), "jitter_probability": 0.8})
    factors = 2 * views[:, 0, 0, 0]
    factors = factors[(factors - 1).abs() > 1e-5]
    assert len(factors) / 4000 == pytest.approx(0.8, abs=0.026)
    assert kstest(factors.numpy(), "uniform", args=(0.6, 0.8)).pvalue > 0.01


@pytest.mark.slow
def test_jitter_is_torchvisions_chain_in_an_order_drawn_per_batch(images, monkeypatch):
    calls = []

    def recorded(name, adjust):
        def call(batch, amounts):
            calls.append((name, amounts))
            return adjust(batch, amounts)

        return call

    for name in ADJUSTMENTS:
        monkeypatch.setattr(contrastive_views, name, recorded(name, getattr(contrastive_views, name)))
    orders = set()
    for seed in range(150):
        calls.clear()
        views = seeded(seed, images[:6], **{**IDENTITY, "jitter_probability": 1})
        orders.add(tuple(name for name, _ in calls))
        for number, view in enumerate(views if seed < 12 else ()):
            expected = images[number]
            for name, amounts in calls:
                assert len(amounts.unique()) == 6
                expected = getattr(tvf, name)(expected, amounts[number].item())
            close(view, expected)
    assert len(orders) == 24


def test_draws_follow_the_global_generator_and_leave_the_images_alone(images):
    before = images.clone()
    views = [seeded(seed, images) for seed in (0, 0, 1)]
    assert torch.equal(images, before)
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


def test_values_stay_between_0_and_1(images):
    for seed in range(20):
        views = seeded(seed, images, jitter=(1, 1, 1, 0.5))
        assert views.shape == images.shape
        assert views.min() >= 0
        assert views.max() <= 1


def test_rounding_makes_nothing_whiter_than_white():
    # Weights of an interpolation sum to more than 1 in a few pixels of a million.
    white = torch.ones(3000, 3, 30, 30)
    assert seeded(0, white, flip=0, jitter_probability=0, greyscale=0).max() == 1


def test_autocast_costs_no_precision(images):
    expected = seeded(0, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        views = seeded(0, images)
    assert views.dtype == torch.float32
    assert torch.equal(views, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_views(images):
    torch.testing.assert_close(seeded(0, images.cuda()).cpu(), seeded(0, images), atol=1e-4, rtol=0)


def test_rotations_are_numpys():
    images = torch.rand(5, 3, 6, 6)
    for turns, rotated in enumerate(rotations(images), start=1):
        for image, result in zip(images.numpy(), rotated.numpy(), strict=True):
            for channel, turned in zip(image, result, strict=True):
                side = channel
                for _ in range(turns):
                    side = side.T[::-1]  # anticlockwise: the last column becomes the first row
                assert (turned == side).all()

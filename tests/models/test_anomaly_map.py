"""The map's matrix form against torch's interpolation and scipy's filter."""

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch.nn import functional as F

from lit_fedad.tasks.patches import AnomalyMap


def test_equals_bilinear_upsampling_and_a_gaussian_filter():
    scores = torch.rand(2, 7, 7)
    upsampled = F.interpolate(scores[:, None], size=(40, 40), mode="bilinear", align_corners=False)[:, 0]
    expected = np.stack([gaussian_filter(m, sigma=3.0, mode="reflect") for m in upsampled.double().numpy()])
    np.testing.assert_allclose(AnomalyMap(7, 40, sigma=3.0)(scores).numpy(), expected, rtol=1e-5)


def test_without_blur_it_only_upsamples():
    scores = torch.rand(1, 4, 4)
    expected = F.interpolate(scores[:, None], size=(16, 16), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(AnomalyMap(4, 16, sigma=0)(scores), expected)


def test_a_constant_map_stays_constant():
    torch.testing.assert_close(AnomalyMap(8, 64)(torch.full((1, 8, 8), 2.5)), torch.full((1, 64, 64), 2.5))


def test_oblong_grids_make_oblong_maps():
    scores = torch.rand(2, 5, 9)
    upsampled = F.interpolate(scores[:, None], size=(20, 54), mode="bilinear", align_corners=False)[:, 0]
    expected = np.stack([gaussian_filter(m, sigma=2.0, mode="reflect") for m in upsampled.double().numpy()])
    np.testing.assert_allclose(AnomalyMap((5, 9), (20, 54), sigma=2.0)(scores).numpy(), expected, rtol=1e-5)

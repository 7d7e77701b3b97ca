"""A decoder from features to images, trained on drawn scenes."""

import pytest
import torch
from torch.nn import functional as F

from lit_fedad.audits.decoder import Decoder, train_decoder
from lit_fedad.audits.inversion import InversionOptions
from lit_fedad.errors import UserError


def small(images):
    """Mean colours of a 4 x 4 grid: features [n, 16, 3] that keep their places."""
    return F.avg_pool2d(images, images.shape[-1] // 4).flatten(2).mT


def test_images_have_the_declared_size_and_range():
    decoder = Decoder(5, (3, 4), (24, 32))
    with torch.no_grad():
        images = decoder(1e3 * torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0)))
    assert images.shape == (2, 3, 24, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_a_trained_decoder_shows_where_things_are():
    """An image that is dark in one half, and no scene: its features give that half back."""
    decoder, losses = train_decoder(small, (4, 4), (16, 16), steps=40, seed=0)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    image = torch.full((1, 3, 16, 16), 0.2)
    image[..., 8:] = 0.8
    with torch.no_grad():
        decoded = decoder(small(image))
    assert float(decoded[..., 8:].mean() - decoded[..., :8].mean()) > 0.2


def test_what_a_decoder_cannot_invert_is_refused_in_one_line():
    with pytest.raises(UserError, match="needs features in their places"):
        train_decoder(lambda images: small(images)[:, :7], (4, 4), (16, 16), steps=1, seed=0)
    with pytest.raises(UserError, match="by=decoder learns to invert the features that all share"):
        InversionOptions(by="decoder", knowledge="own")

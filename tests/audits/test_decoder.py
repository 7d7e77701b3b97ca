"""A decoder from features to images, trained on drawn scenes."""

import pytest
import torch
from torch.nn import functional as F

from lit_fedad.audits.inversion_attack import InversionOptions
from lit_fedad.audits.reconstruction import Decoder, drawn_from, drawn_scenes, train_decoder
from lit_fedad.core.errors import UserError


def small(images):
    """Mean colours of a 4 x 4 grid: features [n, 16, 3] that keep their places."""
    return F.avg_pool2d(images, images.shape[-1] // 4).flatten(2).mT


def test_images_have_the_declared_size_and_range():
    decoder = Decoder(5, (3, 4), (24, 32))
    with torch.no_grad():
        images = decoder(1e3 * torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0)))
    assert images.shape == (2, 3, 24, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


@pytest.mark.slow
def test_a_trained_decoder_shows_where_things_are():
    """An image that is dark in one half, and no scene: its features give that half back."""
    decoder, losses = train_decoder(small, (4, 4), (16, 16), 40, 0, drawn_scenes((16, 16), 0))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    image = torch.full((1, 3, 16, 16), 0.2)
    image[..., 8:] = 0.8
    with torch.no_grad():
        decoded = decoder(small(image))
    assert float(decoded[..., 8:].mean() - decoded[..., :8].mean()) > 0.2


def test_a_decoder_learns_what_public_images_look_like():
    """Trained on images of one colour, it shows these: what stood there in the image is not in the features."""
    red = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    red[:, 0] = 200
    decoder, losses = train_decoder(
        lambda images: small(images)[:, :, :1], (4, 4), (16, 16), 60, 0, drawn_from(red, (16, 16), 0)
    )
    assert losses[-1] < losses[0]
    with torch.no_grad():
        decoded = decoder(small(torch.full((1, 3, 16, 16), 200 / 255))[:, :, :1])
    assert float(decoded[:, 0].mean()) > 2 * float(decoded[:, 1:].mean())


def test_batches_of_public_images_are_these_images_mirrored_or_not():
    images = torch.randint(
        0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    batches = drawn_from(images, (6, 8), 0)
    known = [one.flatten() for one in torch.cat([images, images.flip(3)])[:, :, :6] / 255]
    found = torch.cat([batches(number) for number in range(4)])
    assert found.shape[1:] == (3, 6, 8)
    seen = {next(i for i, own in enumerate(known) if torch.equal(own, one.flatten())) for one in found}
    assert seen == set(range(6))
    assert torch.equal(batches(1), batches(1))


def test_an_untrained_decoder_knows_nothing_of_an_image():
    """Its output does not follow the image: what is decoded of opposite images is alike, next to the images."""
    decoder, _ = train_decoder(small, (4, 4), (16, 16), 1, 0, lambda number: torch.rand(4, 3, 16, 16))
    image = torch.zeros(1, 3, 16, 16)
    image[..., 8:] = 1
    with torch.no_grad():
        one, other = decoder(small(image)), decoder(small(1 - image))
    assert float((one - other).abs().mean()) < 0.3 * float((image - (1 - image)).abs().mean())


def test_what_a_decoder_cannot_invert_is_refused_in_one_line():
    with pytest.raises(UserError, match="needs features in their places"):
        train_decoder(lambda images: small(images)[:, :7], (4, 4), (16, 16), 1, 0, drawn_scenes((16, 16), 0))
    with pytest.raises(UserError, match="by=decoder learns to invert the features that all share"):
        InversionOptions(by="decoder", knowledge="own")
    with pytest.raises(UserError, match="public=here: a search learns from no images"):
        InversionOptions(public="here")

import pickle
import warnings

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.core.sizes import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.data.transform import ImageTransform


def save(path, array, mode=None, **options):
    Image.fromarray(np.asarray(array), mode).save(path, **options)
    return path


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(40, 60, 3), dtype=np.uint8)
    return save(tmp_path / "photo.png", pixels)


def test_direct_resize_is_pillows_bicubic(photo):
    expected = np.asarray(Image.open(photo).resize((16, 16), Image.Resampling.BICUBIC))
    raw = ImageTransform(16).raw(photo)
    assert raw.dtype == torch.uint8
    assert np.array_equal(raw.numpy(), expected)


def test_resize_and_crop_keeps_the_aspect_ratio(photo):
    # 60 x 40 becomes 30 x 20; the middle 16 x 16 start at column 7 and row 2.
    expected = np.asarray(Image.open(photo).resize((30, 20), Image.Resampling.BICUBIC))[2:18, 7:23]
    assert np.array_equal(ImageTransform(16, fit="crop", resize=20).raw(photo).numpy(), expected)


def test_image_is_the_normalised_raw_image(photo):
    transform = ImageTransform(16, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    image, raw = transform.image(photo), transform.raw(photo).numpy()
    assert image.dtype == torch.float32
    assert image.shape == (3, 16, 16)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 1.0), (0.3, 2.0)]):
        expected = (raw[:, :, channel] / 255 - mean) / std
        assert image[channel].numpy() == pytest.approx(expected, abs=1e-5)


def test_a_picture_of_the_output_size_passes_unchanged(photo):
    square = save(photo.parent / "square.png", np.asarray(Image.open(photo))[:40, :40])
    expected = np.asarray(Image.open(square))
    assert np.array_equal(ImageTransform(40).raw(square).numpy(), expected)
    assert np.array_equal(ImageTransform(40, fit="crop", resize=40).raw(square).numpy(), expected)


def constant(value, mode):
    return Image.new(mode, (8, 8), value)


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("bilevel.png", constant(1, "1"), (255, 255, 255)),
        ("rgba_half.png", constant((0, 100, 200, 102), "RGBA"), (153, 193, 233)),
        ("grey_alpha.png", constant((50, 51), "LA"), (214, 214, 214)),
    ],
)
def test_two_values_and_transparency_become_rgb(tmp_path, name, image, expected):
    image.save(tmp_path / name)
    raw = ImageTransform(4).raw(tmp_path / name)
    assert raw.shape == (4, 4, 3)
    assert raw[2, 2].tolist() == pytest.approx(list(expected), abs=1)


def test_palette_images_keep_their_colours(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, 4:] = (200, 30, 90)
    image = Image.fromarray(pixels).convert("P", palette=Image.Palette.ADAPTIVE, colors=2)
    image.save(tmp_path / "p.png")
    assert np.array_equal(ImageTransform(8).raw(tmp_path / "p.png").numpy(), pixels)
    image.save(tmp_path / "t.png", transparency=image.getpixel((7, 0)))
    assert ImageTransform(8).raw(tmp_path / "t.png")[0, 7].tolist() == [255, 255, 255]


def test_exif_orientation_turns_image_and_mask(tmp_path):
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:10] = 255  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise by 90 degrees: white moves to the right
    path = save(tmp_path / "turned.png", pixels, exif=exif)
    raw = ImageTransform(8).raw(path).numpy()
    assert raw[:, 6:].min() > 200
    assert raw[:, :2].max() < 50

    upright = save(tmp_path / "mask.png", np.full((30, 20), 255, np.uint8))
    assert ImageTransform(8).mask(upright, path).min() == 1
    with pytest.raises(UserError, match=r"the mask is 30x20 but its image .* is 20x30"):
        ImageTransform(8).mask(save(tmp_path / "raw_mask.png", np.zeros((20, 30), np.uint8)), path)


@pytest.mark.parametrize("transform", [ImageTransform(24), ImageTransform(16, fit="crop", resize=24)])
def test_mask_and_image_share_their_geometry(tmp_path, transform):
    mask = np.zeros((48, 72), np.uint8)
    mask[10:30, 20:60] = 255
    mask_path, image_path = save(tmp_path / "m.png", mask), save(tmp_path / "i.png", mask)
    result = transform.mask(mask_path, image_path)
    assert result.dtype == torch.uint8
    assert result.shape == (transform.size, transform.size)
    assert set(result.unique().tolist()) == {0, 1}
    # Away from the edge, which bicubic sampling blurs, both say the same.
    bright = transform.raw(image_path)[..., 0].int()
    sure = (bright < 5) | (bright > 250)
    assert sure.float().mean() > 0.7
    assert torch.equal(result[sure].bool(), bright[sure] > 250)


def test_no_mask_is_all_normal(tmp_path):
    mask = ImageTransform(5).mask(None, tmp_path / "never_opened.png")
    assert torch.equal(mask, torch.zeros(5, 5, dtype=torch.uint8))


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
def test_damaged_files_are_named(tmp_path, photo, suffix):
    good = tmp_path / f"good.{suffix}"
    Image.open(photo).save(good)
    content = good.read_bytes()
    for name, damaged in {"cut": content[: len(content) // 2], "empty": b"", "text": b"hello" * 9}.items():
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(damaged)
        with refusal("cannot be read as an image") as caught:
            ImageTransform(8).image(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="no such image file"):
        ImageTransform(8).image(tmp_path / f"gone.{suffix}")


def test_flipped_bytes_never_escape_as_another_exception(tmp_path, photo):
    rng, content = np.random.default_rng(0), bytearray(photo.read_bytes())
    refused = 0
    for _ in range(100):
        damaged = content.copy()
        damaged[int(rng.integers(len(damaged) // 4))] ^= int(rng.integers(1, 256))
        (tmp_path / "flipped.png").write_bytes(damaged)
        try:
            ImageTransform(8).image(tmp_path / "flipped.png")
        except UserError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("shape", [(9, 13), (9, 13, 3)])
def test_one_channel_is_what_pillow_calls_grey(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = ImageTransform(9, 9, fit="crop", mean=(0.5,), std=(0.25,), channels=1).image(tmp_path / "a.png")
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    assert image.shape == (1, 9, 9)
    assert np.allclose(image[0].numpy(), (grey[:, 2:11] / 255 - 0.5) / 0.25, atol=1e-6)


def test_fingerprint_tells_every_field_apart():
    variants = [
        ImageTransform(224),
        ImageTransform(256),
        ImageTransform(224, 256, fit="crop"),
        ImageTransform(224, mean=(0.5, 0.5, 0.5)),
        ImageTransform(224, std=(0.5, 0.5, 0.5)),
        ImageTransform(224, mean=(0.5,), std=(0.5,), channels=1),
    ]
    assert len({transform.fingerprint for transform in variants}) == len(variants)
    same = ImageTransform(224, mean=list(IMAGENET_MEAN), std=list(IMAGENET_STD))
    assert same == ImageTransform(224)
    assert hash(same) == hash(ImageTransform(224))
    assert same.fingerprint == ImageTransform(224).fingerprint
    assert pickle.loads(pickle.dumps(same)) == same


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size=0"),
        ({"size": 224, "fit": "crop", "resize": 200}, "image.resize=200 must be at least 224"),
        ({"size": 8, "mean": (0.5, 0.5)}, "one number or 3 each"),
        ({"size": 8, "channels": 1}, "one number each"),
        ({"size": 8, "channels": 2}, "channels=2: give 3, or 1"),
        ({"size": 8, "std": (1, 1, 0)}, "std above 0"),
        ({"size": [16]}, r"image.size=\[16\] must be two whole numbers"),
        ({"size": [16, 0]}, "must be two whole numbers"),
        ({"size": [16, 8.5]}, "must be two whole numbers"),
        ({"size": [16, 24], "fit": "crop", "resize": 32}, "image.resize=32 is for square crops"),
        ({"size": 24, "fit": "pad", "resize": 32}, "image.resize=32 belongs to image.fit=crop, not to pad"),
        ({"size": 24, "fit": "crop", "resize": 9000}, r"image.resize=9000 must be in \[1, 8192\]"),
        ({"size": 24, "fit": "stretch"}, "image.fit=stretch: give squeeze, pad, crop"),
    ],
)
def test_bad_parameters_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        ImageTransform(**fields)


@pytest.mark.parametrize("brightest", [4095, 255])
def test_images_of_few_bits_stored_in_sixteen_are_told_once(tmp_path, brightest):
    pixels = np.full((4, 4), brightest, np.uint16)
    paths = [save(tmp_path / f"{i}.png", pixels) for i in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for path in paths:
            ImageTransform(4).raw(path)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"{tmp_path}: has images of 16 bits that are nearly black")


def test_eight_bits_in_a_32_bit_tiff_are_told(tmp_path):
    path = save(tmp_path / "a.tif", np.full((4, 4), 255, np.int32))
    with pytest.warns(UserWarning, match="nearly black"):
        ImageTransform(4).raw(path)


def test_sixteen_bits_are_scaled_to_eight_without_a_warning(tmp_path, recwarn):
    values = np.array([[0, 128, 129, 65535], [257, 385, 386, 32768]], np.uint16)
    raw = ImageTransform(4, resize=None).raw(save(tmp_path / "a.png", values.repeat(2, 0)))
    assert raw[::2, :, 0].tolist() == np.rint(values / 257).tolist()
    assert not recwarn.list


def test_oblong_images_are_squeezed_to_height_and_width(photo):
    expected = np.asarray(Image.open(photo).resize((30, 10), Image.Resampling.BICUBIC))
    assert np.array_equal(ImageTransform([10, 30]).raw(photo).numpy(), expected)
    assert ImageTransform([10, 30]).image(photo).shape == (3, 10, 30)


@pytest.mark.parametrize(("shape", "scaled"), [((10, 30), (15, 10)), ((30, 15), (15, 10))])
def test_oblong_padding_keeps_the_whole_image_in_the_middle(photo, shape, scaled):
    raw = ImageTransform(shape, fit="pad").raw(photo).numpy()
    left, top = (shape[1] - scaled[0]) // 2, (shape[0] - scaled[1]) // 2
    expected = np.zeros((*shape, 3), np.uint8)
    expected[top : top + scaled[1], left : left + scaled[0]] = np.asarray(
        Image.open(photo).resize(scaled, Image.Resampling.BICUBIC)
    )
    assert np.array_equal(raw, expected)


def test_oblong_crops_keep_the_centre(photo):
    # 60 x 40 becomes 30 x 20, whose rows 5 to 15 remain.
    expected = np.asarray(Image.open(photo).resize((30, 20), Image.Resampling.BICUBIC))[5:15]
    assert np.array_equal(ImageTransform([10, 30], fit="crop").raw(photo).numpy(), expected)


def test_oblong_masks_follow_their_images(photo, tmp_path):
    marked = np.zeros((40, 60), np.uint8)
    marked[:20, :30] = 255
    mask = ImageTransform([10, 30]).mask(save(tmp_path / "mask.png", marked), photo)
    assert mask.shape == (10, 30)
    assert mask[:5, :15].all()
    assert mask.sum() == 75
    assert ImageTransform([10, 30]).mask(None, photo).shape == (10, 30)


def test_two_equal_sides_are_one():
    assert ImageTransform([16, 16]).fingerprint == ImageTransform(16).fingerprint
    assert ImageTransform([16, 24]).fingerprint == ImageTransform((16, 24)).fingerprint


@pytest.mark.parametrize("sides", [(600, 1), (1, 600)])
def test_a_narrow_image_that_its_crop_would_make_huge_is_refused(tmp_path, monkeypatch, sides):
    path = tmp_path / "line.png"
    Image.new("RGB", sides).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    crop = ImageTransform(32, fit="crop")
    for read in (crop.image, crop.raw, lambda path: crop.mask(path, path)):
        with pytest.raises(UserError, match=r"line.png: \d+x\d+ pixels are too narrow for image.fit=crop"):
            read(path)
    with pytest.raises(UserError, match=r"^the image: "):
        crop.tensor(Image.new("RGB", sides))
    assert ImageTransform(32, fit="pad").image(path).shape == (3, 32, 32)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_that_is_read_once_is_what_is_seen_and_what_is_shown(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    transform = ImageTransform(8, fit="pad", mean=(0.4,), std=(0.2,), channels=channels)
    seen, shown = transform.tensor_and_shown(image)
    assert torch.equal(seen, transform.tensor(image))
    assert torch.equal(shown, transform.shown(image))

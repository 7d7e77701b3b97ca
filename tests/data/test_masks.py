"""Masks: which pixels a file marks, whatever it is coded as, and what is refused or told."""

from io import BytesIO
from itertools import product

import numpy as np
import pytest
from helpers.images import pillow, tiff
from helpers.pictures import PILLOW_13
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import LeftOut
from lit_fedad.data.masks import find_masks, mask_lines, measure, read_marks, resized_marks
from lit_fedad.data.transform import ImageTransform

pytest.importorskip("tifffile")

MARKED = np.zeros((32, 48), bool)
MARKED[5:19, 11:30] = True
ONE = MARKED.astype(np.uint8)
FULL = ONE * 255


def palette(*colours, indices=ONE):
    image = Image.fromarray(indices).convert("P")
    image.putdata(indices.ravel().tolist())
    image.putpalette([value for colour in colours for value in colour])
    return image


def rgba(colour, opacity):
    return np.dstack([colour] * 3 + [opacity])


def jpeg_decoded():
    return np.asarray(Image.open(BytesIO(pillow(FULL, "JPEG", quality=60))))


@pytest.fixture
def image(tmp_path):
    Image.fromarray(np.full((32, 48, 3), 90, np.uint8)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


READ = {
    "0 and 255": pillow(FULL),
    "0 and 1": pillow(ONE),
    "one bit": pillow(MARKED),
    "16 bit": pillow(ONE.astype(np.uint16)),
    "16 bits of colour": tiff(np.dstack([FULL.astype(np.uint16) * 257] * 3), photometric="rgb"),
    "32 bit": tiff(ONE.astype(np.int32)),
    "float": tiff(ONE.astype(np.float32)),
    "red": pillow(np.dstack([FULL, 0 * FULL, 0 * FULL])),
    "palette of VOC": pillow(palette((0, 0, 0), (128, 0, 0))),
    "opaque": pillow(rgba(FULL, np.full_like(FULL, 255))),
    "seen marks alone": pillow(rgba(FULL, FULL)),
    "regions by number": pillow(ONE * (1 + np.arange(48) // 2).astype(np.uint8)),
    "many regions": pillow(ONE * (1 + 5 * np.arange(48)).astype(np.uint8)),
    "JPEG": pillow(FULL, "JPEG", quality=60),
    "JPEG in a colour of VOC": pillow(np.dstack([ONE * 128, 0 * ONE, 0 * ONE]), "JPEG", quality=75),
    "lossy WebP": pillow(FULL, "WEBP", quality=60),
    "lossless WebP": pillow(np.dstack([ONE] * 3), "WEBP", lossless=True),
    "JPEG in TIFF": pillow(FULL, "TIFF", compression="jpeg", quality=60),
    "16 bit white is zero": tiff(65535 - FULL.astype(np.uint16) * 257, photometric="miniswhite"),
    "white is zero": tiff(255 - FULL, photometric="miniswhite"),
    "GIF": pillow(FULL, "GIF"),
    "CMYK": pillow(Image.fromarray(np.dstack([FULL] * 3)).convert("CMYK"), "TIFF"),
    "CMYK in JPEG": pillow(Image.fromarray(np.dstack([FULL] * 3)).convert("CMYK"), "JPEG", quality=90),
}
if PILLOW_13:  # older ones cannot read what they write
    READ["YCbCr"] = pillow(Image.fromarray(np.dstack([FULL] * 3)).convert("YCbCr"), "TIFF")


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("called", ["mask.png", "mask.jpg"])
def test_the_same_pixels_are_marked(image, tmp_path, name, called):
    (tmp_path / called).write_bytes(READ[name])
    marks = read_marks(tmp_path / called, image).pixels
    wrong = marks != MARKED
    # What is coded with loss may differ at the edge.
    assert wrong.sum() <= (0.03 * MARKED.sum() if "J" in name or "lossy" in name else 0)


@pytest.mark.parametrize("shape", [(32, 48), (32, 48, 3)])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_mask_may_mark_its_whole_image(image, tmp_path, shape, form):
    (tmp_path / "mask.png").write_bytes(pillow(np.full(shape, 255, np.uint8), form))
    assert read_marks(tmp_path / "mask.png", image).pixels.all()


@pytest.mark.parametrize("values", [np.uint16, np.int32, np.float32])
def test_soft_edges_of_eight_bits_in_more_are_cut_at_half(image, tmp_path, values):
    (tmp_path / "mask.tif").write_bytes(tiff(jpeg_decoded().astype(values)))
    with pytest.warns(UserWarning, match="has masks with soft edges"):
        marks = read_marks(tmp_path / "mask.tif", image).pixels
    assert (marks != MARKED).sum() <= 0.03 * MARKED.sum()


@pytest.mark.parametrize("colours", [None, 64])
def test_soft_edges_are_cut_at_half_and_told(image, tmp_path, colours):
    decoded = Image.fromarray(jpeg_decoded())
    (decoded.quantize(colours) if colours else decoded).save(tmp_path / "mask.png")
    with pytest.warns(UserWarning, match="has masks with soft edges, or made from JPEG, such as mask.png"):
        marks = read_marks(tmp_path / "mask.png", image).pixels
    assert (marks != MARKED).sum() <= 0.03 * MARKED.sum()


def test_a_soft_mask_marks_from_exactly_half_on(image, tmp_path):
    values = FULL.copy()
    values[0, :20], values[1, :20] = np.arange(108, 128), np.arange(128, 148)
    (tmp_path / "mask.png").write_bytes(pillow(values))
    with pytest.warns(UserWarning, match="has masks with soft edges"):
        marks = read_marks(tmp_path / "mask.png", image).pixels
    assert not marks[0].any()
    assert marks[1, :20].all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pillow(ONE * 40, "JPEG"), "coded with loss, and its brightest value is"),
        (tiff(np.dstack([ONE.astype(np.uint16) * 200] * 3), photometric="rgb"), "has 16 bits of colour"),
        (
            tiff(np.dstack([regions := ONE.astype(np.uint16) * 300] * 3), photometric="rgb"),
            "small values are lost",
        ),
        (b"P6 48 32 65535 " + np.dstack([regions] * 3).astype(">u2").tobytes(), "has 16 bits of colour"),
        (pillow(ONE * 40 + 60), r"no pixel of the mask is 0 \(black\)"),
        (pillow(palette((224, 224, 192), (255, 255, 255))), "palette has no black for what is normal"),
        (pillow(palette((0, 0, 0), (0, 0, 0))), "palette has no black for what is normal, or nothing else"),
        (pillow(rgba(0 * FULL, FULL)), "marks by transparency"),
        (pillow(rgba(255 + 0 * FULL, FULL)), "mark other pixels than its transparency"),
        (tiff(-ONE.astype(np.int32)), "values below 0"),
        (tiff(np.where(MARKED, np.nan, 0).astype(np.float32)), "no numbers"),
        (tiff((ONE * np.linspace(0.1, 1, 48)).astype(np.float32)), "the mask holds fractions"),
        (pillow(np.dstack([FULL * 0 + 255, 255 - FULL, 255 - FULL])), "colours and no black"),
        (tiff(np.stack([ONE] * 2), photometric="minisblack"), "several pages or frames"),
        (pillow(FULL[:, :40]), "the mask is 40x32 but its image"),
        (pillow(FULL.T.copy()), "the mask is 32x48 but its image"),
    ],
)
def test_a_mask_that_cannot_be_understood_is_one_line(image, tmp_path, content, said):
    (tmp_path / "mask.png").write_bytes(content)
    with refusal(said) as caught:
        read_marks(tmp_path / "mask.png", image)
    assert "mask.png" in str(caught.value)


def test_small_defects_survive_at_every_place():
    """A pixel is marked where any share of it is: against the overlap of intervals, in fractions."""
    for place in range(61):
        marked = np.zeros((64, 61), bool)
        marked[63 - place, place] = True
        small = resized_marks(marked, 7, 9)
        columns = [9 * place < 61 * (i + 1) and 61 * i < 9 * (place + 1) for i in range(9)]
        rows = [7 * (63 - place) < 64 * (i + 1) and 64 * i < 7 * (64 - place) for i in range(7)]
        assert np.array_equal(small, np.outer(rows, columns))
    assert np.array_equal(resized_marks(MARKED, 64, 96), MARKED.repeat(2, 0).repeat(2, 1))


def facts(tmp_path, *pixels, **options):
    masks = {}
    for number, marked in enumerate(pixels):
        Image.fromarray(marked.astype(np.uint8) * 255).save(tmp_path / f"{number}.png")
        Image.new("L", marked.shape[::-1], 90).save(tmp_path / f"image{number}.png", **options)
        transform = ImageTransform(8)
        path = tmp_path / f"{number}.png"
        masks[path] = transform.measured_mask(path, tmp_path / f"image{number}.png")[1]
    return mask_lines(masks, (8, 8))


def test_what_masks_say_together_is_told(tmp_path):
    dot = np.zeros((32, 32), bool)
    dot[3, 3] = dot[20:22, 20:22] = dot[10:16, 3:10] = True
    assert facts(tmp_path, MARKED, MARKED) == []
    (line,) = facts(tmp_path, dot, MARKED)
    assert line.startswith("2 of 4 defects are smaller than a pixel of 8x8")
    (line,) = facts(tmp_path, MARKED, 0 * MARKED)
    assert line.startswith(f"1 of 2 masks, such as {tmp_path / '1.png'}, mark no pixel")
    for masks, number in (((~MARKED, ~MARKED), 2), ((MARKED, MARKED, ~MARKED), 1)):
        (line,) = facts(tmp_path, *masks)
        assert line.startswith(f"{number} of {len(masks)} masks")
        assert line.endswith("are they inverted?")
    (line,) = facts(tmp_path, 0 * MARKED)  # of one mask alone nothing follows
    assert line.startswith(f"1 of 1 masks, such as {tmp_path / '0.png'}, mark no pixel")
    for corner in product((0, -1), (0, -1)):
        most = ~MARKED
        most[corner] = False
        assert facts(tmp_path, most, most) == []
    frame = np.pad(np.zeros((30, 46), bool), 1, constant_values=True)
    assert facts(tmp_path, frame, frame) == []
    square = np.zeros((32, 32), bool)
    square[4:8, 4:8] = True
    assert facts(tmp_path, square, square) == []  # each is as large as a pixel of 8x8
    (line,) = facts(tmp_path, MARKED, MARKED | True)
    assert "mark their whole image" in line
    for marked, said in ((0 * MARKED, "none of the 2 masks"), (MARKED | True, "each of the 2 masks")):
        with pytest.raises(UserError, match=said):
            facts(tmp_path, marked, marked)
    exif = Image.Exif()
    exif[0x0112] = 3
    (line,) = facts(tmp_path, MARKED, MARKED, exif=exif)
    assert "not turned as EXIF turns their images" in line


def test_a_crop_that_leaves_a_defect_out_is_told(tmp_path):
    marked = np.zeros((32, 64), bool)
    marked[:, :3] = True
    Image.fromarray(marked.astype(np.uint8) * 255).save(tmp_path / "0.png")
    mask, found = ImageTransform(8, fit="crop").measured_mask(tmp_path / "0.png", tmp_path / "0.png")
    assert not mask.any()
    (line,) = mask_lines({tmp_path / "0.png": found}, (8, 8))
    assert "mark nothing in what image.fit=crop keeps" in line
    assert measure(read_marks(tmp_path / "0.png", tmp_path / "0.png"), 1, 10**6).regions == 0


def test_each_image_has_a_mask_of_its_own(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    images.mkdir()
    masks.mkdir()
    for name in ("000.png", "000.jpg", "001.png"):
        (images / name).touch()
    paths = sorted(images.iterdir())

    def found(*names):
        for path in masks.iterdir():
            path.unlink()
        for name in names:
            (masks / name).touch()
        return [path.name for path in find_masks(masks, paths, LeftOut())]

    assert found("000.jpg_mask.png", "000.png_mask.PNG", "001_mask.bmp") == [
        "000.jpg_mask.png",
        "000.png_mask.PNG",
        "001_mask.bmp",
    ]
    with pytest.raises(
        UserError, match=r"000\.jpg: has 2 masks, .*000_mask\.bmp and 000_mask\.png; keep one"
    ):
        found("000_mask.png", "000_mask.bmp", "001_mask.png")
    with pytest.raises(
        UserError, match=r"001_mask\.png \(1 of 3 missing\); .* names .*: 001_label\.png fits no"
    ):
        found("000.jpg_mask.png", "000.png_mask.png", "001_label.png")
    with pytest.raises(UserError, match=r"000_mask\.png: is the mask of two images, 000\.jpg and 000\.png"):
        found("000_mask.png", "001_mask.png")
    left = LeftOut()
    (masks / "002_mask.png").touch()
    find_masks(masks, [images / "001.png"], left)
    assert left.line(tmp_path).endswith(f"masks of no image (2, first {masks / '000_mask.png'})")

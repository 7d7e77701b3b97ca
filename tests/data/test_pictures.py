"""Pictures: one picture in every coding, mode, depth and orientation is the same picture at every door."""

import struct
import zlib
from contextlib import nullcontext
from io import BytesIO

import numpy as np
import pytest
import torch
from helpers.images import pillow, tiff
from helpers.pictures import files_of, picture
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core import extras
from lit_fedad.core.errors import UserError
from lit_fedad.data import tiff_codecs
from lit_fedad.data.masks import marked_pixels
from lit_fedad.data.pictures import caution, decode_upload, open_picture, read_picture, sniff
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.uploads import FORMATS, RefusedError, read_upload

tifffile = pytest.importorskip("tifffile")

ROWS, COLUMNS = np.mgrid[:24, :32]
GREY = (4 * ROWS + 5 * COLUMNS).astype(np.uint8)
COLOUR = np.dstack([GREY, GREY[::-1], 255 - GREY])
WIDE = GREY.astype(np.uint16) * 257
WIDE_COLOUR = COLOUR.astype(np.uint16) * 257


def black_and_white():
    """A BMP file with a byte a pixel and a palette of two colours."""
    image = Image.frombytes("P", GREY.shape[::-1], (GREY > 99).tobytes())
    image.putpalette([0, 0, 0, 255, 255, 255])
    return pillow(image, "BMP")


@pytest.mark.parametrize("page", [None, 0, 1])
@pytest.mark.parametrize("colour", [False, True], ids=["grey", "colour"])
def test_one_picture_is_read_alike_from_every_file_and_upload(tmp_path, colour, page):
    """Every format, mode, depth, orientation and page, to the last digit."""
    pixels, path = picture(0, colour), tmp_path / "picture.png"  # called alike, whatever they are
    expected = pixels if colour else np.dstack([pixels] * 3)
    transform = ImageTransform(expected.shape[:2], page=page)
    files = files_of(pixels, page)
    assert len({name.rpartition(" ")[2] for name in files}) == 8  # orientations
    for name, content in files.items():
        path.write_bytes(content)
        assert np.array_equal(transform.raw(path), expected), name
        if sniff(content) in FORMATS:
            assert np.array_equal(read_upload(content, 10_000, page), expected), name


def test_grey_that_was_multiplied_by_its_opacity_is_read(tmp_path):
    """As GIMP writes TIFF; its marks are those of a mask too."""
    opacity = np.full_like(GREY, 128)
    path = tmp_path / "picture.tif"
    path.write_bytes(tiff(np.stack([GREY // 2, opacity], -1), photometric=1, extrasamples=[1]))
    shown = np.asarray(read_picture(path)).astype(int)
    assert np.abs(shown - (GREY // 2 + 127)[..., None]).max() <= 2
    marks = np.where(GREY > 99, 255, 0).astype(np.uint8)
    path.write_bytes(tiff(np.stack([marks, np.full_like(marks, 255)], -1), photometric=1, extrasamples=[1]))
    assert (marked_pixels(open_picture(path), path) == (marks > 0)).all()


@pytest.mark.parametrize(("mode", "far"), [("RGB", 6), ("CMYK", 8)])
def test_jpeg_moves_smooth_colours_by_a_few_values(tmp_path, mode, far):
    path = tmp_path / "picture.png"
    path.write_bytes(pillow(COLOUR, "JPEG", mode, quality=95, subsampling=0))
    transform = ImageTransform((24, 32), mean=(0,), std=(1,))
    assert np.abs(transform.raw(path).numpy().astype(int) - COLOUR).max() <= far
    assert torch.equal((transform.image(path) * 255).round().permute(1, 2, 0), transform.raw(path).float())


@pytest.mark.parametrize("shown", [GREY // 16, GREY // 4], ids=["12 bits", "14 bits"])
@pytest.mark.parametrize("form", ["PNG", "TIFF", "TIFF colour"])
def test_few_bits_stored_in_sixteen_are_told(tmp_path, shown, form):
    wide = shown.astype(np.uint16) * 256
    wide = np.minimum(wide, 16383)
    content = tiff(np.dstack([wide] * 3), photometric="rgb") if "colour" in form else pillow(wide, form)
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.warns(UserWarning, match="has images of 16 bits that are nearly black or dark"):
        read_picture(tmp_path / "a.tif")
    assert "nearly black" in read_upload(content, 10_000).info["caution"]


def test_twelve_bits_in_sixteen_of_a_portable_pixmap_are_told():
    content = b"P6 32 24 65535 " + (COLOUR.astype(np.uint16) * 16).astype(">u2").tobytes()
    assert "nearly black" in caution(decode_upload(content, "PPM", 10_000))


@pytest.mark.parametrize(("bits", "scale"), [(1, 255), (2, 85), (4, 17)])
def test_the_transparent_grey_of_few_bits_becomes_white(tmp_path, bits, scale):
    values = np.arange(32, dtype=np.uint8).reshape(4, 8) % 2**bits

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = np.unpackbits(values[..., None], axis=2)[..., -bits:].reshape(4, -1)
    header = struct.pack(">IIBBBBB", 8, 4, bits, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + np.packbits(row).tobytes() for row in rows))
    chunks = [(b"IHDR", header), (b"tRNS", b"\0\1"), (b"IDAT", pixels), (b"IEND", b"")]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks))
    shown = np.asarray(read_picture(tmp_path / "a.png"))[..., 0]
    assert np.array_equal(shown, np.where(values == 1, 255, values * scale))


def test_eight_bits_in_sixteen_of_colour_are_told_though_nothing_is_left_of_them():
    picture = decode_upload(tiff(COLOUR.astype(np.uint16), photometric="rgb"), "TIFF", 10_000)
    assert caution(picture)
    # A dark picture of 8 bits
    assert caution(decode_upload(pillow(COLOUR // 32, "PNG"), "PNG", 10_000)) is None


def test_twelve_bits_that_the_file_declares_are_the_whole_range(tmp_path):
    from PIL import TiffImagePlugin

    values = np.array([[0, 4095], [2048, 16]], np.uint16)
    low, high = values.ravel()[::2], values.ravel()[1::2]
    packed = np.stack([low >> 4, (low & 15) << 4 | high >> 8, high & 255], 1).astype(np.uint8)
    header = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in {256: 2, 257: 2, 258: 12, 259: 1, 262: 1, 277: 1, 278: 2, 279: packed.nbytes}.items():
        header[tag] = value
    header[273] = 0  # behind the header
    file = BytesIO(b"II*\0\x08\0\0\0")
    file.seek(0, 2)
    header.save(file)
    file.write(packed.tobytes())
    (tmp_path / "a.tif").write_bytes(file.getvalue())
    assert np.asarray(read_picture(tmp_path / "a.tif"))[..., 0].tolist() == [[0, 255], [128, 1]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tiff(np.stack([GREY] * 2), photometric="minisblack"), "choose one in training, by image.page"),
        (tiff(np.stack([COLOUR] * 2), photometric="rgb"), "several pages or frames"),
        (pillow(GREY, "PNG", save_all=True, append_images=[Image.fromarray(255 - GREY)]), "several pages or frames"),
        (pillow(GREY, "GIF", save_all=True, append_images=[Image.fromarray(255 - GREY)]), "several pages or frames"),
        (pillow(COLOUR, "WEBP", save_all=True, append_images=[Image.fromarray(255 - COLOUR)]), "several pages"),
        (tiff(GREY.astype(np.float32)), "float or 32-bit"),
        (tiff(GREY.astype(np.int16)), "16-bit values are signed"),
        (tiff(GREY.astype(np.int8)), "8-bit values are signed"),
        (tiff(WIDE.astype(np.uint32) * 257), "float or 32-bit"),
        (tiff(np.moveaxis(WIDE_COLOUR, 2, 0), photometric="rgb"), "16 bits lie in one plane after the other"),
        (black_and_white(), "BMP of two colours with 8 bits a pixel"),
        (pillow(np.dstack([COLOUR, 0 * GREY]), "PNG"), "all its pixels are transparent"),
        (pillow(WIDE, "PNG", transparency=1000), "one value of its 16 bits is transparent"),
        (b"<html>", "is text, a web page or SVG"),
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"\0\0\0\x18ftypheic", "is HEIC or video"),
        (b"\0" * 100, "is of no format that is read"),
        (tiff(COLOUR.astype(np.float32), photometric="rgb"), "TIFF of a kind that is not read"),
    ],
)  # fmt: skip
def test_what_is_not_one_picture_is_one_line(tmp_path, content, said):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with refusal(said) as caught:
        read_picture(path)
    assert str(path) in str(caught.value)
    if sniff(content) in FORMATS:
        with pytest.raises(RefusedError, match=said):
            read_upload(content, 10_000)


PAGES = {
    "TIFF": tiff(np.stack([255 - GREY, GREY]), photometric="minisblack"),
    **{
        form: pillow(255 - GREY, form, save_all=True, append_images=[Image.fromarray(GREY)], **options)
        for form, options in [("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True})]
    },
}


@pytest.mark.parametrize("form", PAGES)
def test_a_page_is_chosen_at_every_door_with_its_mask(tmp_path, form):
    path, mask, content = tmp_path / "a.png", tmp_path / "a_mask.png", PAGES[form]
    path.write_bytes(content)
    mask.write_bytes(pillow(GREY, "PNG"))
    transform = ImageTransform((24, 32), page=1)
    expected = np.dstack([GREY] * 3)
    assert np.array_equal(transform.raw(path), expected)
    assert np.array_equal(transform.mask(mask, path), GREY > 0)  # of one page, whatever the image's
    assert np.array_equal(transform.mask(path, path), GREY > 0)
    if form in FORMATS:
        assert np.array_equal(read_upload(content, 10_000, 1), expected)
    assert np.array_equal(ImageTransform((24, 32), page=0).raw(path), 255 - expected)
    for file, page in ((path, 2), (mask, 1)):
        with pytest.raises(UserError, match=f"{file.name}: .*has no page {page}; image.page counts from 0"):
            read_picture(file, page)


def test_the_larger_page_behind_a_small_one_is_refused_before_it_is_decoded():
    file = BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(GREY[:4, :4], photometric="minisblack")
        writer.write(GREY, photometric="minisblack")
    with pytest.raises(OverflowError, match="32x24 pixels, and at most 100"):
        decode_upload(file.getvalue(), "TIFF", 100, 1)


@pytest.mark.parametrize(("pages", "rows", "refused"), [(2, 8, False), (3, 8, True), (1, 1, True)])
def test_a_tiff_of_more_pages_or_pieces_than_any_is_refused(monkeypatch, pages, rows, refused):
    """Twenty megabytes of them took minutes, or two gigabytes."""
    monkeypatch.setattr(tiff_codecs, "_MAX_PAGES", 2)
    monkeypatch.setattr(tiff_codecs, "_MAX_PIECES", 4)
    file, one = BytesIO(), Image.fromarray(picture(0, False))
    more = {"save_all": True, "append_images": [one] * (pages - 1)} if pages > 1 else {}
    one.save(file, "TIFF", tiffinfo={278: rows * one.height // 8}, **more)
    said = "has more than 2 pages, or a page in more than 4 pieces"
    with pytest.raises(ValueError, match=said) if refused else nullcontext():
        decode_upload(file.getvalue(), "TIFF", None, 0 if pages > 1 else None)


def test_a_jpeg_of_more_scans_than_any_is_refused(tmp_path):
    """Each is forty bytes, and a pass over all pixels: twenty megabytes of them took half an hour."""
    Image.fromarray(picture(0, False)).save(tmp_path / "a.jpg", progressive=True)
    content = (tmp_path / "a.jpg").read_bytes()
    last = content.rindex(b"\xff\xda")
    (tmp_path / "a.jpg").write_bytes(content[:last] + content[last:-2] * 500 + content[-2:])
    with pytest.raises(UserError, match="drawn in more than 500 scans"):
        read_picture(tmp_path / "a.jpg")


@pytest.mark.parametrize(
    "shown", [GREY, COLOUR, WIDE, WIDE_COLOUR], ids=["grey", "colour", "16 bit", "16 bit colour"]
)
def test_compressions_that_pillow_lacks_are_read_with_their_extra(tmp_path, shown):
    pytest.importorskip("imagecodecs")
    path, kind = tmp_path / "a.tif", "rgb" if shown.ndim == 3 else "minisblack"
    with tifffile.TiffWriter(path) as file:
        for pixels in (shown, shown[::-1]):
            file.write(pixels, photometric=kind, compression="jpeg2000")
    expected = COLOUR if shown.ndim == 3 else np.dstack([GREY] * 3)
    assert np.array_equal(np.asarray(read_picture(path, 0)), expected)
    assert np.array_equal(np.asarray(read_picture(path, 1)), expected[::-1])
    with pytest.raises(UserError, match="several pages"):
        read_picture(path)


def test_compressions_that_pillow_lacks_name_their_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    content = tiff(GREY, byteorder="<").replace(
        b"\x03\x01\x03\0\x01\0\0\0\x01\0", b"\x03\x01\x03\0\x01\0\0\0\x98\x87"
    )
    path.write_bytes(content)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"TIFF of compression 34712 needs .* pip install 'lit-fedad\[codecs\]'"
    ):
        read_picture(path)
    with pytest.raises(RefusedError, match="is TIFF of a kind that is not read"):
        read_upload(content, 10_000)


def test_small_copies_in_a_tiff_are_no_pages(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(COLOUR, photometric="rgb")
        file.write(COLOUR[::2, ::2], photometric="rgb", subfiletype=1)
        file.write(COLOUR[::-1], photometric="rgb")
    assert np.array_equal(np.asarray(read_picture(tmp_path / "a.tif", 0)), COLOUR)
    assert np.array_equal(np.asarray(read_picture(tmp_path / "a.tif", 1)), COLOUR[::-1])
    # As camera raw files begin
    tifffile.imwrite(tmp_path / "raw.tif", COLOUR, photometric="rgb", subfiletype=1)
    with pytest.raises(UserError, match="its first page is a small copy"):
        read_picture(tmp_path / "raw.tif")
    tifffile.imwrite(
        tmp_path / "a.dng", COLOUR, photometric="rgb", extratags=[(50706, 1, 4, (1, 4, 0, 0), True)]
    )
    with pytest.raises(UserError, match="is a camera's raw file"):
        read_picture(tmp_path / "a.dng")


def test_the_preview_in_a_cameras_jpeg_is_no_second_picture(tmp_path):
    Image.fromarray(COLOUR).save(
        tmp_path / "a.jpg", "MPO", save_all=True, append_images=[Image.fromarray(COLOUR[::2, ::2])]
    )
    assert open_picture(tmp_path / "a.jpg").image.size == (32, 24)

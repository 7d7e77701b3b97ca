"""Files that would hang the program or fill its memory."""

import io
import json
import os
import socket
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.anomaly_sets import medianomaly
from lit_fedad.data.feature_cache import FeatureCache
from lit_fedad.data.folders import folders
from lit_fedad.data.packed import packed, packed_images
from lit_fedad.data.partition import Partition
from lit_fedad.data.path_lists import path_lists
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform
from lit_fedad.data.vision import read_coco

TRANSFORM = ImageTransform(8)
DEEP = "[" * 100_000


def pipe(path):
    os.mkfifo(path)


def bound_socket(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


def endless_device(path):
    path.symlink_to("/dev/zero")


@pytest.fixture(params=[pipe, bound_socket, endless_device])
def special(request, tmp_path, monkeypatch):
    """A file that is no file, in a folder of images."""
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    request.param((tmp_path / "a.png").relative_to(tmp_path))
    return tmp_path / "a.png"


def test_a_list_of_images_that_is_none_is_named(special):
    with pytest.raises(UserError, match=r"a\.png: is no regular file"):
        path_lists(special)
    special.unlink()
    special.write_text("[]")
    with pytest.raises(UserError, match=r"a\.png: is no list of images with columns"):
        path_lists(special)


def test_what_is_no_regular_file_is_refused_where_images_are_read(special):
    with pytest.raises(UserError, match=r"holds no image .* skipped .*pipe.* \(1, first .*a\.png"):
        folders(special.parent, ["."], ["./"], [])
    for read in (TRANSFORM.image, TRANSFORM.raw, lambda path: TRANSFORM.mask(path, path)):
        with pytest.raises(UserError, match="a.png: is no regular file"):
            read(special)
    with pytest.raises(UserError, match="a.png: is no regular file"):
        FeatureCache(special.parent / "cache", TRANSFORM, lambda images: [images], "x").fill(
            [Sample(special, "p")]
        )


def test_what_is_no_regular_file_is_refused_as_an_archive_or_partition(special):
    for read in (packed_images, Partition.load):
        with pytest.raises(UserError, match="a.png: is no"):
            read(special)


def bomb(width, height):
    """A PNG of a few bytes that claims to be large."""

    def chunk(name, content):
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def test_an_image_above_pillows_limit_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    path.write_bytes(bomb(13_000, 13_000))
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match=r"large\.png.*13000x13000 pixels, and at most 89478485 are read"):
        TRANSFORM.image(path)


def test_the_limit_of_pixels_is_pillows_own(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.new("L", (20, 20)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 399)
    with pytest.raises(UserError, match="at most 399 are read"):
        TRANSFORM.image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert TRANSFORM.image(path).shape == (3, 8, 8)


def test_an_image_above_the_limit_is_refused_inside_an_archive(tmp_path):
    encoded = np.frombuffer(bomb(13_000, 13_000), np.uint8)
    np.savez(tmp_path / "a.npz", jpeg=encoded, offsets=[0, len(encoded)], labels=[0])
    with pytest.raises(UserError, match="image 0 of key 'jpeg' cannot be decoded"):
        packed_images(tmp_path / "a.npz")


def npy(shape, content=b"\0" * 64):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue() + content


@pytest.mark.parametrize("shape", [(400_000_000_000, 1, 1), (2**62, 2**62, 1), (2**40, 0, 2**40)])
def test_an_archive_whose_header_claims_terabytes_is_refused_before_memory_is_taken(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", npy(shape))
    with pytest.raises(UserError, match=r"a\.npz: key 'images' is"):
        packed_images(tmp_path / "a.npz")


def test_a_single_array_that_claims_terabytes_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(npy((400_000_000_000,)))
    with pytest.raises(UserError, match=r"a\.npz: is not a readable"):
        packed_images(tmp_path / "a.npz")


def test_archives_of_equal_pixels_are_no_bombs(tmp_path):
    images = np.zeros((40, 64, 64, 3), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", images=images, labels=np.zeros(40, int))
    assert packed(tmp_path, "a.npz", "a.npz").train_images.shape == (40, 3, 64, 64)


def test_deeply_nested_json_is_refused_in_one_line(tmp_path):
    for name, read in (
        ("partition.json", Partition.load),
        ("annotations.json", read_coco),
        ("data.json", lambda path: medianomaly(path.parent)),
    ):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(UserError, match=f"{name}: .*nested too deeply"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "image",
    [
        {"width": 10**6, "height": 10**6},
        {"width": -3, "height": 4},
        {"width": 1e3, "height": 4},
        {"width": True, "height": 4},
    ],
)
def test_annotations_of_senseless_sizes_are_refused(tmp_path, image):
    file = tmp_path / "annotations.json"
    image |= {"id": 0, "file_name": "a.png"}
    file.write_text(json.dumps({"categories": [], "annotations": [], "images": [image]}))
    with pytest.raises(UserError, match=r"annotations\.json: is no COCO annotation file"):
        read_coco(file)

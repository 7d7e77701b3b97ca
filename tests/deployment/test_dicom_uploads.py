"""DICOM files that arrive over HTTP: read as in training, and bounded before memory is taken."""

import zlib

import numpy as np
import pytest
from helpers.pictures import write_dicom

from lit_fedad.data import dicom
from lit_fedad.data.dicom import read_dicom
from lit_fedad.deployment import uploads
from lit_fedad.deployment.uploads import RefusedError, image_format, read_upload

pytest.importorskip("pydicom")

NATIVE = "1.2.840.10008.1.2.1"
HEAD = b"\0" * 128 + b"DICM"
STORED = np.arange(48, dtype=np.uint16).reshape(6, 8) * 80


def write(path, syntax=NATIVE, **words):
    """A grey file of 12 bits a pixel with a window, and further words as given."""
    write_dicom(path, STORED, 12, **{"WindowCenter": 1900, "WindowWidth": 2000, **words})
    known, other = (uid.encode() + b"\0" * (len(uid) % 2) for uid in (NATIVE, syntax))
    lengths = [b"UI" + len(uid).to_bytes(2, "little") for uid in (known, other)]
    return path.read_bytes().replace(lengths[0] + known, lengths[1] + other)


def test_it_is_read_as_in_training(tmp_path):
    path = tmp_path / "a.dcm"
    content = write(path)
    shown = read_upload(content, 48)
    assert np.array_equal(np.asarray(shown), np.asarray(read_dicom(path).convert("RGB")))
    assert np.asarray(shown).std() > 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ({"Rows": 60000, "Columns": 2}, 413, "2x60000 pixels, and at most 48"),
        ({"SamplesPerPixel": 3}, 422, "no grey image"),
        ({"NumberOfFrames": 2}, 422, "several pages or frames"),
        ({"WindowWidth": 0}, 422, "window"),
        ({"syntax": "1.2.840.10008.1.2.5"}, 422, "compressed"),
        ({"syntax": "1.2.840.10008.1.2.4.90"}, 422, "compressed"),
    ],
)
def test_what_it_may_not_be_is_one_line(tmp_path, words, status, message):
    content = write(tmp_path / "a.dcm", **words)
    with pytest.raises(RefusedError, match=message) as caught:
        read_upload(content, 48)
    assert caught.value.status == status
    assert "\n" not in caught.value.reason


def test_a_file_that_was_cut_off_is_no_image(tmp_path):
    content = write(tmp_path / "a.dcm")
    with pytest.raises(RefusedError, match="cannot be read as DICOM"):
        read_upload(content[:-20], 48)


def test_words_beside_the_pixels_are_bounded(tmp_path, monkeypatch):
    """Each is read by itself: twenty megabytes of empty ones took 19 seconds."""
    content = write(tmp_path / "a.dcm")
    monkeypatch.setattr(dicom, "_MAX_HEADER", len(content))
    read_upload(content, 48)
    empty = b"\xe1\x7f\x01\x10LO\x00\x00" * 12
    read_upload(content + empty, 48)
    with pytest.raises(RefusedError, match="holds more than its pixels"):
        read_upload(content + 2 * empty, 48)
    ahead = content.index(b"\x28\x00\x02\x00")
    with pytest.raises(RefusedError, match="cannot be read"):
        read_upload(content[:ahead] + b"\x09\x00\x01\x10LO\x00\x00" * 99 + content[ahead:], 48)


def test_words_in_the_place_of_pixels_are_not_read(tmp_path, monkeypatch):
    """As many bytes as the pixels that the file claims."""
    content = write(tmp_path / "a.dcm")
    place = content.index(b"\xe0\x7f\x10\x00")
    monkeypatch.setattr(dicom, "_MAX_HEADER", place + 8)
    with pytest.raises(RefusedError, match="holds no pixels behind its words"):
        read_upload(content[:place] + b"\x29\x00\x01\x10LO\x00\x00" * 12, 48)


def test_nothing_is_inflated(tmp_path, monkeypatch):
    """A deflated file may hold a thousand times its bytes."""
    content = write(tmp_path / "a.dcm", "1.2.840.10008.1.2.1.99")
    monkeypatch.setattr(zlib, "decompress", lambda *given: pytest.fail("inflated"))
    with pytest.raises(RefusedError, match="compressed"):
        read_upload(content, 48)


@pytest.mark.parametrize(
    ("content", "status"), [(b"", 415), (b"\0" * 200, 415), (HEAD, 422), (HEAD + b"\xff" * 99, 422)]
)
def test_noise_is_no_dicom(content, status):
    with pytest.raises(RefusedError) as caught:
        read_upload(content, 48)
    assert caught.value.status == status


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    content = write(tmp_path / "a.dcm")
    monkeypatch.setattr(uploads, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match=r"lit-fedad\[dicom\]"):
        image_format(content)
    assert image_format(b"BM" + bytes(200)) == "BMP"

"""DICOM files made here: windows by hand, and what is refused."""

from itertools import product

import numpy as np
import pytest
from helpers.pictures import write_dicom
from helpers.refusals import refusal

from lit_fedad.core import extras
from lit_fedad.core.errors import UserError
from lit_fedad.data.dicom import read_dicom, read_native_dicom
from lit_fedad.data.image_files import images_in
from lit_fedad.data.pictures import caution, open_picture
from lit_fedad.data.transform import ImageTransform

pydicom = pytest.importorskip("pydicom")

STORED = np.array([[0, 100, 200], [300, 1000, 4095]], np.uint16)


def write(path, pixels=STORED, bits=12, **words):
    """A file with further words as given."""
    write_dicom(path, pixels, bits, **words)
    return path


def shown(path):
    return np.asarray(read_dicom(path)).astype(int).tolist()


def test_without_a_window_the_stored_bits_are_the_range(tmp_path):
    expected = np.rint(STORED / 4095 * 255).astype(int).tolist()
    assert shown(write(tmp_path / "a.dcm")) == expected
    inverted = shown(write(tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1"))
    assert inverted == np.rint((1 - STORED / 4095) * 255).astype(int).tolist()
    signed = write(tmp_path / "c.dcm", np.array([[-2048, 0, 2047]], np.int16))
    assert shown(signed) == [[0, 128, 255]]


def test_sixteen_bits_without_a_window_that_come_out_flat_are_told(tmp_path):
    hounsfield = np.array([[-1000, 0, 3000]], np.int16)
    words = caution(open_picture(write(tmp_path / "a.dcm", hounsfield, bits=16)))
    assert "without a window" in words
    windowed = write(tmp_path / "b.dcm", hounsfield, bits=16, WindowCenter=40, WindowWidth=400)
    assert caution(open_picture(windowed)) is None
    assert caution(open_picture(write(tmp_path / "c.dcm"))) is None


def test_a_mask_of_one_frame_is_read_whatever_frame_of_its_image_is(tmp_path):
    write(tmp_path / "mask.dcm", 4095 * (STORED > 200).astype(np.uint16))
    mask = open_picture(tmp_path / "mask.dcm", 1, alone=True)
    assert np.array_equal(np.asarray(mask.image) > 0, STORED > 200)


def test_the_first_window_is_applied_after_rescaling(tmp_path):
    # Rescaled: -1000 ... 3095; centre 40.5, width 401: 0 at -160, 1 at 240 (PS3.3 C.11.2.1.2).
    words = {"RescaleSlope": 1, "RescaleIntercept": -1000, "WindowCenter": [40.5, 9], "WindowWidth": [401, 9]}
    pixels = np.array([[839, 840, 940, 1040, 1240, 1300]], np.uint16)
    assert shown(write(tmp_path / "a.dcm", pixels, **words)) == [[0, 0, 64, 128, 255, 255]]
    exact = {**words, "WindowCenter": 40, "WindowWidth": 400, "VOILUTFunction": "LINEAR_EXACT"}
    assert shown(write(tmp_path / "b.dcm", pixels, **exact)) == [[0, 0, 64, 128, 255, 255]]
    sigmoid = {**words, "WindowCenter": 40, "WindowWidth": 400, "VOILUTFunction": "SIGMOID"}
    assert shown(write(tmp_path / "c.dcm", np.array([[1040]], np.uint16), **sigmoid)) == [[128]]


def test_windows_are_those_of_pydicom(tmp_path):
    from pydicom.pixels import apply_windowing

    for function, (center, width) in product(("LINEAR", "LINEAR_EXACT", "SIGMOID"), ((600, 900), (300, 3))):
        path = write(tmp_path / "a.dcm", WindowCenter=center, WindowWidth=width, VOILUTFunction=function)
        file = pydicom.dcmread(path)
        theirs = apply_windowing(file.pixel_array, file) / 4095 * 255
        assert np.abs(np.asarray(read_dicom(path)) - theirs).max() <= 0.5 + 1e-6


def test_a_table_of_values_of_interest_is_applied_in_the_range_of_its_bits(tmp_path):
    table = pydicom.Dataset()
    table.LUTDescriptor = [3, 100, 10]  # three values from 100 on, of ten bits
    table.add_new("LUTData", "US", [0, 341, 1023])
    pixels = np.array([[0, 100, 101], [102, 1000, 4095]], np.uint16)
    path = write(tmp_path / "a.dcm", pixels, VOILUTSequence=[table])
    assert shown(path) == [[0, 0, 85], [255, 255, 255]]


def test_rescaling_by_a_slope_alone_moves_the_window(tmp_path):
    path = write(tmp_path / "a.dcm", RescaleSlope=2, WindowCenter=300.5, WindowWidth=401)
    assert shown(path) == [[0, 64, 191], [255, 255, 255]]


def test_other_files_are_one_line(tmp_path):
    def refused(match, path):
        with refusal(match):
            ImageTransform(4).raw(path)

    (tmp_path / "text.dcm").write_text("no DICOM")
    refused("is no DICOM file, or an old one without the letters DICM", tmp_path / "text.dcm")
    refused("several pages or frames", write(tmp_path / "a.dcm", NumberOfFrames=2))
    refused("is no grey image", write(tmp_path / "b.dcm", PhotometricInterpretation="PALETTE COLOR"))
    refused("pixels, and at most", write(tmp_path / "c.dcm", Rows=60000, Columns=60000))
    refused("window of centre 5 and width 0", write(tmp_path / "d.dcm", WindowCenter=5, WindowWidth=0))
    refused("end at bit 15; save it with the stored bits lowest", write(tmp_path / "f.dcm", HighBit=15))
    flat = write(tmp_path / "g.dcm", RescaleSlope=0, RescaleIntercept=5)
    refused("its rescaling makes all values the same", flat)
    short = write(tmp_path / "e.dcm", Rows=500, Columns=500)
    refused("cannot be read as an image", short)


def test_dicom_counts_where_there_are_no_other_images(tmp_path, monkeypatch):
    for name in ("b.dcm", "a.DICOM"):
        write(tmp_path / name)
    assert [path.name for path in images_in(tmp_path)] == ["a.DICOM", "b.dcm"]
    (tmp_path / "a.png").touch()
    with pytest.warns(UserWarning, match=r"originals in DICOM of other images \(1,"):
        assert [path.name for path in images_in(tmp_path)] == ["a.png", "b.dcm"]
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"DICOM needs pydicom: pip install 'lit-fedad\[dicom\]'"):
        read_dicom(tmp_path / "b.dcm")


def test_empty_words_say_nothing(tmp_path):
    plain = np.asarray(read_dicom(write(tmp_path / "plain.dcm")))
    words = {"WindowCenter": None, "WindowWidth": None, "RescaleSlope": None, "RescaleIntercept": None}
    path = write(tmp_path / "empty.dcm", NumberOfFrames=None, VOILUTFunction="", **words)
    assert np.array_equal(np.asarray(read_dicom(path)), plain)
    path = write(tmp_path / "half.dcm", RescaleIntercept=0, RescaleSlope=None)
    assert np.array_equal(np.asarray(read_dicom(path)), plain)


def test_signed_values_and_what_lies_above_the_stored_bits(tmp_path):
    signed = np.array([[-2048, -1, 0], [1, 1000, 2047]], np.int16)
    path = write(tmp_path / "signed.dcm", signed, PixelRepresentation=1)
    expected = np.rint((signed.astype(float) + 2048) / 4095 * 255)
    assert np.array_equal(np.asarray(read_dicom(path)), expected)
    overlaid = write(tmp_path / "overlay.dcm", STORED | 0xF000)
    assert np.array_equal(
        np.asarray(read_dicom(overlaid)), np.asarray(read_dicom(write(tmp_path / "plain.dcm")))
    )


def test_a_frame_is_chosen_with_its_own_window(tmp_path):
    groups = [pydicom.Dataset(), pydicom.Dataset()]
    for group, width in zip(groups, (3000, 1000), strict=True):
        item = pydicom.Dataset()
        item.WindowCenter, item.WindowWidth = 500, width
        group.FrameVOILUTSequence = [item]
    frames = np.concatenate([STORED[:, ::-1], STORED])
    words = {"PerFrameFunctionalGroupsSequence": groups, "NumberOfFrames": 2, "Rows": 2}
    path = write(tmp_path / "enhanced.dcm", frames, **words)
    windowed = np.asarray(read_dicom(write(tmp_path / "plain.dcm", WindowCenter=500, WindowWidth=1000)))
    assert np.array_equal(np.asarray(read_dicom(path, 1)), windowed)
    assert np.array_equal(np.asarray(read_native_dicom(path.read_bytes(), 6, 1)), windowed)
    with pytest.raises(ValueError, match="has no page 2"):
        read_dicom(path, 2)


def test_it_is_told_by_its_content_and_a_picture_called_dicom_is_a_picture(tmp_path):
    from PIL import Image

    from lit_fedad.data.pictures import read_picture

    path = write(tmp_path / "IM000001.dcm").rename(tmp_path / "IM000001")
    assert np.array_equal(np.asarray(read_picture(path))[..., 0], np.asarray(read_dicom(path)))
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.dcm")
    assert np.asarray(read_picture(tmp_path / "a.dcm"))[0, 0].tolist() == [1, 2, 3]


def test_a_compressed_file_without_its_decoder_names_one(tmp_path):
    from lit_fedad.data.pictures import read_picture

    path = write(tmp_path / "a.dcm")
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    file.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    file.save_as(path)
    with refusal("is compressed as JPEG-LS Lossless .* install one"):
        read_picture(path)

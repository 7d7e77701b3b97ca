"""Folders: which files are images, and what is left out is counted and named."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.images import pillow
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import (
    LeftOut,
    find_images,
    image_suffixes,
    images_in,
    require_folder,
    snapshot,
)


def picture(form):
    return pillow(Image.new("RGB", (4, 4)), form)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "set" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "set" / "b.png").touch()
    (tmp_path / "set" / "deep" / "er" / "a.png").touch()
    return tmp_path / "set"


def names(root):
    left = LeftOut()
    return [path.relative_to(root).as_posix() for path in find_images(root, left)], left.line(root)


def test_nested_images_are_taken_in_order_and_hidden_ones_are_not(root):
    for hidden in (
        ".ipynb_checkpoints/x.png",
        ".Trash-1000/x.png",
        "__MACOSX/x.png",
        "@eaDir/x.png",
        "deep/.x.png",
        "deep/Thumbs.db",
    ):
        (root / hidden).parent.mkdir(exist_ok=True)
        (root / hidden).write_bytes(picture("PNG"))
    assert names(root) == (["b.png", "deep/er/a.png"], None)


@pytest.mark.parametrize(
    "suffix", [".jfif", ".jpe", ".gif", ".pgm", ".PPM", ".jp2", ".TIFF", ".avif", ".webp"]
)
def test_suffixes_are_those_of_the_decoders(root, suffix):
    assert suffix.lower() in image_suffixes()
    (root / f"c{suffix}").touch()
    assert names(root)[0] == ["b.png", f"c{suffix}", "deep/er/a.png"]


def test_files_without_a_suffix_are_told_by_their_content(root):
    (root / "IM000001").write_bytes(b"\0" * 128 + b"DICM")
    (root / "photo").write_bytes(picture("JPEG"))
    (root / "picture.v2").write_bytes(picture("PNG"))
    (root / "BMW").write_bytes(b"BM is how this text begins")
    (root / "copy.png.part").write_bytes(picture("PNG"))
    (root / "IMG_1.HEIC").touch()
    found, line = names(root)
    assert found == ["IM000001", "b.png", "deep/er/a.png", "photo", "picture.v2"]
    assert f"skipped files that are no image (2, first {root / 'BMW'})" in line
    assert f"HEIC photographs, to be saved as JPEG or PNG (1, first {root / 'IMG_1.HEIC'})" in line


def test_heatmaps_of_predictions_are_no_images(root):
    for folder in ("results/heatmaps", "deep/heatmaps"):
        (root / folder).mkdir(parents=True)
        (root / folder / "b_png.png").touch()
    (root / "results" / "scores.csv").touch()
    taken, line = names(root)
    assert taken == ["b.png", "deep/er/a.png", "deep/heatmaps/b_png.png"]  # the latter may be anybody's
    assert f"skipped heatmaps of predictions (1, first {root / 'results' / 'heatmaps'})" in line


def test_masks_beside_images_are_no_images_and_masks_may_be_called_so(root):
    (root / "b_mask.png").touch()
    (root / "deep" / "b_mask.png").touch()  # of no image
    (root / "deep" / "_mask.png").touch()  # of none, whatever its name is without the ending
    taken, line = names(root)
    assert taken == ["b.png", "deep/_mask.png", "deep/b_mask.png", "deep/er/a.png"]
    assert line.startswith(f"{root}: skipped masks beside images, ")
    assert root / "b_mask.png" in find_images(root, LeftOut(), masks=True)


@pytest.mark.parametrize(
    "mask",
    [
        "b_GT.bmp", "b_label.bmp", "deep/er/a_Mask.png", "gt/b.png", "deep/Label/er/a_gt.png", "b_seg.png",
        "b-mask.png", "mask_b.png", "b.segmentation.png", "b_ground_truth.png", "annotations/b.png",
    ],
)  # fmt: skip
def test_masks_of_other_names_and_in_folders_within_are_no_images(root, mask):
    (root / mask).parent.mkdir(parents=True, exist_ok=True)
    (root / mask).touch()
    taken, line = names(root)
    assert taken == ["b.png", "deep/er/a.png"]
    assert f"(1, first {root / mask})" in line


def test_images_in_a_folder_called_as_masks_that_are_of_no_image_are_images(root):
    (root / "label").mkdir()
    (root / "label" / "c.png").touch()
    assert names(root) == (["b.png", "deep/er/a.png", "label/c.png"], None)


def test_a_mask_beside_its_image_that_only_the_suffix_tells_apart_is_warned_of(root):
    """As in the folders of magnetic tiles, ``exp1.jpg`` and ``exp1.png``."""
    (root / "b.jpg").touch()
    with pytest.warns(UserWarning, match=r"set: b.jpg and b.png count as two images \(1 such names\)"):
        assert names(root)[0] == ["b.jpg", "b.png", "deep/er/a.png"]


def test_links_are_followed_once_and_circles_left_out(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.png").touch()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to(tmp_path / "elsewhere")
    (root / "a_to_deep").symlink_to(root / "deep")
    (root / "deep" / "up").symlink_to(root)
    (root / "out").symlink_to(tmp_path)
    (root / "file.png").symlink_to(root / "b.png")
    (root / "dangling.png").symlink_to(root / "none.png")
    (root / "self.png").symlink_to(root / "self.png")
    found, line = names(root)
    assert found == ["b.png", "deep/er/a.png", "linked/c.png"]
    assert "links to what is taken already, or that lead back (5, " in line
    assert "links to nothing, to a pipe or in a circle (2, " in line


def test_a_folder_that_cannot_be_opened_is_named(root, monkeypatch):
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: real(path) if path.name != "er" else real(path / "none"))
    assert "folders that cannot be opened (1, " in names(root)[1]


def test_a_snapshot_stays_until_an_image_comes_goes_or_changes(root):
    taken = [snapshot(root)]
    (root / ".hidden.png").touch()
    assert snapshot(root) == taken[0]
    for change in (
        (root / "deep" / "c.png").touch,
        lambda: os.utime(root / "deep" / "er" / "a.png", (1, 1)),
        (root / "b.png").unlink,
    ):
        change()
        assert snapshot(root) not in taken
        taken.append(snapshot(root))


def test_no_snapshot_is_taken_of_what_a_link_leads_to_or_what_is_no_folder(root, tmp_path):
    assert snapshot(root / "b.png") is snapshot(root / "none") is None
    (tmp_path / "elsewhere").mkdir()
    (root / "deep" / "linked").symlink_to(tmp_path / "elsewhere")
    assert snapshot(root) is None


def test_one_file_is_taken_whatever_it_is_and_no_image_is_one_line(root):
    assert find_images(root / "b.png", LeftOut()) == [root / "b.png"]
    (root / "empty").mkdir()
    (root / "empty" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"empty: holds no image .*; skipped files that are no image \(1, "):
        images_in(root / "empty")
    with pytest.raises(UserError, match="no such folder"):
        images_in(root / "none")


@pytest.mark.parametrize(("name", "said"), [("none", "no such folder"), ("b.png", "is a file")])
def test_a_folder_is_asked_for_by_what_is_there(root, name, said):
    with pytest.raises(UserError, match=f"{name}: {said}; give the folder of your images"):
        require_folder(root / name, "the folder of your images")


def test_a_folder_that_is_not_there_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """A site or a job may be started from another folder than the one in which its settings were written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}/mine: no such folder"):
        require_folder(Path("mine"), "the folder of your images")


def test_what_is_left_out_is_warned_of(root):
    (root / "list.csv").write_text("a")
    with pytest.warns(UserWarning, match=r"no image \(1, first .*list\.csv"):
        assert len(images_in(root)) == 2
    assert np.array_equal(images_in(root / "deep"), [root / "deep" / "er" / "a.png"])

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_fedad.data.cards import Counts
from lit_fedad.data.check import check, count
from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.sample import ImageSet

SIZE = (12, 9)


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


def mask(path: Path, marked: int = 1, size=SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels.flat[:marked] = 255
    Image.fromarray(pixels).save(path)


@pytest.fixture
def tree(tmp_path):
    """Two products of 3 training, 2 good and 3 anomalous test images; every mask marks a single pixel."""
    for offset, product in ((0, "cap"), (100, "nut")):
        folder = tmp_path / product
        for part, start, number in (("train/good", 0, 3), ("test/good", 10, 2), ("test/dent", 20, 3)):
            for i in range(number):
                picture(folder / part / f"{i}.png", offset + start + i)
        for i in range(3):
            mask(folder / "ground_truth/dent" / f"{i}_mask.png")
    return tmp_path


def found(tree, **official):
    return [tuple(problem) for problem in check(mvtec_mixture(tree), official)]


def only(tree):
    [(product, message)] = found(tree)
    assert "\n" not in message
    return product, message.replace(f"{tree}/", "")


def test_a_clean_set_has_no_problems(tree):
    images = mvtec_mixture(tree)
    calls = []
    assert check(images, {"cap": Counts(3, 2, 3)}, lambda *call: calls.append(call)) == []
    assert count(images) == {"cap": (3, 2, 3), "nut": (3, 2, 3)}
    assert calls == [(done, 16) for done in range(1, 17)]


@pytest.mark.parametrize("part", ["train/good", "test/good", "test/dent"])
def test_a_truncated_image_is_found_though_its_header_is_whole(tree, part):
    path = tree / "nut" / part / "1.png"
    path.write_bytes(path.read_bytes()[:-60])
    with Image.open(path) as image:
        assert image.size == SIZE
    product, message = only(tree)
    assert product == "nut"
    assert message.startswith(f"nut/{part}/1.png: cannot be read as an image")


def test_every_broken_file_is_named_also_both_of_a_pair(tree):
    broken = [
        "cap/train/good/2.png",
        "cap/test/dent/0.png",
        "cap/ground_truth/dent/0_mask.png",
        "nut/test/good/1.png",
    ]
    for name in broken:
        (tree / name).write_bytes(b"")
    assert [message.split(":")[0] for _, message in found(tree)] == [str(tree / name) for name in broken]


def test_a_file_that_vanished(tree):
    images = mvtec_mixture(tree)
    images.test[0].path.unlink()
    [problem] = check(images)
    assert problem.message.startswith(f"{images.test[0].path}: no such image file")


def test_an_empty_mask(tree):
    mask(tree / "cap/ground_truth/dent/2_mask.png", marked=0)
    assert only(tree) == (
        "cap",
        "cap/ground_truth/dent/2_mask.png: marks no pixel of the anomalous image cap/test/dent/2.png",
    )


def test_one_marked_pixel_is_enough_wherever_it_is(tree):
    for corner in (0, SIZE[0] - 1, SIZE[0] * SIZE[1] - 1):
        pixels = np.zeros((SIZE[1], SIZE[0]), np.uint8)
        pixels.flat[corner] = 1
        Image.fromarray(pixels).save(tree / "cap/ground_truth/dent/2_mask.png")
        assert found(tree) == []


def test_a_mask_of_another_size(tree):
    mask(tree / "cap/ground_truth/dent/1_mask.png", size=(9, 12))
    product, message = only(tree)
    assert product == "cap"
    assert message.startswith("cap/ground_truth/dent/1_mask.png: the mask is 9x12 but its image")


def test_a_broken_mask(tree):
    (tree / "nut/ground_truth/dent/0_mask.png").write_text("no image")
    product, message = only(tree)
    assert product == "nut"
    assert message.startswith("nut/ground_truth/dent/0_mask.png: cannot be read as an image")


def test_a_good_image_may_have_an_empty_mask_only(tree):
    images = mvtec_mixture(tree)
    good = next(i for i, sample in enumerate(images.test) if not sample.label)
    for marked, number in ((0, 0), (1, 1)):
        mask(tree / "good.png", marked)
        test = list(images.test)
        test[good] = replace(test[good], mask=tree / "good.png")
        problems = check(ImageSet("x", images.train, tuple(test)))
        assert len(problems) == number
    assert (
        problems[0].message == f"{tree / 'good.png'}: marks pixels of {test[good].path}, which counts as good"
    )


def test_a_training_image_among_the_test_images_of_another_product(tree):
    shutil.copy(tree / "cap/train/good/1.png", tree / "nut/test/good/0.png")
    assert only(tree) == (
        "nut",
        "nut/test/good/0.png: the same file as the training image cap/train/good/1.png",
    )


def test_a_test_image_that_is_both_normal_and_anomalous(tree):
    shutil.copy(tree / "nut/test/dent/0.png", tree / "nut/test/good/copy.png")
    product, message = only(tree)
    assert (product, message.partition(":")[0]) == ("nut", "nut/test/good/copy.png")
    assert "the same file as" in message


def test_copies_on_one_side_of_the_split_are_no_leak(tree):
    shutil.copy(tree / "cap/train/good/1.png", tree / "cap/train/good/0.png")
    shutil.copy(tree / "cap/test/good/1.png", tree / "cap/test/good/0.png")
    assert found(tree) == []


@pytest.mark.parametrize(("folder", "kind"), [("good", "normal"), ("dent", "anomalous")])
def test_a_product_whose_test_images_have_one_label(tree, folder, kind):
    shutil.rmtree(tree / "nut" / "test" / folder)
    assert only(tree) == ("nut", f"nut: no {kind} test image")


def test_sizes_other_than_the_official_ones(tree):
    assert found(tree, cap=Counts(3, 2, 3), nut=Counts(4, 2, 3), tubes=Counts(1, 1, 1)) == [
        ("nut", "nut: 3 / 2 / 3 images (train / good / anomalous), officially 4 / 2 / 3")
    ]

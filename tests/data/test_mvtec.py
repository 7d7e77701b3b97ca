import os
import warnings
from collections import Counter
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.errors import UserError
from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.transform import ImageTransform


def product(folder: Path, train=3, good=2, defects=None, masks=True, suffix="_mask") -> Path:
    for i in range(train):
        picture(folder / "train" / "good" / f"{i:03}.png")
    for defect, count in {"good": good, **({"dent": 2} if defects is None else defects)}.items():
        for i in range(count):
            picture(folder / "test" / defect / f"{i:03}.png")
            if masks and defect != "good":
                picture(folder / "ground_truth" / defect / f"{i:03}{suffix}.png")
    return folder


@pytest.fixture(autouse=True)
def _no_surprising_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def relative(samples, root):
    return [sample.path.relative_to(root).as_posix() for sample in samples]


def test_root_may_be_a_product(tmp_path):
    folder = product(tmp_path / "cap")
    images = mvtec_mixture(folder)
    assert images.name == "cap"
    assert images.categories == ["cap"]
    assert relative(images.train, folder) == [f"train/good/{i:03}.png" for i in range(3)]
    assert relative(images.test, folder) == [
        f"test/{d}/{i:03}.png" for d in ("dent", "good") for i in range(2)
    ]
    assert [sample.label for sample in images.test] == [1, 1, 0, 0]
    assert [sample.mask and sample.mask.relative_to(folder).as_posix() for sample in images.test] == [
        "ground_truth/dent/000_mask.png",
        "ground_truth/dent/001_mask.png",
        None,
        None,
    ]
    assert images.has_masks


def test_images_that_no_folder_of_the_layout_holds_are_told(tmp_path):
    folder = product(tmp_path / "cap")
    for beside in ("train/dent", "extra"):
        picture(folder / beside / "0.png")
    with pytest.warns(UserWarning, match="skipped") as told:
        images = mvtec_mixture(folder)
    assert [str(warning.message) for warning in told] == [
        f"{folder}: skipped outside of train/good (1, first {folder}/train/dent);"
        f" beside train and test (1, first {folder}/extra)"
    ]
    assert len(images.train) == 3


def test_root_may_hold_products_and_other_folders(tmp_path):
    product(tmp_path / "b")
    product(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    images = mvtec_mixture(tmp_path, name="mix")
    assert images.name == "mix"
    assert images.categories == ["a", "b"]
    assert mvtec_mixture(tmp_path).name == tmp_path.name


def test_products_are_relative_folders_in_the_order_given(tmp_path):
    product(tmp_path / "x" / "cap")
    product(tmp_path / "y" / "tile")
    assert mvtec_mixture(tmp_path, ["y/tile", "x/cap"]).categories == ["tile", "cap"]
    assert mvtec_mixture(tmp_path, "y/tile").categories == ["tile"]
    assert mvtec_mixture(str(tmp_path), ["y/tile"]).name == "tile"


def test_names_that_clash_become_whole_paths(tmp_path):
    for folder in ("x/cap", "y/cap", "y/tile"):
        product(tmp_path / folder)
    images = mvtec_mixture(tmp_path, ["x/cap", "y/cap", "y/tile"])
    assert images.categories == ["x_cap", "y_cap", "tile"]
    assert Counter(sample.category for sample in images.train) == {"x_cap": 3, "y_cap": 3, "tile": 3}
    refused("y_cap is listed twice", mvtec_mixture, tmp_path, ["y/cap", "y/cap"])


def test_a_set_without_ground_truth_has_no_masks(tmp_path):
    images = mvtec_mixture(product(tmp_path / "cap", masks=False))
    assert all(sample.mask is None for sample in images.test)
    assert not images.has_masks


def test_masks_may_be_called_like_the_image(tmp_path):
    images = mvtec_mixture(product(tmp_path / "cap", suffix=""))
    assert [sample.mask.name for sample in images.test if sample.label] == ["000.png", "001.png"]


def test_a_missing_mask_is_named(tmp_path):
    folder = product(tmp_path / "cap", defects={"dent": 3, "hole": 1})
    (folder / "ground_truth" / "dent" / "001_mask.png").unlink()
    message = refused("1 of 3 missing", mvtec_mixture, folder)
    assert str(folder / "test" / "dent" / "001.png") in message
    assert str(folder / "ground_truth" / "dent" / "001_mask.png") in message


def test_a_missing_folder_of_masks_is_named(tmp_path):
    folder = product(tmp_path / "cap", defects={"dent": 1})
    picture(folder / "test" / "hole" / "000.png")
    refused("ground_truth/hole/000_mask.png", mvtec_mixture, folder)


@pytest.mark.parametrize("name", ["Good", "ok", "OK_front", "healthy", "no-defect", "i.O."])
def test_normal_test_images_under_another_name_are_no_defect(tmp_path, name):
    folder = product(tmp_path / "cap")
    picture(folder / "test" / name / "000.png")
    refused(
        f"{folder / 'test' / name}: normal test images lie in a folder called good", mvtec_mixture, folder
    )


def test_masks_beside_their_defect_are_no_defect(tmp_path):
    folder = product(tmp_path / "cap", masks=False)
    picture(folder / "test" / "dent_mask" / "000.png")
    refused(f"move it to {folder / 'ground_truth' / 'dent'}", mvtec_mixture, folder)


def test_a_missing_root_is_named(tmp_path):
    assert str(tmp_path / "none") in refused("no such folder", mvtec_mixture, tmp_path / "none")
    picture(tmp_path / "file.png")
    refused("is a file", mvtec_mixture, tmp_path / "file.png")


def test_a_root_without_products_points_deeper(tmp_path):
    product(tmp_path / "mvtec" / "cap")
    refused("name them in products, for example mvtec/cap", mvtec_mixture, tmp_path)
    (tmp_path / "empty").mkdir()
    refused("no product folder with train/good", mvtec_mixture, tmp_path / "empty")
    refused("the list is empty", mvtec_mixture, tmp_path, [])


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("mvtec/botle", "mvtec/bottle"), ("bottle", "mvtec/bottle"), ("tiel", "other/tile")],
)
def test_an_unknown_product_names_the_nearest(tmp_path, asked, nearest):
    product(tmp_path / "mvtec" / "bottle")
    product(tmp_path / "other" / "tile")
    refused(f"no product folder '{asked}'; the nearest is '{nearest}'", mvtec_mixture, tmp_path, [asked])


def test_an_unknown_product_where_there_is_none(tmp_path):
    refused("no product folder 'cap'; there are none", mvtec_mixture, tmp_path, ["cap"])


def test_missing_parts_of_a_product_are_named(tmp_path):
    no_train = product(tmp_path / "no_train", train=0)
    refused("no_train: no train/good", mvtec_mixture, no_train)
    refused("no_train: no train/good", mvtec_mixture, tmp_path, ["no_train"])
    (no_train / "train" / "good").mkdir(parents=True)
    refused("train/good: holds no image", mvtec_mixture, no_train)
    refused(
        "no folder test/good.*data=auto", mvtec_mixture, product(tmp_path / "no_test", good=0, defects={})
    )
    empty = product(tmp_path / "empty_defect")
    (empty / "test" / "crack").mkdir()
    refused("crack: holds no image", mvtec_mixture, empty)


def test_stray_files_are_skipped_with_one_warning(tmp_path):
    folder = product(tmp_path / "cap")
    clean = mvtec_mixture(folder)
    for hidden in ("train/good/.DS_Store", "train/good/Thumbs.db", "test/.cache", "test/good/desktop.ini"):
        (folder / hidden).write_text("")
    assert mvtec_mixture(folder) == clean  # silently: warnings are errors here
    for stray in ("train/good/a.txt", "test/dent/list.csv", "test/readme.md"):
        (folder / stray).write_text("")
    with pytest.warns(UserWarning, match=r"skipped .*\(2, first .*train/good/a\.txt") as caught:
        assert mvtec_mixture(folder) == clean
    assert len(caught) == 1


def test_reading_decodes_nothing_and_the_transform_reports(tmp_path):
    folder = product(tmp_path / "cap")
    (folder / "train" / "good" / "001.png").write_bytes(b"no image")
    picture(folder / "ground_truth" / "dent" / "000_mask.png", size=(4, 3))
    images = mvtec_mixture(folder)
    with pytest.raises(UserError, match=r"001\.png: cannot be read"):
        ImageTransform(4).image(images.train[1].path)
    with pytest.raises(UserError, match=r"000_mask\.png: the mask is 4x3 but its image .* is 16x12"):
        ImageTransform(4).mask(images.test[0].mask, images.test[0].path)


def test_limits_take_a_reproducible_subset_of_each_product(tmp_path):
    product(tmp_path / "a", train=30, good=20, defects={"dent": 20, "hole": 20})
    product(tmp_path / "b", train=4, good=1, defects={"dent": 1})
    whole = mvtec_mixture(tmp_path)
    some = mvtec_mixture(tmp_path, train_per_product=10, test_per_product=8, seed=1)
    assert some == mvtec_mixture(tmp_path, train_per_product=10, test_per_product=8, seed=1)
    assert some != mvtec_mixture(tmp_path, train_per_product=10, test_per_product=8, seed=2)
    assert Counter(sample.category for sample in some.train) == {"a": 10, "b": 4}
    assert Counter((sample.category, sample.defect) for sample in some.test) == {
        ("a", "good"): 4,
        ("a", "dent"): 2,
        ("a", "hole"): 2,
        ("b", "good"): 1,
        ("b", "dent"): 1,
    }
    assert [sample for sample in whole.train if sample in set(some.train)] == list(some.train)
    assert [sample for sample in whole.test if sample in set(some.test)] == list(some.test)
    # Not simply the first ones.
    assert some.train[:10] != whole.train[:10]
    alone = mvtec_mixture(tmp_path, ["a"], train_per_product=10, test_per_product=8, seed=1)
    assert alone.train == tuple(sample for sample in some.train if sample.category == "a")
    assert alone.test == tuple(sample for sample in some.test if sample.category == "a")


@pytest.mark.parametrize(
    ("good", "defects", "limit", "expected"),
    [
        (9, {"dent": 9, "hole": 9}, 7, {"good": 3, "defects": 4}),
        (1, {"dent": 9, "hole": 9}, 8, {"good": 1, "defects": 7}),
        (9, {"dent": 1, "hole": 1}, 8, {"good": 6, "defects": 2}),
        (2, {"dent": 1}, 8, {"good": 2, "defects": 1}),
        (9, {"dent": 1, "hole": 9, "tear": 9}, 14, {"good": 7, "dent": 1, "hole": 3, "tear": 3}),
        (9, {}, 4, {"good": 4}),
        (0, {"dent": 9}, 4, {"dent": 4}),
    ],
)
def test_test_limit_balances_good_and_defects(tmp_path, good, defects, limit, expected):
    images = mvtec_mixture(product(tmp_path / "cap", good=good, defects=defects), test_per_product=limit)
    found = Counter(sample.defect for sample in images.test)
    found["defects"] = len(images.test) - found["good"]
    assert {key: found[key] for key in expected} == expected


@pytest.mark.real_data
@pytest.mark.skipif("LIT_FEDAD_DATA" not in os.environ, reason="LIT_FEDAD_DATA is not set")
def test_real_sets_have_their_documented_sizes():
    root = Path(os.environ["LIT_FEDAD_DATA"])
    mixture = mvtec_mixture(root, ["mvtec/bottle", "mvtec/screw", "other_ad/magnetic_tile"])
    train, test = (Counter(sample.category for sample in part) for part in (mixture.train, mixture.test))
    assert train == {"bottle": 209, "screw": 320, "magnetic_tile": 460}
    assert test == {"bottle": 83, "screw": 160, "magnetic_tile": 568}
    assert mixture.has_masks
    assert not mvtec_mixture(root / "medical" / "brain_mri").has_masks

    transform = ImageTransform(64, fit="crop", resize=72)
    for sample in mvtec_mixture(root, ["mvtec/screw", "other_ad/magnetic_tile"], test_per_product=6).test:
        assert transform.image(sample.path).isfinite().all()
        assert transform.mask(sample.mask, sample.path).shape == (64, 64)
    some = [sample for sample in mixture.test if sample.label and sample.category == "bottle"]
    assert all(ImageTransform(256).mask(sample.mask, sample.path).any() for sample in some)


def test_another_split_is_drawn_before_images_are_left_out(tmp_path):
    folder = product(tmp_path / "cap", train=6, good=4)
    whole = mvtec_mixture(folder)
    drawn = mvtec_mixture(folder, train_per_product=5, test_per_product=4, split_seed=1)
    assert (len(drawn.train), sum(not sample.label for sample in drawn.test)) == (5, 2)
    assert not {*drawn.train} <= {*whole.train}
    assert not {*drawn.train} & {*drawn.test}

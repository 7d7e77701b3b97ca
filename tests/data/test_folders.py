import os
from pathlib import Path

import pytest
from helpers.refusals import refused

from lit_fedad.core.errors import UserError
from lit_fedad.data.folders import folders
from lit_fedad.data.mvtec import mvtec_mixture


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


@pytest.fixture
def chest(tmp_path):
    """The chest X-rays of Kermany et al., with what macOS and Kaggle leave in them."""
    root = tmp_path / "ChestXRay2017"
    for part in ("train", "test", "val"):
        touch(root / "chest_xray" / part / "NORMAL", f"IM-{part}-1.jpeg", f"IM-{part}-0.jpeg", ".DS_Store")
        touch(root / "chest_xray" / part / "PNEUMONIA", f"person1_{part}_virus.jpeg", "._person1.jpeg")
    return root


def read(root, train="train/NORMAL", normal="test/NORMAL", anomalous="test/PNEUMONIA", **kwargs):
    return folders(root, *([f"chest_xray/{folder}"] for folder in (train, normal, anomalous)), **kwargs)


def test_each_folder_goes_where_it_is_given(chest):
    images = read(chest)
    assert images.name == "ChestXRay2017"
    assert images.categories == ["ChestXRay2017"]
    assert [sample.path.name for sample in images.train] == ["IM-train-0.jpeg", "IM-train-1.jpeg"]
    assert [(sample.path.name, sample.defect, sample.label) for sample in images.test] == [
        ("IM-test-0.jpeg", "good", 0),
        ("IM-test-1.jpeg", "good", 0),
        ("person1_test_virus.jpeg", "PNEUMONIA", 1),
    ]
    assert all(sample.path.is_file() for sample in (*images.train, *images.test))
    assert not images.has_masks


def test_several_folders_are_read_in_the_order_given(tmp_path):
    for folder in ("Training/notumor", "more", "Testing/notumor", "Testing/pituitary", "Testing/glioma"):
        touch(tmp_path / folder, "a.jpg")
    images = folders(
        str(tmp_path),
        ["more", "Training/notumor"],
        ["Testing/notumor"],
        ["Testing/pituitary", "Testing/glioma"],
        name="brain",
    )
    assert images.name == "brain"
    assert [sample.path.parent.name for sample in images.train] == ["more", "notumor"]
    assert [sample.defect for sample in images.test] == ["good", "pituitary", "glioma"]


def test_a_folder_may_not_be_on_both_sides(chest):
    refused("train/NORMAL: is given for training and for testing", read, chest, normal="train/NORMAL")
    refused("train/NORMAL: is given for training and for testing", read, chest, anomalous="train/NORMAL")


def test_missing_and_empty_folders_are_named(chest):
    refused(r"chest_xray/train/normal_: no such folder; correct its name", read, chest, train="train/normal_")
    touch(chest / "chest_xray" / "notes", "a.txt", ".hidden.png")
    refused("chest_xray/notes: holds no image", read, chest, normal="notes")


@pytest.mark.parametrize("suffix", [".dcm", ".dicom", ".DCM"])
def test_a_folder_of_dicom_says_what_it_needs(chest, suffix, monkeypatch):
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: None)
    touch(chest / "chest_xray" / "raw", f"a{suffix}")
    refused(r"raw: DICOM needs pydicom: pip install 'lit-fedad\[dicom\]'", read, chest, normal="raw")


@pytest.mark.real_data
@pytest.mark.skipif("LIT_FEDAD_DATA" not in os.environ, reason="LIT_FEDAD_DATA is not set")
def test_a_real_set_is_what_the_mvtec_reader_finds():
    root = Path(os.environ["LIT_FEDAD_DATA"]) / "medical" / "chest_xray"
    images = folders(root, ["train/good"], ["test/good"], ["test/covid19", "test/pneumonia"])
    same = mvtec_mixture(root)
    assert images.train == same.train
    assert set(images.test) == set(same.test)
    assert (len(images.train), len(images.test)) == (400, 724)


def test_another_split_mixes_the_folders_of_normal_images(chest):
    plain, redrawn = read(chest), [read(chest, split_seed=seed) for seed in range(4)]
    assert any(set(images.train) != set(plain.train) for images in redrawn)
    for images in redrawn:
        assert (len(images.train), len(images.test)) == (len(plain.train), len(plain.test))
        assert {*images.train, *images.test} == {*plain.train, *plain.test}


def test_images_of_one_name_in_two_folders_do_not_share_a_mask(tmp_path):
    touch(tmp_path / "good", "a.png")
    for defect in ("scratch", "dent"):
        touch(tmp_path / defect, "0.png")
    touch(tmp_path / "masks", "0.png")
    given = (tmp_path, ["good"], [], ["scratch", "dent"])
    with pytest.raises(
        UserError, match=r"masks/0\.png: is the mask of .*scratch/0\.png and of .*dent/0\.png"
    ):
        folders(*given, masks="masks")
    for defect in ("scratch", "dent"):
        touch(tmp_path / "own" / defect, "0.png")
    assert len({sample.mask for sample in folders(*given, masks="own").test}) == 2


@pytest.mark.parametrize("place", ["masks", "masks/dent"])
def test_masks_of_no_anomalous_image_are_counted(tmp_path, place):
    touch(tmp_path / "good", "a.png")
    touch(tmp_path / "dent", "0.png")
    touch(tmp_path / place, "0.png", "7.png")
    with pytest.warns(UserWarning, match=r"skipped masks of no anomalous image \(1, first .*/7\.png\)"):
        folders(tmp_path, ["good"], [], ["dent"], masks="masks")


def test_anomalous_images_of_a_folder_called_good_are_anomalous(tmp_path):
    for folder in ("ours/good", "theirs/good"):
        touch(tmp_path / folder, "0.png")
    assert [sample.label for sample in folders(tmp_path, ["ours/good"], [], ["theirs/good"]).test] == [1]

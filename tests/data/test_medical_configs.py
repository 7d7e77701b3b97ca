"""The medical mixtures, composed from ``conf`` and read from trees as the sets are downloaded."""

import json
from collections import Counter

import pytest

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError


def touch(folder, count, name="{}.png"):
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / name.format(i)).touch()


def medianomaly(root, train=4, normal=2, anomalous=3):
    numbers = [f"{i}.png" for i in range(train + normal + anomalous)]
    touch(root / "images", len(numbers))
    test = {"0": numbers[train : train + normal], "1": numbers[train + normal :]}
    (root / "data.json").write_text(json.dumps({"train": {"0": numbers[:train]}, "test": test}))


def brats(root):
    touch(root / "train", 5, "BraTS2021_{}_flair_60.png")
    touch(root / "test" / "normal", 2, "BraTS2021_1{}_flair_60.png")
    touch(root / "test" / "tumor", 3, "BraTS2021_2{}_flair_60.png")
    touch(root / "test" / "annotation", 3, "BraTS2021_2{}_seg_60.png")


def head_ct(root):
    touch(root / "head_ct" / "head_ct", 16, "{:03}.png")
    (root / "labels.csv").write_text("id, hemorrhage\n" + "".join(f"{i},{int(i < 8)}\n" for i in range(16)))


def brain_tumor(root):
    for count, kind in enumerate(("notumor", "glioma", "meningioma", "pituitary"), 1):
        touch(root / "Training" / kind, 2 * count, f"Tr-{kind}_{{}}.jpg")
        touch(root / "Testing" / kind, count, f"Te-{kind}_{{}}.jpg")


def chest(root):
    for part, (normal, pneumonia) in {"train": (3, 9), "test": (2, 4)}.items():
        touch(root / "chest_xray" / part / "NORMAL", normal, "IM-{}.jpeg")
        touch(root / "chest_xray" / part / "PNEUMONIA", pneumonia, "person{}_virus.jpeg")


def rsna(root):
    names = [f"0004cfab-14fd-4e49-80ba-63a80b6bdd{i:02}" for i in range(12)]
    classes = ["Normal"] * 4 + ["Lung Opacity"] * 5 + ["No Lung Opacity / Not Normal"] * 3
    touch(root / "stage_2_train_images", 0)
    rows = ["patientId,class"]
    for name, label in zip(names, classes, strict=True):
        (root / "stage_2_train_images" / f"{name}.dcm").touch()
        (root / "stage_2_train_images" / f"{name}.png").touch()
        rows += [f"{name},{label}"] * (2 if label == "Lung Opacity" else 1)
    (root / "stage_2_detailed_class_info.csv").write_text("\n".join(rows))


def vindr(root):
    touch(root / "train", 6, "50a418190bc3fb1ef1633bf9678929b{}.png")
    rows = ["image_id,class_name,class_id,rad_id,x_min,y_min,x_max,y_max"]
    for i in range(6):
        name = f"50a418190bc3fb1ef1633bf9678929b{i}"
        finding = ",Cardiomegaly,3,R{},691.0,1375.0,1653.0,1831.0" if i < 2 else ",No finding,14,R{},,,,"
        rows += [name + finding.format(reader) for reader in (8, 9, 10)]
    (root / "train.csv").write_text("\n".join(rows))


# Option -> part -> what writes it, and how many images are for training, normal and anomalous for testing.
MIXTURES = {
    "brain": {"BrainTumor": (medianomaly, 4, 2, 3), "BraTS2021": (brats, 5, 2, 3), "HeadCT": (head_ct, 6, 2, 8)},
    "brain_kaggle": {
        "BrainTumor": (brain_tumor, 2, 1, 9), "BraTS2021": (brats, 5, 2, 3), "HeadCT": (head_ct, 6, 2, 8),
    },
    "xray": {"ChestXRay2017": (chest, 3, 2, 4), "RSNA": (medianomaly, 4, 2, 3), "VinCXR": (medianomaly, 4, 2, 3)},
    "xray_kaggle": {"ChestXRay2017": (chest, 3, 2, 4), "RSNA": (rsna, 3, 1, 5), "VinCXR": (vindr, 3, 1, 2)},
}  # fmt: skip


@pytest.mark.parametrize("option", MIXTURES)
def test_mixture_is_read_from_its_real_layout(option, tmp_path):
    for part, (write, *_) in MIXTURES[option].items():
        write(tmp_path / part)
    images = build(compose([f"data={option}", f"data.root={tmp_path}"])["data"])
    assert images.name == option
    assert images.categories == list(MIXTURES[option])
    assert not images.has_masks
    train = Counter(sample.category for sample in images.train)
    test = Counter((sample.category, sample.label) for sample in images.test)
    for part, (_, *expected) in MIXTURES[option].items():
        assert [train[part], test[part, 0], test[part, 1]] == expected
    paths = [sample.path for sample in (*images.train, *images.test)]
    assert len(set(paths)) == len(paths)
    assert all(path.is_file() for path in paths)

    few = build(compose([f"data={option}", f"data.root={tmp_path}", "data.train_per_product=2"])["data"])
    assert Counter(sample.category for sample in few.train) == dict.fromkeys(MIXTURES[option], 2)
    other = build(compose([f"data={option}", f"data.root={tmp_path}", "data.seed=3"])["data"])
    drawn = any(write in (head_ct, rsna, vindr) for write, *_ in MIXTURES[option].values())
    assert (other != images) == drawn


def test_parts_may_be_links(tmp_path):
    for part, (write, *_) in MIXTURES["brain"].items():
        write(tmp_path / "downloads" / part.lower())
        (tmp_path / part).symlink_to(tmp_path / "downloads" / part.lower())
    images = build(compose(["data=brain", f"data.root={tmp_path}"])["data"])
    assert images.categories == list(MIXTURES["brain"])


def test_parts_can_be_changed_on_the_command_line(tmp_path):
    medianomaly(tmp_path / "BrainTumor")
    brats(tmp_path / "BraTS2021")
    head_ct(tmp_path / "HeadCT")
    (tmp_path / "HeadCT" / "head_ct" / "head_ct").rename(tmp_path / "HeadCT" / "png")
    overrides = ["data=brain", f"data.root={tmp_path}"]
    with pytest.raises(UserError, match="head_ct/head_ct: no such folder"):
        build(compose(overrides)["data"])
    overrides += [
        "data.parts.HeadCT.images=png",
        "data.parts.HeadCT.train_share=0.5",
        "~data.parts.BraTS2021",
    ]
    images = build(compose(overrides)["data"])
    assert Counter(sample.category for sample in images.train) == {"BrainTumor": 4, "HeadCT": 4}


@pytest.mark.parametrize(
    ("option", "overrides", "expected"),
    [
        ("medianomaly", [], ("LAG", 4, 5)),
        ("folders", [], ("own", 3, 5)),
        ("labelled_csv", ["data.images=png"], ("table", 6, 10)),
    ],
)
def test_single_sets_are_read(option, overrides, expected, tmp_path):
    root = tmp_path / expected[0]
    if option == "medianomaly":
        medianomaly(root)
    elif option == "folders":
        for folder, count in {"train/normal": 3, "test/normal": 2, "test/anomalous": 3}.items():
            touch(root / folder, count)
    else:
        touch(root / "png", 16)
        (root / "labels.csv").write_text("id,label\n" + "".join(f"{i},{int(i < 8)}\n" for i in range(16)))
    images = build(compose([f"data={option}", f"data.root={root}", *overrides])["data"])
    assert (images.name, len(images.train), len(images.test)) == expected

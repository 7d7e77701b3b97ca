"""``data=auto``: what is seen in folders of many layouts, and what is read of them."""

import json
import shlex
from collections import Counter
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.cli import main as cli
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data import labelled_csv as labelled_csv_module
from lit_fedad.data.auto import auto, recognise


def images(root, *folders, number=5, marks=False):
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            pixels = np.zeros((8, 8), np.uint8)
            pixels[:4] = 255 if marks else 10 * i
            Image.fromarray(pixels).save(root / folder / f"{i}.png")


def mvtec(root):
    images(root, "train/good", "test/good", "test/dent")
    images(root, "ground_truth/dent", marks=True)


def table(root, header, label, ending=".png"):
    images(root, "images", number=6)
    rows = [f"{i}{ending},{label(i)}" for i in range(6)]
    (root / "labels.csv").write_text("\n".join([header, *rows]))


def note(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def named(root, *names):
    images(root, ".", number=len(names))
    for number, name in enumerate(names):
        (root / f"{number}.png").rename(root / f"{name}.png")


def latin_table(root):
    table(root, "id,label", lambda i: i % 2)
    (root / "labels.csv").write_bytes("id,gr\u00f6\u00dfe\n0,1\n".encode("cp1252"))


def coco(root, file, folder, names=range(5)):
    images(root, folder)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in names],
        "categories": [{"id": 1, "name": "crack"}],
        "annotations": [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [0, 0, 4, 4], "segmentation": []}],
    }
    (root / file).write_text(json.dumps(content))


def kolektor(root):
    images(root, "train", "test")
    for part, number in (("train", 5), ("test", 2)):
        for i in range(5):
            marks = Image.fromarray(np.full((8, 8), 255 * (i >= number - 1), np.uint8))
            marks.save(root / part / f"{i}_GT.png")


def real_iad(root, split="realiad_jsons"):
    images(root / "realiad_1024" / "usb", "OK/S0001", "NG/AK/S0002")
    part = [
        {"image_path": f"{place}/{i}.png", "anomaly_class": place[:2]}
        for place in ("OK/S0001", "NG/AK/S0002")
        for i in range(5)
    ]
    note(
        root / "realiad_jsons" / split / "usb.json",
        json.dumps({"meta": {"normal_class": "OK"}, "train": part[:4], "test": part[4:]}),
    )


def medianomaly(root):
    images(root, "images")
    split = {"train": {"0": ["0.png", "1.png"]}, "test": {"0": ["2.png"], "1": ["3.png", "4.png"]}}
    note(root / "data.json", json.dumps(split))


LAYOUTS = {  # how it is made: what is seen; training, normal and anomalous test images, masks
    "mvtec": (mvtec, "one product in the layout of MVTec AD", (5, 5, 5, 5)),
    "products": (lambda root: [mvtec(root / p) for p in "ab"], "2 products in the layout", (10, 10, 10, 10)),
    "one below": (lambda root: mvtec(root / "a"), "one product in the layout", (5, 5, 5, 5)),
    "collections": (lambda root: [mvtec(root / p) for p in ("x/a", "y/b")], "2 products", (10, 10, 10, 10)),
    "train only": (lambda root: images(root, "train/good"), "no normal test images", (4, 1, 0, 0)),
    "no normal tests": (lambda root: images(root, "train/good", "test/bad"), "so a share is kept", (4, 1, 5, 0)),
    "train flat": (lambda root: images(root, "train", "test/good", "test/bad"), "images in train", (5, 5, 5, 0)),
    "test/OK": (lambda root: images(root, "train/OK", "test/OK", "test/NG"), "train/OK", (5, 5, 5, 0)),
    "kaggle": (
        lambda root: images(root / "chest", *(f"{p}/{c}" for p in ("train", "test") for c in ("NORMAL", "PNEUMONIA"))),
        "leaves out train/PNEUMONIA",
        (5, 5, 5, 0),
    ),
    "val": (lambda root: images(root, "train/good", "val/good", "val/bad"), "val/bad", (5, 5, 5, 0)),
    "unlabelled test": (lambda root: images(root, "train/good", "test"), "leaves out test", (4, 1, 0, 0)),
    "flat": (lambda root: images(root, "."), "5 images in one folder, all normal", (4, 1, 0, 0)),
    "wrapped": (lambda root: images(root, "download/images"), "5 images in one folder", (4, 1, 0, 0)),
    "normal and abnormal": (lambda root: images(root, "normal", "abnormal"), "ones in abnormal", (4, 1, 5, 0)),
    "classes": (lambda root: images(root, "No_Tumor", "glioma", "pituitary"), "glioma, pituitary", (4, 1, 10, 0)),
    "classes below images": (lambda root: images(root, "images/good", "images/bad"), "images/good", (4, 1, 5, 0)),
    "masks": (
        lambda root: [images(root, "good", "crack"), images(root, "masks/crack", marks=True)],
        "masks in masks",
        (4, 1, 5, 5),
    ),
    "masks together": (
        lambda root: [images(root, "good", "crack"), images(root, "ground_truth", marks=True)],
        "masks in ground_truth",
        (4, 1, 5, 5),
    ),
    "csv 0/1": (lambda root: table(root, "file,label", lambda i: i % 2), "label=0 is normal", (2, 1, 3, 0)),
    "csv that says which are good": (
        lambda root: table(root, "id,good", lambda i: i % 2),
        "good=1 is normal",
        (2, 1, 3, 0),
    ),
    "normal tests": (lambda root: images(root, "normal", "normal_test", "bad"), "in normal_test", (5, 5, 5, 0)),
    "masks in test": (
        lambda root: (mvtec(root), (root / "ground_truth").rename(root / "test" / "ground_truth")),
        "masks in test/ground_truth",
        (5, 5, 5, 5),
    ),
    "csv of a spreadsheet": (
        lambda root: (
            table(root, "id;label", lambda i: i % 2),
            text := "\n" + (root / "labels.csv").read_text().replace(",", ";"),  # below an empty line
            (root / "labels.csv").write_text(text, encoding="utf-16"),
        ),
        "label=0 is normal",
        (2, 1, 3, 0),
    ),
    "csv words": (
        lambda root: table(root, "image_id,class", lambda i: "crack" if i < 2 else "Good", ""),
        "class=Good is normal",
        (3, 1, 2, 0),
    ),
    "tsv": (
        lambda root: (
            table(root, "id\tlabel", lambda i: i % 2, ".png\t"),
            (root / "labels.tsv").write_text((root / "labels.csv").read_text().replace(",", "")),
            (root / "labels.csv").unlink(),
        ),
        "labels in labels.tsv",
        (2, 1, 3, 0),
    ),
    "csv with a sex": (
        lambda root: table(root, "id,sex,result", lambda i: f"{i % 2},{'crack' if i < 2 else 'ok'}"),
        "result=ok is normal",
        (3, 1, 2, 0),
    ),
    "csv with a sex and a column of good images": (
        lambda root: table(root, "id,sex,good", lambda i: f"{i % 2},{int(i > 1)}"),
        "good=1 is normal",
        (3, 1, 2, 0),
    ),
    "folders beside train and test": (
        lambda root: images(root, "train/ok", "validation/ok", "test_public/ok", "test_public/bad"),
        "and leaves out test_public, for",
        (5, 5, 0, 0),
    ),
    "names with commas": (
        lambda root: images(root, "ok/a", "crack, deep", "'it', 1"),
        "anomalous ones in 'it', 1, crack, deep",
        (4, 1, 10, 0),
    ),
    "names that begin or end with a blank": (
        lambda root: images(root, "ok", "crack ", " deep"),
        "anomalous ones in  deep, crack ",
        (4, 1, 10, 0),
    ),
    "coco": (lambda root: coco(root, "annotations.json", "images"), "annotations in annotations.json", (3, 1, 1, 1)),
    "coco in parts": (
        lambda root: [coco(root, f"{p}/_annotations.coco.json", p) for p in ("train", "valid")],
        "train/_annotations.coco.json, valid/_annotations",
        (6, 2, 2, 2),
    ),
    "one beside a folder without images": (
        lambda root: [images(root / "nut", "good", "bad"), note(root / "docs" / "a.txt", "")],
        "normal images in good",
        (4, 1, 5, 0),
    ),
    "kolektor": (kolektor, "KolektorSDD2", (4, 1, 4, 4)),
    "real_iad": (real_iad, "Real-IAD with its split files", (4, 1, 5, 0)),
    "medianomaly": (medianomaly, "MedIAnomaly", (2, 1, 2, 0)),
    "mixed products": (
        lambda root: [mvtec(root / "nut"), images(root / "tile", "good", "bad")],
        "2 products: nut has one product",
        (9, 6, 10, 5),
    ),
    "one product without normal tests": (
        lambda root: [mvtec(root / "nut"), images(root / "tile", "train/good", "test/bad")],
        "tile has training images in train/good, no normal test images",
        (9, 6, 10, 5),
    ),
    "few labels": (
        lambda root: [table(root, "id,label", lambda i: i % 2), images(root, "images", number=20)],
        "labels in labels.csv",
        (2, 1, 3, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_and_read(tmp_path, monkeypatch, name):
    monkeypatch.setenv("LIT_FEDAD_CACHE", str(tmp_path / "cache"))
    make, seen, counts = LAYOUTS[name]
    make(tmp_path / "set")
    layout = recognise(tmp_path / "set")
    assert seen in layout.seen
    with pytest.warns(UserWarning, match="data=auto saw"):
        found = auto(tmp_path / "set")
    labels = Counter(sample.label for sample in found.test)
    masks = sum(sample.mask is not None for sample in found.test)
    assert (len(found.train), labels[0], labels[1], masks) == counts
    assert not {sample.path for sample in found.train} & {sample.path for sample in found.test}
    if not layout.parts:  # the command that is printed reads the same images
        again = build(compose(shlex.split(layout.command))["data"])
        assert (again.train, again.test) == (found.train, found.test)


@pytest.mark.parametrize("name", ["null", "${x}", "'r'", "???", "~no-such-user"])
def test_the_command_reads_a_folder_whose_name_means_something_else(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    mvtec(Path(name) / "nut")
    found = recognise(Path(name))
    assert Path(compose(shlex.split(found.command))["data"]["root"]) == Path(name)
    assert found.read().train


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: images(root, "cat", "dog"), r"none is called as normal images are .* data\.train_normal=\[cat\]"),
        (lambda root: images(root, ".", "bad"), "images beside folders of images"),
        (lambda root: images(root, "train/bad", "test/good"), "holds test, train, and no folder there says which"),
        (lambda root: images(root, "ground_truth/dent"), "holds ground_truth, and no folder there says which"),
        (lambda root: root.mkdir(), r"holds no image \(.*\); check data\.root"),
        (lambda root: note(root / "x.npz", ""), r"read by data=packed data\.train=x\.npz"),
        (lambda root: None, "no such folder"),
        (lambda root: table(root, "id,label", lambda i: f"type{i}"), r"give data=labelled_csv data\.label_column"),
        (lambda root: table(root, "id,sex,finding", lambda i: f"{i % 2},{i // 3}"), "columns sex, finding may say"),
        (lambda root: (mvtec(root / "can"), note(root / "can" / "defects_config.json", "[]")), "give data=mvtec_loco"),
        (lambda root: images(root / "can", "train/good", "test_public/ground_truth/bad"), "give data=mvtec_ad2"),
        (lambda root: images(root / "Brain", "train/good", "test/Ungood/label"), "BMAD, with masks, .* data=bmad"),
        (lambda root: images(root / "pcb1", "Data/Images/Normal"), "give data=visa, and the folder with split_csv"),
        (lambda root: real_iad(root, "other"), "give data=real_iad, and the folder of its images and split files"),
        (lambda root: (images(root, "images"), note(root / "a.xlsx", "")), r"a\.xlsx: is not read, .*save it as CSV"),
        (lambda root: (images(root, "train"), note(root / "a.xls", "")), r"a\.xls: is not read"),
        (lambda root: (images(root, "."), note(root / "a.ODS", "")), r"a\.ODS: is not read, and without it all"),
        (lambda root: latin_table(root), r"labels\.csv: cannot be read as CSV: .*; save it as CSV in UTF-8"),
        (lambda root: table(root, "id,label", lambda i: i % 2, ".jpg?"), r"labels\.csv: names no images"),
        (lambda root: table(root, "0.png,0", lambda i: i % 2), "its first line names an image"),
        (lambda root: (images(root, "images"), note(root / "labels" / "0.txt", "0 .5 .5 .1 .1")), "YOLO"),
        (lambda root: (images(root, "JPEGImages"), note(root / "a" / "0.xml", "<annotation>")), "Pascal VOC"),
        (lambda root: (images(root, "."), note(root / "0.json", '{"shapes": []}')), "LabelMe"),
        (lambda root: (images(root, "."), note(root / "0.txt", "0 .5 .5 .1 .1")), r"0\.txt: may say which images are"),
        (lambda root: (images(root, "train", "test"), note(root / "train" / "0.png.json", "{}")), r"0\.png\.json: may"),
        (lambda root: (images(root, "img"), note(root / "a.jsonl", '{"file": "x/1.png", "y": 1}')), r"a\.jsonl: may"),
        (lambda root: (images(root, "."), note(root / "a.txt", "0.png 0\n1.png 1\n")), r"a\.txt: may say"),
        (lambda root: images(root, "nut/Imgs", "bolt/Imgs"), "has folders of images .bolt, nut., and none is called"),
        (lambda root: images(root, "good", "dent", "dent_mask"), r"dent_mask: is called as masks of dent are; move it"),
        (lambda root: named(root, "bad-1", "good-1"), r"good-1\.png is called as normal .*, and bad-1\.png is not"),
        (lambda root: named(root, "1_not_ok", "1_ok"), r"1_ok\.png is called as normal .*, and 1_not_ok\.png is not"),
        (lambda root: (coco(root, "a.json", "images"), (root / "a.json").write_text("{")), r"a\.json: cannot be read"),
    ],
)  # fmt: skip
def test_what_is_not_recognised_is_one_line(tmp_path, make, said):
    make(tmp_path / "set")
    with refusal(said):
        recognise(tmp_path / "set")


@pytest.mark.parametrize(
    ("column", "normal"),
    [
        ("is_good", "1"), ("isNormal", "1"), ("OK?", "1"), ("part quality ok", "1"), ("no_defect", "1"),
        ("accepted", "1"), ("not_good", "0"), ("is_defective", "0"), ("io_error", "0"),
    ],
)  # fmt: skip
def test_a_column_of_yes_and_no_says_yes_of_what_it_is_called_after(tmp_path, column, normal):
    table(tmp_path / "set", f"id,{column}", lambda i: i % 2)
    assert recognise(tmp_path / "set").settings["normal"] == [normal]


def test_a_split_that_a_table_gives_is_said_to_be_left_out(tmp_path):
    table(tmp_path / "set", "id,label,part", lambda i: f"{i % 2},{'Train' if i < 3 else 'test'}")
    assert "column part is not read: images are split anew" in recognise(tmp_path / "set").seen


def test_a_text_that_names_no_image_is_no_label(tmp_path):
    named(tmp_path / "set", "ok_1", "ok_2", "ok_3")
    note(tmp_path / "set" / "LICENSE.txt", "CC0")
    assert "all normal" in recognise(tmp_path / "set").seen


def test_a_set_has_the_name_that_is_given(tmp_path):
    mvtec(tmp_path / "set")
    with pytest.warns(UserWarning, match="data=auto saw"):
        assert auto(tmp_path / "set", "mine").name == "mine"


def test_a_table_that_names_no_image_is_said_to_be_left_out(tmp_path):
    images(tmp_path / "set", "ok", "bad")
    (tmp_path / "set" / "sizes.csv").write_text("name,size\nx,1\n")
    with pytest.warns(UserWarning, match=r"sizes\.csv: is not read"):
        assert recognise(tmp_path / "set").data == "folders"


def test_the_command_prints_what_it_saw_and_what_to_run(tmp_path, capsys):
    images(tmp_path / "my set", "ok", "bad (1)")
    assert cli.main(["data", "init", str(tmp_path / "my set")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "normal images in ok, anomalous ones in bad (1)" in printed
    assert "data=folders" in printed
    assert cli.main(["data", "init", str(tmp_path / "none")]) == 2


def test_names_of_files_are_listed_once_however_many_columns_may_name_them(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"images/i{number}.png")
    rows = [f"i{number}.png,i{number},{number},{'ok' if number else 'bad'}" for number in range(4)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,stem,row,finding", *rows]))
    written = []
    monkeypatch.setattr(
        labelled_csv_module, "normalize", lambda form, word: written.append(word) or normalize(form, word)
    )
    assert recognise(tmp_path).settings["id_column"] == "file"
    assert written.count("images/i0.png") == 1

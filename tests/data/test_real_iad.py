import json
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.anomaly_sets import real_iad
from lit_fedad.data.check import check

JSONS = "realiad_jsons/realiad_jsons"


def entry(root: Path, product: str, image: str, kind: str, value: int) -> dict:
    """Paints an image, and a mask where there is a defect; returns its entry of a split file."""
    folder = root / "realiad_1024" / product
    picture(folder / image, (value, 90, 90))
    mask = None
    if kind != "OK":
        mask = image.replace(".jpg", ".png")
        picture(folder / mask, 0, mark=255)
    return {"category": product, "anomaly_class": kind, "image_path": image, "mask_path": mask}


def write(root: Path, product: str, train: list, test: list) -> Path:
    table = root / JSONS / f"{product}.json"
    table.parent.mkdir(parents=True, exist_ok=True)
    meta = {"prefix": f"{product}/", "normal_class": "OK", "pre_transform": False}
    table.write_text(json.dumps({"meta": meta, "train": train, "test": test}))
    return table


@pytest.fixture
def root(tmp_path):
    for number, product in enumerate(("audiojack", "usb")):
        ok = [
            entry(tmp_path, product, f"OK/S000{i}/{product}_000{i}_OK_C1.jpg", "OK", 10 * number + i)
            for i in range(3)
        ]
        bad = entry(tmp_path, product, f"NG/BX/S0009/{product}_0009_NG_BX_C2.jpg", "BX", 100 + number)
        write(tmp_path, product, ok[:2], [ok[2], bad])
    return tmp_path


def test_the_split_is_that_of_the_files(root):
    images = real_iad(root)
    assert images.categories == ["audiojack", "usb"]
    assert [len(images.train), len(images.test)] == [4, 4]
    bad = [sample for sample in images.test if sample.label]
    assert [(sample.category, sample.defect) for sample in bad] == [("audiojack", "BX"), ("usb", "BX")]
    assert bad[1].path == root / "realiad_1024/usb/NG/BX/S0009/usb_0009_NG_BX_C2.jpg"
    assert bad[1].mask == bad[1].path.with_suffix(".png")
    assert check(images) == []
    assert real_iad(root, products=["usb"]).categories == ["usb"]


def test_the_configuration_reads_it(root):
    assert build(compose(["data=real_iad", f"data.root={root}"])["data"]) == real_iad(root)


def test_what_is_missing_is_one_line(root):
    refused("holds no JSON file", real_iad, root, split="realiad_jsons/realiad_jsons_sv")
    refused("no product 'usb_2'; the nearest is 'usb'", real_iad, root, products=["usb_2"])
    refused(
        r"which is not there \(10 of 10 files missing\); check data.images",
        real_iad,
        root,
        images="realiad_256",
    )


def test_other_files_are_refused(root):
    table = root / JSONS / "usb.json"
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[1]", "is no split file of Real-IAD"),
        ('{"meta": {"normal_class": "OK"}, "train": []}', "is no split file of Real-IAD"),
    ):
        table.write_text(text)
        refused(message, real_iad, root)
    for path in ("../../secret.jpg", "/etc/secret.jpg"):
        write(root, "usb", [{"anomaly_class": "OK", "image_path": path}], [])
        refused("usb.json: .* lies outside of the folder of images", real_iad, root)
    write(root, "usb", [{"anomaly_class": "OK", "image_path": 7}], [])
    refused("is no split file of Real-IAD", real_iad, root)
    write(root, "usb", ["x"], [])
    refused("is no split file of Real-IAD", real_iad, root)


def test_a_split_that_trains_on_defects_is_refused(root):
    bad = json.loads((root / JSONS / "usb.json").read_text())["test"][1]
    write(root, "usb", [bad], [bad])
    refused("shows 'BX', but is for training; use another data.split", real_iad, root)

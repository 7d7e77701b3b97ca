import json

import pytest
from helpers.refusals import refused

from lit_fedad.data.anomaly_sets import medianomaly

# The file in circulation also lists images whose labels one method hides; they are no part of the benchmark.
SPLIT = {
    "train": {"0": ["b.png", "a.png"], "unlabeled": {"0": ["u.png"], "1": ["v.png"]}},
    "test": {"0": ["c.png"], "1": ["e.png", "d.png"]},
}


@pytest.fixture
def pack(tmp_path):
    """Writes a set in MedIAnomaly's form."""

    def write(split, files="abcdeuv"):
        root = tmp_path / "RSNA"
        (root / "images").mkdir(parents=True)
        for file in files:
            (root / "images" / f"{file}.png").touch()
        (root / "data.json").write_text(split if isinstance(split, str) else json.dumps(split))
        return root

    return write


def test_the_split_is_that_of_the_file(pack):
    root = pack(SPLIT)
    images = medianomaly(root)
    assert images.name == "RSNA"
    assert images.categories == ["RSNA"]
    assert [sample.path for sample in images.train] == [root / "images" / "b.png", root / "images" / "a.png"]
    assert [(sample.path.name, sample.label) for sample in images.test] == [
        ("c.png", 0),
        ("e.png", 1),
        ("d.png", 1),
    ]
    assert all(sample.label == 0 for sample in images.train)
    assert not images.has_masks
    assert medianomaly(str(root), name="chest").categories == ["chest"]


def test_a_missing_file_of_the_split_is_named(pack, tmp_path):
    refused(r"RSNA/data\.json: no such file", medianomaly, tmp_path / "RSNA")
    pack(SPLIT)
    refused(r"data\.json: no such file", medianomaly, tmp_path)


def test_missing_images_are_counted(pack):
    refused(
        r"data\.json: names .*images/b\.png, which is not there \(2 of 5 files missing\)",
        medianomaly,
        pack(SPLIT, files="ace"),
    )


@pytest.mark.parametrize(
    "split",
    [
        {},
        [],
        {"train": {"0": []}},
        {"train": {"0": []}, "test": {"0": []}},
        {"train": [], "test": []},
        {**SPLIT, "train": {"0": [["a.png"]]}},
        {**SPLIT, "test": {"0": [1], "1": []}},
    ],
)
def test_other_forms_are_refused(pack, split):
    refused(
        r"data\.json: needs lists of file names under train\.0, test\.0 and test\.1", medianomaly, pack(split)
    )


def test_a_broken_file_is_refused(pack):
    refused(r"data\.json: cannot be read as JSON: Expecting", medianomaly, pack('{"train": {"0": ['))


@pytest.mark.parametrize("label", ["0", "1"])
def test_an_image_may_not_be_on_both_sides(pack, label):
    split = {**SPLIT, "test": {**SPLIT["test"], label: ["a.png"]}}
    refused(r"lists a\.png for training and for testing", medianomaly, pack(split))


def test_a_file_outside_of_the_set_is_refused(pack):
    refused(r"'\.\./a\.png' lies outside", medianomaly, pack({**SPLIT, "train": {"0": ["../a.png"]}}))

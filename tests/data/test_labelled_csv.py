import pytest
from helpers.refusals import refused

from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled_csv import labelled_csv


@pytest.fixture
def head_ct(tmp_path):
    """HeadCT as Kaggle has it: 200 images, the first half with a haemorrhage, a blank in the header."""
    root = tmp_path / "HeadCT"
    (root / "head_ct" / "head_ct").mkdir(parents=True)
    for i in range(200):
        (root / "head_ct" / "head_ct" / f"{i:03}.png").touch()
    rows = [f"{i},{int(i < 100)}" for i in range(200)]
    (root / "labels.csv").write_text("\n".join(["id, hemorrhage", *rows]))
    return root


def read_head_ct(root, **changes):
    arguments = {
        "labels": "labels.csv",
        "images": "head_ct/head_ct",
        "id_column": "id",
        "label_column": "hemorrhage",
        "normal": [0],
    }
    return labelled_csv(root, **{**arguments, **changes})


@pytest.fixture
def table(tmp_path):
    """Reads a table of (image, label) rows with a PNG for every image, all normal ones in the test set but a few."""

    def read(rows, files=None, **changes):
        root = tmp_path / "set"
        (root / "images").mkdir(parents=True, exist_ok=True)
        for file in {f"{image}.png" for image, _ in rows} if files is None else files:
            (root / "images" / file).touch()
        (root / "train.csv").write_text("\n".join(["image,finding,x", *(f'{i},"{f}",7' for i, f in rows)]))
        arguments = {"id_column": "image", "label_column": "finding", "normal": ["No finding"]}
        return labelled_csv(root, "train.csv", "images", **{**arguments, **changes})

    return read


def labels(images):
    """Image -> defect, over both sides."""
    return {sample.path.stem: sample.defect for sample in (*images.train, *images.test)}


def test_head_ct_is_split_without_leakage(head_ct):
    images = read_head_ct(head_ct)
    train, test = ([int(sample.path.stem) for sample in side] for side in (images.train, images.test))
    assert images.categories == [images.name] == ["HeadCT"]
    assert len(train) == 75
    assert min(train) >= 100
    assert sorted(train + test) == list(range(200))
    assert {i for i in test if i < 100} == {int(sample.path.stem) for sample in images.test if sample.label}
    assert sum(sample.label for sample in images.test) == 100
    assert not any(sample.label for sample in images.train)
    # A draw, not simply the first ones.
    assert train != list(range(100, 175))
    assert train == sorted(train)


def test_the_split_depends_on_the_seed_and_on_nothing_else(head_ct):
    images = read_head_ct(head_ct, seed=1)
    assert images == read_head_ct(head_ct, seed=1)
    assert images.train != read_head_ct(head_ct, seed=2).train
    header, *rows = (head_ct / "labels.csv").read_text().splitlines()
    (head_ct / "labels.csv").write_text("\n".join([header, *reversed(rows)]) + "\n")
    assert images == read_head_ct(head_ct, seed=1)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.9, 90), (0.123, 12)])
def test_the_share_is_that_of_normal_images(head_ct, share, expected):
    images = read_head_ct(head_ct, train_share=share)
    assert len(images.train) == expected
    assert sum(not sample.label for sample in images.test) == 100 - expected


@pytest.mark.parametrize("share", [0, 1, -0.5, 75])
def test_a_share_out_of_range_is_refused(head_ct, share):
    refused(f"train_share={share}: give a number between 0 and 1", read_head_ct, head_ct, train_share=share)


def test_an_image_is_anomalous_if_any_row_is(table):
    """VinDr-CXR: a row for each finding of each of three readers."""
    rows = [
        *[("healthy", "No finding")] * 3,
        ("seen by one", "No finding"), ("seen by one", "No finding"), ("seen by one", "Nodule/Mass"),
        ("many", "Cardiomegaly"), ("many", "Aortic enlargement"), ("many", "Aortic enlargement"),
    ]  # fmt: skip
    assert labels(table(rows)) == {
        "healthy": "good",
        "seen by one": "Nodule/Mass",
        "many": "Aortic enlargement",
    }


def test_images_that_are_neither_are_left_out(table):
    """RSNA: of three classes, one is neither healthy nor pneumonia. Left-out images need no file."""
    rows = [
        ("a", "Normal"), ("b", "Lung Opacity"), ("b", "Lung Opacity"), ("c", "No Lung Opacity / Not Normal"),
    ]  # fmt: skip
    images = table(rows, files=["a.png", "b.png"], normal=["Normal"], anomalous=["Lung Opacity"])
    assert labels(images) == {"a": "good", "b": "Lung Opacity"}
    images = table(rows, normal=["Normal"])
    assert labels(images)["c"] == "No Lung Opacity / Not Normal"
    images = table(
        [*rows, ("a", "No Lung Opacity / Not Normal")], normal=["Normal"], anomalous=["Lung Opacity"]
    )
    assert "a" not in labels(images)


def test_ids_may_carry_suffixes_and_images_may_have_no_row(table):
    images = table(
        [("1.2.840.5", "No finding"), ("scan.JPG", "Mass"), ("007.png", "Mass")],
        files=["1.2.840.5.png", "scan.JPG", "7.jpeg", "unlabelled.png"],
    )
    assert labels(images) == {"1.2.840.5": "good", "scan": "Mass", "7": "Mass"}


def test_ids_are_compared_as_written_and_collisions_are_one_line(table):
    with pytest.raises(UserError, match=r"'07' and '7' both are .*007\.png"):
        table([("07", "No finding"), ("7", "Mass")], files=["007.png"])
    images = table([("07", "No finding"), ("7", "Mass")], files=["007.png", "7.png", "07.png"])
    assert labels(images) == {"07": "good", "7": "Mass"}
    with pytest.raises(UserError, match=r"'a' may be .*a\.jpg or .*a\.png"):
        table([("a", "No finding")], files=["a.png", "a.jpg"])


def test_labels_that_only_their_case_tells_apart_are_one_line(table):
    rows = [("a", "No finding"), ("b", "No Finding"), ("c", "mass"), ("d", "No finding")]
    refused("'No Finding' would be anomalous and 'No finding' normal; give both as normal", table, rows)
    assert set(labels(table(rows, normal=["No finding", "No Finding"])).values()) == {"good", "mass"}


@pytest.mark.parametrize("label", ["", " ", "NaN", "nan", "None", "null", "NA"])
def test_an_empty_label_is_no_label(table, label):
    with pytest.warns(UserWarning, match=r"1 of 3 rows have no .* left out, first row 2"):
        images = table([("a", "No finding"), ("b", label), ("c", "Mass")], files=["a.png", "b.png", "c.png"])
    assert labels(images) == {"a": "good", "c": "Mass"}


def test_a_label_that_is_named_counts_though_others_mean_an_empty_cell(table):
    rows = [("a", "none"), ("b", "NA"), ("c", "Mass"), ("", "NA")]
    with pytest.warns(UserWarning, match="1 of 4 rows have no 'finding' or no 'image'.* first row 4"):
        images = table(rows, files=["a.png", "b.png", "c.png"], normal=["none"], anomalous=["NA"])
    assert labels(images) == {"a": "good", "b": "NA"}


def test_a_column_that_is_read_has_a_name_of_its_own(head_ct):
    file = head_ct / "labels.csv"
    rows = file.read_text().splitlines()[1:]
    file.write_text("\n".join(["id, hemorrhage, x, x", *(f"{row},1,2" for row in rows)]))
    assert len(read_head_ct(head_ct).train) == 75
    file.write_text("\n".join(["id, hemorrhage, hemorrhage", *(f"{row},1" for row in rows)]))
    refused("has two columns 'hemorrhage'; rename one", read_head_ct, head_ct)


def test_blanks_around_a_label_do_not_matter(table):
    assert labels(table([("a", "No finding "), ("b", "Mass")], files=["a.png", "b.png"])) == {
        "a": "good",
        "b": "Mass",
    }


@pytest.mark.parametrize(
    "word", ["a.png", "images/a.png", "images\\a.png", "./a.png", "a", "\u00fc", "{root}/set/images/a.png"]
)
def test_an_id_may_be_a_path_with_either_slash_and_letters_in_either_form(table, tmp_path, word):
    images = table([(word.format(root=tmp_path), 1), ("b", 0)], ["a.png", "b.png", "u\u0308.png"], normal=[0])
    assert [sample.label for sample in images.test] == [1]


def test_whole_numbers_that_were_written_with_decimals_are_the_same_labels(table):
    images = table([("a", "1.0"), ("b", "0.0"), ("c", "0")], normal=[0])
    assert labels(images) == {"a": "1", "b": "good", "c": "good"}


def test_images_without_a_row_are_counted(table):
    with pytest.warns(UserWarning, match="1 of 3 images have no labelled row and are left out"):
        table([("a", 1), ("b", 0)], ["a.png", "b.png", "c.png"], normal=[0])


def test_a_missing_table_is_named(head_ct):
    refused(r"HeadCT/label\.csv: no such file", read_head_ct, head_ct, labels="label.csv")


def test_a_broken_table_is_named(head_ct):
    (head_ct / "labels.csv").write_text("")
    refused(r"labels\.csv: no column 'id' \(id_column\); there are none", read_head_ct, head_ct)
    (head_ct / "labels.csv").write_text("id,hemorrhage\n0,1,2\n")
    refused(r"labels\.csv: cannot be read as CSV: row 1 has more fields", read_head_ct, head_ct)
    (head_ct / "labels.csv").write_bytes(b"id,hemorrhage\n\xff\xfe\x00,1\n")
    refused(r"labels\.csv: cannot be read as CSV", read_head_ct, head_ct)
    (head_ct / "labels.csv").write_text("id,hemorrhage\n")
    refused(r"labels\.csv: no '0' \(normal\) in column 'hemorrhage'; there are none", read_head_ct, head_ct)


@pytest.mark.parametrize(
    ("key", "column", "nearest"), [("label_column", "haemorrhage", "hemorrhage"), ("id_column", "ID.", "id")]
)
def test_an_unknown_column_names_the_nearest(head_ct, key, column, nearest):
    refused(
        rf"no column '{column}' \({key}\); the nearest is '{nearest}'", read_head_ct, head_ct, **{key: column}
    )


def test_an_unknown_label_names_the_nearest(table):
    rows = [("a", "No finding"), ("b", "Mass")]
    refused(
        r"no 'No Finding' \(normal\) in column 'finding'; the nearest is 'No finding'",
        table,
        rows,
        normal=["No Finding"],
    )
    refused(
        r"no 'mass' \(anomalous\) in column 'finding'; the nearest is 'Mass'", table, rows, anomalous=["mass"]
    )


def test_rows_without_an_image_are_counted(table):
    rows = [("a", "No finding"), ("b", "Mass"), ("c", "Mass")]
    refused(r"train\.csv: no image 'b' in .*images \(2 of 3 missing\)", table, rows, files=["a.png"])


def test_dicom_is_found_by_its_stem(table, monkeypatch):
    rows = [("a", "No finding"), ("b", "Mass")]
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: None)
    refused("images: DICOM needs pydicom", table, rows, files=["a.dicom", "b.dcm"])
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: name)
    assert labels(table(rows, files=["a.dicom", "b.dcm"])) == {"a": "good", "b": "Mass"}


def test_images_of_a_patient_are_on_one_side(table):
    rows = [(f"p{patient}_{i}", "No finding") for patient in range(8) for i in range(3)]
    rows += [("p0_9", "Mass"), ("p1_9", "Mass")]
    images = table(rows, group=r"p\d+_", train_share=0.5)
    patients = [
        {sample.path.name.partition("_")[0] for sample in side} for side in (images.train, images.test)
    ]
    assert not patients[0] & patients[1]
    assert {"p0", "p1"} <= patients[1]
    assert len(images.train) == 12  # four of the six patients without a finding
    assert labels(images).keys() == {name for name, _ in rows}
    refused("data.group='x' is not found in", table, rows, group="x")


def test_groups_that_leave_no_image_to_train_on_are_one_line(table):
    normal, ill = [("p0", "No finding"), ("q0", "No finding")], [("p1", "Mass"), ("q1", "Mass")]
    for rows in (normal + ill, [("p0", "No finding"), ("p1", "No finding"), ("q1", "Mass")]):
        refused("no group of normal images is left to train on", table, rows, group=r"[pq](?=\d\.png)")


def test_a_label_called_good_that_is_not_normal_is_anomalous(table):
    rows = [(f"{label}{n}", label) for label in ("excellent", "good", "poor") for n in range(4)]
    images = table(rows, normal=["excellent"])
    assert {sample.name[:-5]: sample.label for sample in (*images.train, *images.test)} == {
        "excellent": 0, "good": 1, "poor": 1
    }  # fmt: skip

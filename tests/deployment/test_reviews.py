"""What an operator says about decisions, written line by line and read again."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.core.text import csv_cell
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.deployment import reviews
from lit_fedad.deployment.new_images import NewImages
from lit_fedad.deployment.reviews import COLUMNS, Reviews, add_review
from lit_fedad.deployment.ui.reading import ScoredFile
from lit_fedad.report.console import Display


def scored(path):
    return ScoredFile(csv_cell(str(path)), 1.5, 0.5, "normal", None)


def test_reviews_are_appended_as_lines(tmp_path):
    image, file = scored("=a.png"), tmp_path / "out/reviews.csv"
    assert not file.exists()
    add_review(file, image, "missed", "run")
    add_review(file, image, "false alarm", "run")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 2
    assert tuple(rows[0]) == COLUMNS
    assert [row["review"] for row in rows] == ["missed", "false alarm"]
    assert rows[0]["path"] == "'=a.png"  # no spreadsheet runs it
    with pytest.raises(UserError, match="cannot be written"):
        add_review(tmp_path, image, "missed", "run")


def test_two_browsers_that_begin_the_file_at_once_write_one_head(tmp_path, monkeypatch):
    file, appended, opened = tmp_path / "reviews.csv", reviews.open_to_append, list[Path]()

    def while_another_reviews(path):
        out = appended(path)
        if not opened:
            opened.append(path)
            add_review(file, scored("b.png"), "missed", "run")
        return out

    monkeypatch.setattr(reviews, "open_to_append", while_another_reviews)
    add_review(file, scored("a.png"), "missed", "run")
    assert Reviews(file).counts() == {"missed": 2}


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_that_was_edited_by_hand_is_continued_in_its_own_columns(tmp_path, start, end):
    file = tmp_path / "reviews.csv"
    file.write_text(f"{start}review,note,path\nmissed,mine,a.png{end}", encoding="utf-8", newline="")
    add_review(file, scored("b.png"), "correct", "run")
    assert Reviews(file).counts() == {"missed": 1, "correct": 1}
    assert file.read_text(encoding="utf-8").splitlines()[-1] == "correct,,b.png"


def test_a_file_of_other_columns_is_left_as_it_is(tmp_path):
    file = tmp_path / "reviews.csv"
    file.write_text("path;review\na.png;missed\n")
    with pytest.raises(
        UserError, match=r"reviews\.csv: has no column path; save it as CSV in UTF-8 with commas"
    ):
        add_review(file, scored("b.png"), "correct", "run")
    assert file.read_text() == "path;review\na.png;missed\n"


def test_the_last_review_counts_by_whole_path_or_by_that_in_the_folder(tmp_path):
    file, folder = tmp_path / "reviews.csv", tmp_path / "images"
    (folder / "new").mkdir(parents=True)
    for name, review in (
        (folder / "a.png", "missed"),
        (folder / "a.png", "false alarm"),
        ("new/b.png", "missed"),
        ("=c.png", "false alarm"),
        ("line\\nbreak.png", "false alarm"),  # as a watch's table names it
    ):
        add_review(file, scored(name), review, "run")
    reviews = Reviews(file)
    assert reviews.of(folder / "a.png", folder) == "false alarm"
    assert reviews.of(folder / "new" / "b.png", folder) == "missed"
    assert reviews.of(folder / "=c.png", folder) == "false alarm"
    assert reviews.of(folder / "line\nbreak.png", folder) == "false alarm"
    assert reviews.of(folder / "b.png", folder) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,score\na.png,1\n", "has no column review; save it as CSV in UTF-8 with commas$"),
        ("path;review\na.png;missed\n", "has no column path; save it as CSV in UTF-8 with commas$"),
        ("path;review\n", "has no column path; save it as CSV in UTF-8 with commas$"),
        ("path,review\na.png,fine\n", "'fine' is none of correct, false alarm, missed, withdrawn"),
        ("path,review\na.png\n", "'None' is none of"),
    ],
)
def test_files_that_are_no_reviews_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "reviews.csv"
    file.write_text(content)
    with refusal(message):
        Reviews(file)
    with pytest.raises(UserError, match="is no table of reviews"):
        Reviews(Path(tmp_path / "nowhere.csv"))


def test_a_withdrawn_review_is_none(tmp_path):
    file = tmp_path / "reviews.csv"
    for path, review in (
        ("a.png", "missed"),
        ("a.png", "withdrawn"),
        ("b.png", "correct"),
        ("c.png", "correct"),
    ):
        add_review(file, SimpleNamespace(path=path, score=1.0, p_value=0.5, decision="normal"), review, "run")
    reviews = Reviews(file)
    assert reviews.of(tmp_path / "a.png", tmp_path) is None
    assert reviews.of(tmp_path / "b.png", tmp_path) == "correct"
    assert reviews.counts() == {"correct": 2}


def test_a_review_of_one_client_s_image_is_none_of_another_s_of_that_name(tmp_path):
    file, root = tmp_path / "reviews.csv", tmp_path / "new"
    for client in range(2):
        (root / str(client)).mkdir(parents=True)
        Image.new("L", (2, 2), client).save(root / str(client) / "a.png")
    search = NewImages(
        folder=root,
        product="nut",
        reviews=str(file),
        force=True,
        clients=[0, 1],
        images=ImageSet("set", (), ()),
        partition=Partition.of_clients([[], []]),
        memo=None,
        display=Display(quiet=True),
    )
    add_review(file, scored("a.png"), "false alarm", "run")
    with pytest.raises(UserError, match="no new image that .* calls a false alarm"):
        search.find()
    add_review(file, scored("0/a.png"), "false alarm", "run")
    assert list(search.find().images) == [0]
    (root / "01").mkdir()
    with pytest.raises(UserError, match="01: is no folder named by a client's number"):
        search.find()

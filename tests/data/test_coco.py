import json

import numpy as np
import pytest
from helpers.refusals import refusal, refused
from matplotlib.path import Path as Outline
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.vision import AnnotatedImage, read_coco, write_masks


def drawn(tmp_path, *annotations, width=16, height=12):
    mask = AnnotatedImage(tmp_path / "a.png", width, height, "dent", annotations).mask()
    assert mask.dtype == np.uint8
    assert set(np.unique(mask)) <= {0, 255}
    return mask > 0


def inside(corners, width=16, height=12):
    """Pixels whose centre lies inside, by matplotlib's test."""
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    return Outline(np.reshape(corners, (-1, 2))).contains_points(points).reshape(height, width)


def test_a_rectangle_is_exact(tmp_path):
    expected = np.zeros((12, 16), dtype=bool)
    expected[3:8, 2:6] = True
    assert (drawn(tmp_path, {"segmentation": [[2, 3, 6, 3, 6, 8, 2, 8]]}) == expected).all()


@pytest.mark.parametrize("seed", range(8))
def test_polygons_cover_the_pixels_whose_centre_is_inside(tmp_path, seed):
    rng = np.random.default_rng(seed)
    angle = np.sort(rng.uniform(0, 2 * np.pi, 7))
    radius = rng.uniform(2, 9, 7)  # some corners lie outside the image
    corners = np.stack([8 + radius * np.cos(angle), 6 + radius * np.sin(angle)], axis=1).ravel().tolist()
    assert (drawn(tmp_path, {"segmentation": [corners]}) == inside(corners)).all()


def test_annotations_and_polygons_are_united(tmp_path):
    first, second, third = ([x, 1, x + 4, 1, x + 4, 5, x, 5] for x in (1, 3, 10))
    found = drawn(tmp_path, {"segmentation": [first, second]}, {"segmentation": [third]})
    assert (found == inside(first) | inside(second) | inside(third)).all()


def compress(lengths):
    """COCO's text form, written from its description: signed base 32, low digit first."""
    text = ""
    for i, length in enumerate(lengths):
        value, more = length - (lengths[i - 2] if i > 2 else 0), True
        while more:
            digit, value = value % 32, value // 32
            more = value != (-1 if digit >= 16 else 0)
            text += chr(48 + digit + 32 * more)
    return text


def test_the_text_form_by_hand():
    assert compress([3, 2, 4]) == "324"
    assert compress([40, 1]) == "X11"  # 40 = 8 + 1 * 32
    assert compress([16, 5, 7, 4]) == "`057O"  # 16 needs a second digit; the fourth is 4 - 5 = -1


@pytest.mark.parametrize("density", [0.02, 0.3, 0.9])
def test_run_lengths_go_down_the_columns(tmp_path, density):
    expected = np.random.default_rng(1).random((40, 30)) < density
    expected[-1, -1] = True
    column = expected.ravel(order="F")
    edges = np.flatnonzero(np.diff(column)) + 1
    lengths = np.diff([0, *edges, column.size]).tolist()
    lengths = [0, *lengths] if column[0] else lengths
    for counts in (lengths, compress(lengths)):
        segmentation = {"counts": counts, "size": [40, 30]}
        assert (drawn(tmp_path, {"segmentation": segmentation}, width=30, height=40) == expected).all()


@pytest.mark.parametrize("segmentation", [None, [], [[3.2, 4.1, 3.3, 4.2]], [[2.1, 2.1, 2.3, 2.1, 2.2, 2.3]]])
def test_a_box_stands_in_for_what_covers_no_pixel(tmp_path, segmentation):
    expected = np.zeros((12, 16), dtype=bool)
    expected[4:7, 3:9] = True
    annotation = {"bbox": [3.5, 4.25, 5.0, 2.5], "segmentation": segmentation}
    assert (drawn(tmp_path, annotation) == expected).all()
    at_the_edge = drawn(tmp_path, {"bbox": [-2, 10, 4, 9]})
    assert np.argwhere(at_the_edge).tolist() == [[10, 0], [10, 1], [11, 0], [11, 1]]


@pytest.mark.parametrize("box", [[3, -10, 5, 5], [-9, 3, 3, 4], [3, 20, 5, 5]])
def test_a_box_beside_its_image_marks_nothing(tmp_path, box):
    assert not drawn(tmp_path, {"bbox": box}).any()


@pytest.mark.parametrize(
    "annotation",
    [
        {"id": 7, "segmentation": [[1, 2, 3]]},
        {"id": 7, "segmentation": {"counts": [3, 4], "size": [12, 16]}},
        {"id": 7},
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path, annotation):
    with refusal(r"a\.png: annotation 7 cannot be drawn"):
        drawn(tmp_path, annotation)


def write(folder, names, annotations=(), categories=("defects", "dent", "hole")):
    for name in names:
        Image.new("L", (16, 12)).save(folder / name)
    file = folder / "_annotations.coco.json"
    file.write_text(
        json.dumps(
            {
                "categories": [{"id": i, "name": name} for i, name in enumerate(categories)],
                "images": [
                    {"id": 10 + i, "file_name": name, "width": 16, "height": 12}
                    for i, name in enumerate(names)
                ],
                "annotations": [
                    {"id": i, "image_id": 10 + image, "category_id": kind}
                    for i, (image, kind) in enumerate(annotations)
                ],
            }
        )
    )
    return file


def test_images_are_called_after_their_most_frequent_defect(tmp_path):
    names = ["c.png", "b.png", "a.png"]
    images = read_coco(write(tmp_path, names, [(0, 2), (0, 1), (0, 1), (2, 2)]))
    assert [image.path for image in images] == [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    assert [image.defect for image in images] == ["hole", "good", "dent"]
    assert [[a["id"] for a in image.annotations] for image in images] == [[3], [], [0, 1, 2]]
    assert (images[0].width, images[0].height) == (16, 12)


def test_files_that_are_missing_or_other_are_named(tmp_path):
    refused(r"none\.json: no such file", read_coco, tmp_path / "none.json")
    file = write(tmp_path, ["a.png", "b.png"])
    (tmp_path / "b.png").unlink()
    refused(r"b\.png, which is not there \(1 of 2 files missing\)", read_coco, file)
    file.write_text(file.read_text().replace("b.png", "b" * 300))
    refused("is too long for a path", read_coco, file)
    file.write_text('{"images": []}')
    refused("is no COCO annotation file .no key 'categories'", read_coco, file)
    for content in (
        "[]",
        '{"categories": [], "annotations": [], "images": ["a.png"]}',
        '{"categories": [1]}',
    ):
        file.write_text(content)
        refused("is no COCO annotation file", read_coco, file)
    file.write_text('{"categories": [\n')
    refused("cannot be read as JSON", read_coco, file)


def test_all_images_whose_annotations_cannot_be_drawn_are_named_at_once(tmp_path):
    """Whoever corrects them need not start again for each."""
    bad, whole = {"id": 1, "segmentation": [[1, 2, 3]]}, {"id": 2, "bbox": [0, 0, 2, 2]}
    drawings = {
        tmp_path / f"{name}.mask": AnnotatedImage(tmp_path / f"{name}.png", 4, 4, "dent", annotations)
        for name, annotations in (("a", (bad, {**bad, "id": 5})), ("b", (whole,)), ("c", (bad,)))
    }
    with pytest.raises(UserError, match=r"a\.png: annotation 1, 5 cannot .*further .* \(1\): c\.png$"):
        write_masks(drawings)
    assert [path.name for path in tmp_path.iterdir()] == ["b.mask"]


@pytest.mark.parametrize(
    "annotation",
    [
        {"segmentation": {"counts": [10**15, 3]}},
        {"segmentation": {"counts": [-1, 193]}},
        {"segmentation": {"counts": "o" * 100_000}},
        {"segmentation": [], "bbox": [0, 0, float("inf"), 3]},
    ],
)
def test_an_annotation_beyond_its_image_is_refused(tmp_path, annotation):
    with pytest.raises(UserError, match=r"a\.png: annotation .* cannot be drawn"):
        drawn(tmp_path, annotation)


@pytest.mark.parametrize(
    ("part", "key", "value", "problem"),
    [
        ("annotations", "image_id", "10", "an annotation is of image '10', which is not listed"),
        ("images", "id", 11, "image 11 is listed twice"),
        ("images", "file_name", "b.png", "image 'b.png' is listed twice"),
    ],
)
def test_an_image_that_its_annotations_do_not_find_is_not_taken_for_normal(
    tmp_path, part, key, value, problem
):
    file = write(tmp_path, ["a.png", "b.png"], [(0, 1)])
    content = json.loads(file.read_text())
    content[part][0][key] = value
    file.write_text(json.dumps(content))
    refused(problem, read_coco, file)


@pytest.mark.parametrize("name", ["good", "No Defect"])
def test_annotations_of_what_is_normal_are_refused(tmp_path, name):
    file = write(tmp_path, ["a.png", "b.png"], [(0, 1), (1, 0)], categories=(name, "dent"))
    refused(f"annotations of '{name}' mark what is normal", read_coco, file)
    assert len(read_coco(write(tmp_path, ["a.png"], [(0, 1)], categories=(name, "dent")))) == 1

"""The data command: what it prints, and its exit status."""

import shutil

import numpy as np
import pytest
from PIL import Image

from lit_fedad.core.config_groups import choices
from lit_fedad.data.cards import CARDS, Card, Counts, Source
from lit_fedad.report.console import Display


@pytest.fixture
def say(say):
    """Runs the data command; returns its exit status, output lines and error lines."""
    return lambda *arguments: say("data", *map(str, arguments))


def picture(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


DENT = np.zeros((6, 8), np.uint8)
DENT[2:4, 3:6] = 255


@pytest.fixture
def tree(tmp_path):
    """MPDD's six products with 3 training, 2 good and 1 anomalous image each."""
    draw = np.random.default_rng(0)
    for product in CARDS["mpdd"].counts:
        parts = {"train/good": 3, "test/good": 2, "test/dent": 1}
        for part, number in parts.items():
            for i in range(number):
                picture(tmp_path / product / part / f"{i}.png", draw.integers(0, 256, (6, 8), np.uint8))
        picture(tmp_path / product / "ground_truth/dent/0_mask.png", DENT)
    return tmp_path


@pytest.fixture
def small_card(monkeypatch):
    """A card of MPDD that fits the tree."""
    counts = dict.fromkeys(CARDS["mpdd"].counts, Counts(3, 2, 1))
    source = Source("Small parts", "https://example.org/parts", "CC0", "nobody, 1999")
    monkeypatch.setitem(CARDS, "mpdd", Card("parts", "detection", (source, source), counts))


def test_every_configuration_is_one_line(say):
    status, out, err = say("list")
    assert (status, err) == (0, [])
    lines = {line.split()[0]: line for line in out[1:]}
    assert list(lines) == choices("data")
    assert lines["mvtec_textures"].split("   ")[0] == "mvtec_textures"
    for part in (
        "textures of MVTec AD",
        "detection, localisation",
        "CC BY-NC-SA 4.0",
        "https://www.mvtec.com",
    ):
        assert part in lines["mvtec_textures"]
    assert "your own images" in lines["mvtec_mixture"]
    assert lines["semantic_cifar10"].count("https://") == 1  # CIFAR-10 and CIFAR-100 have one page


def test_a_whole_download(say, tree, small_card):
    status, out, err = say("check", "mpdd", f"root={tree}")
    assert (status, err) == (0, [])
    assert out[0] == "Files ..."
    lines = [" ".join(line.split()) for line in out[1:8]]
    assert lines[0] == "product train test good test anomalous with mask problems"
    assert lines[1:] == [f"{product} 3 of 3 2 of 2 1 of 1 1 0" for product in CARDS["mpdd"].counts]
    card = [
        "",
        "set      Small parts",
        "from     https://example.org/parts",
        "licence  CC0",
        "paper    nobody, 1999",
    ]
    assert out[8:] == [*card, *card]


def test_all_that_is_wrong_is_printed_and_the_first_of_it_closes(say, tree, small_card):
    broken = tree / "connector/train/good/1.png"
    broken.write_bytes(b"")
    empty = tree / "bracket_white/ground_truth/dent/0_mask.png"
    picture(empty, np.zeros((6, 8), np.uint8))
    wrong_size = tree / "metal_plate/ground_truth/dent/0_mask.png"
    picture(wrong_size, DENT.T)
    leaked = tree / "tubes/test/good/1.png"
    shutil.copy(tree / "tubes/train/good/2.png", leaked)
    (tree / "bracket_black/train/good/0.png").unlink()
    status, out, err = say("check", "mpdd", f"data.root={tree}")
    assert status == 2
    assert len(err) == 1
    assert err[0].startswith(f"error: mpdd: 5 problems, first: {broken}: cannot be read")
    rows = {line.split()[0]: line.split()[-1] for line in out[2:8]}
    assert rows == dict.fromkeys(CARDS["mpdd"].counts, "1") | {"bracket_brown": "0"}
    assert [line.split(":")[0] for line in out[8:13]] == [
        *map(str, (broken, empty, wrong_size, leaked)),
        "bracket_black",
    ]
    assert out[13:15] == ["", "set      Small parts"]


def test_a_single_problem(say, tree, small_card):
    (tree / "tubes/test/good/0.png").unlink()
    _, _, err = say("check", "mpdd", f"root={tree}")
    assert err == [
        "error: mpdd: 1 problem: tubes: 3 / 1 / 1 images (train / good / anomalous), officially 3 / 2 / 1"
    ]


def test_twenty_problems_are_printed_and_the_others_counted(say, tree, small_card):
    images = sorted(tree.rglob("good/*.png"))
    for path in images[:23]:
        path.write_bytes(b"")
    status, out, err = say("check", "mpdd", f"root={tree}")
    assert status == 2
    assert "23 problems" in err[0]
    assert sum("cannot be read" in line for line in out) == 20
    assert out[28] == "... and 3 more problems"


def test_official_sizes_are_no_matter_of_a_subset(say, tree):
    assert say("check", "mpdd", f"root={tree}")[0] == 2
    assert say("check", "mpdd", f"root={tree}", "train_per_product=2")[0] == 0


def test_a_configuration_without_a_card_is_checked_too(say, tree):
    status, out, _ = say("check", "mvtec_mixture", f"root={tree}", "products=[tubes,connector]")
    assert status == 0
    assert [line.split() for line in out[2:]] == [["tubes", *"32110"], ["connector", *"32110"]]
    (tree / "tubes/train/good/0.png").write_bytes(b"")
    assert say("check", "mvtec_mixture", f"root={tree}")[0] == 2


def test_labelled_sets_are_counted(say, tmp_path):
    labels = {"train": np.array([0, 1, 1, 1]), "test": np.array([1, 0])}
    for part, values in labels.items():
        images = np.zeros((len(values), 4, 4), np.uint8)
        np.savez(tmp_path / f"{part}.npz", images=images, labels=values, classes=np.array(["cat", "dog"]))
    status, out, err = say("check", "packed", f"root={tmp_path}", "train=train.npz", "test=test.npz")
    assert (status, err) == (0, [])
    assert [line.split() for line in out] == [
        ["class", "train", "test"],
        ["cat", "1", "1"],
        ["dog", "3", "1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("check", "mvtec_texture", "root=x"),
            "data has no option 'mvtec_texture'; did you mean 'mvtec_textures'?",
        ),
        (("check", "mpdd", "rot=x"), "unknown key 'data.rot'; did you mean 'data.root'?"),
        (("check", "mpdd", "x"), "'x' is not of the form key=value"),
        (("check", "mpdd"), "'data.root' must be given: data.root=..."),
        (("check",), "data check takes the name of data first: data check NAME root=DIR"),
        (("check", "root=x"), "data check takes the name of data first: data check NAME root=DIR"),
        (("init", ""), "data init takes one folder: data init DIR"),
        (
            ("check", "mvtec", "root="),
            "data.root=: an empty path, as of a shell variable that is not set; give one",
        ),
        (
            ("check", "mvtec_mixture", "root=x", "products=nut,bolt"),
            "data.products='nut,bolt' must be list or null; give [nut,bolt]",
        ),
        (("init",), "data init takes one folder: data init DIR"),
        (("chek", "mpdd"), "the data command is: data list, data check, data init"),
    ],
)
def test_bad_input_is_one_line(say, arguments, message):
    assert say(*arguments) == (2, [], [f"error: {message}"])


def test_table_lines_are_whole_and_columns_of_numbers_are_right_aligned(capsys):
    long = "x" * 300
    Display().table(
        [{"name": "a", "n": "7", "note": long}, {"name": "bcdef", "n": "1234", "note": "[b] :x:"}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "name       n   note",
        f"a          7   {long}",
        "bcdef   1234   [b] :x:",
    ]

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data import textures as module
from lit_fedad.data.surfaces import SURFACES
from lit_fedad.data.textures import DEFECTS, textures

SMALL = {"size": 48, "train_per_product": 2, "test_per_product": 4}


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def only_folder(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small set, drawn once for the tests that only read it."""
    root = tmp_path_factory.mktemp("textures")
    return root, textures(root, **SMALL)


def test_the_set_is_in_mvtec_layout(small):
    root, images = small
    folder = only_folder(root)
    assert folder.name.startswith("textures-")
    assert images.name == "textures"
    assert images.categories == list(SURFACES)
    assert images.has_masks
    assert Counter(sample.category for sample in images.train) == dict.fromkeys(SURFACES, 2)
    assert Counter(sample.label for sample in images.test) == {0: 10, 1: 10}
    assert (folder / "brick" / "ground_truth" / "scratch" / "000_mask.png").is_file()
    for sample in (*images.train, *images.test):
        with Image.open(sample.path) as image:
            assert (image.size, image.mode) == ((48, 48), "RGB")


def test_defaults_draw_every_defect_of_every_product(tmp_path):
    images = textures(tmp_path, size=32, train_per_product=1, test_per_product=10)
    kinds = Counter((sample.category, sample.defect) for sample in images.test if sample.label)
    assert kinds == {(product, defect): 1 for product in SURFACES for defect in DEFECTS}


def test_the_second_call_reads_what_the_first_drew(small, monkeypatch):
    root, images = small
    monkeypatch.setattr(module, "draw", None)
    assert textures(root, **SMALL) == images


def test_another_seed_draws_another_set_beside_the_first(tmp_path):
    first, second = textures(tmp_path, **SMALL), textures(tmp_path, **SMALL, seed=1)
    assert len(list(tmp_path.iterdir())) == 2
    for a, b in zip(first.train, second.train, strict=True):
        assert a.path.read_bytes() != b.path.read_bytes()


def test_a_picture_does_not_depend_on_the_others(small, tmp_path):
    root, _ = small
    few = digest(only_folder(root))
    textures(tmp_path, size=48, train_per_product=3, test_per_product=8)
    many = digest(only_folder(tmp_path))
    assert len(many) > len(few)
    assert {name: many[name] for name in few} == few


def test_no_picture_twice(small):
    contents = [sample.path.read_bytes() for sample in (*small[1].train, *small[1].test)]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("product", SURFACES)
def test_defects_change_the_picture_where_the_mask_says(product, defect, monkeypatch):
    size = 128

    def harmless(image, other, rng):
        return image, DEFECTS_BEFORE[defect](image, other, rng)[1]

    DEFECTS_BEFORE = dict(DEFECTS)
    with_defect, mask = module.draw(product, defect, size, np.random.default_rng(5))
    monkeypatch.setitem(DEFECTS, defect, harmless)
    without, same_mask = module.draw(product, defect, size, np.random.default_rng(5))
    assert np.array_equal(mask, same_mask)
    assert set(np.unique(mask)) == {0, 255}
    assert 0.001 < (mask > 0).mean() < 0.1
    change = np.abs(with_defect.astype(float) - without).mean(axis=2)
    inside, outside = change[mask > 0].mean(), change[mask == 0].mean()
    assert inside > 4
    assert inside > 10 * outside


@pytest.mark.parametrize("product", SURFACES)
def test_a_surface_is_another_at_every_draw_and_alike_at_every_size(product):
    """Halved, a large picture shows nearly what a small one does; another seed shows something else."""
    sizes = {size: SURFACES[product](np.random.default_rng(3), size) for size in (64, 128)}
    other = SURFACES[product](np.random.default_rng(4), 64)
    for luminance in (*sizes.values(), other):
        assert luminance.min() > -0.3
        assert luminance.max() < 1.5
        assert luminance.std() > 0.03
    halved = sizes[128].reshape(64, 2, 64, 2).mean(axis=(1, 3))
    alike = np.corrcoef(halved.ravel(), sizes[64].ravel())[0, 1]
    assert alike > 0.6
    assert np.abs(np.corrcoef(other.ravel(), sizes[64].ravel())[0, 1]) < 0.5


def test_no_stone_of_the_heap_is_missing():
    """A gap would show the plane of the stone drawn first, flat black or white over many pixels."""
    for seed in range(5):
        luminance = SURFACES["gravel"](np.random.default_rng(seed), 128)
        assert 0.3 < np.median(luminance) < 0.7
        assert (luminance > 1).mean() < 0.002
        assert (luminance < 0.05).mean() < 0.01


def test_damage_is_noticed_and_repaired(tmp_path):
    images = textures(tmp_path, **SMALL)
    folder = only_folder(tmp_path)
    before = digest(folder)
    images.train[3].path.unlink()
    images.test[-1].path.parent.rename(folder / "elsewhere")
    assert textures(tmp_path, **SMALL) == images
    assert digest(folder) == before


def test_an_interrupted_drawing_leaves_nothing_and_is_redone(tmp_path, monkeypatch):
    drawn = []

    def interrupted(*args):
        drawn.append(args)
        if len(drawn) == 7:
            raise KeyboardInterrupt
        return draw(*args)

    draw = module.draw
    monkeypatch.setattr(module, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        textures(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []
    assert len(textures(tmp_path, **SMALL).train) == 10


def test_the_slower_of_two_processes_takes_the_set_of_the_faster(tmp_path, monkeypatch):
    draw = module.draw

    def overtaken(*args):
        monkeypatch.setattr(module, "draw", draw)
        textures(tmp_path, **SMALL)
        return draw(*args)

    monkeypatch.setattr(module, "draw", overtaken)
    images = textures(tmp_path, **SMALL)
    assert len(images.train) == 10
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_two_processes_at_once(forking, tmp_path):
    folder, logs = tmp_path / "drawn", [tmp_path / f"{number}.log" for number in range(2)]
    writers = [forking.call("helpers.at_once:draw", [str(folder), SMALL], log) for log in logs]
    assert [forking.wait(writer) for writer in writers] == [0, 0], [log.read_text() for log in logs]
    before = digest(only_folder(folder))
    textures(folder, **SMALL)
    assert digest(only_folder(folder)) == before


def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("LIT_FEDAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert textures(**SMALL).train[0].path.is_relative_to(tmp_path / "xdg" / "lit_fedad")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert textures(**SMALL).train[0].path.is_relative_to(tmp_path / "home" / ".cache" / "lit_fedad")
    monkeypatch.setenv("LIT_FEDAD_CACHE", str(tmp_path / "own"))
    assert textures(**SMALL).train[0].path.is_relative_to(tmp_path / "own")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/textures-.*choose another root"):
        textures(tmp_path / "file", **SMALL)


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "screws").mkdir()
    with pytest.raises(UserError, match="holds screws, and data=textures draws its pictures"):
        textures(tmp_path, size=32, train_per_product=1, test_per_product=2)
    assert [path.name for path in tmp_path.iterdir()] == ["screws"]


@pytest.mark.parametrize("fields", [{"size": 31}, {"train_per_product": 0}, {"test_per_product": 1}])
def test_numbers_that_are_too_small_are_refused(tmp_path, fields):
    with pytest.raises(UserError, match=f"data.{next(iter(fields))}=.* must be at least"):
        textures(tmp_path, **(SMALL | fields))


def test_another_split_draws_nothing_new(small):
    root, images = small
    redrawn = textures(root, **SMALL, split_seed=1)
    assert {*redrawn.train, *redrawn.test} == {*images.train, *images.test}
    assert set(redrawn.train) != set(images.train)

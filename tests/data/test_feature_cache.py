import errno
import json
import os
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lit_fedad.core.errors import UserError
from lit_fedad.data import content, feature_cache
from lit_fedad.data.feature_cache import FeatureCache, save_tensors
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform

TRANSFORM = ImageTransform(size=16)
SHAPES = [(3, 8, 8), (3, 4, 4)]


class Extractor:
    """Two pooled copies of the image; counts the batches it is asked for."""

    def __init__(self, scale: float = 1.0, pools: tuple[int, ...] = (2, 4)) -> None:
        self.scale, self.pools, self.batches = scale, pools, 0

    def __call__(self, images: Tensor) -> list[Tensor]:
        self.batches += 1
        return [self.scale * avg_pool2d(images, pool) for pool in self.pools]


def forbidden(images: Tensor) -> list[Tensor]:
    raise AssertionError("features were computed again")


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    folder.mkdir()
    found = []
    for number in range(7):
        path = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
        mask = None
        if number >= 5:
            mask = folder / f"{number}_mask.png"
            marked = np.zeros((16, 16), np.uint8)
            marked[number, :3] = 255
            Image.fromarray(marked).save(mask)
        found.append(Sample(path, "thing", "hole" if mask else "good", mask))
    return found


def make(tmp_path: Path, extractor=None, fingerprint: str = "weights", **options) -> FeatureCache:
    return FeatureCache(tmp_path / "cache", TRANSFORM, extractor or Extractor(), fingerprint, **options)


def filled(tmp_path: Path, samples: list[Sample], **options) -> FeatureCache:
    cache = make(tmp_path, **options)
    cache.fill(samples, batch_size=3)
    return cache


def values(cache: FeatureCache, samples: list[Sample]) -> list[Tensor]:
    return list(cache.dataset(samples).__getitems__(range(len(samples)))["pyramid"])


def expected(samples: list[Sample]) -> list[Tensor]:
    return Extractor()(torch.stack([TRANSFORM.image(sample.path) for sample in samples]))


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for have, want in zip(found, wanted, strict=True):
        assert have.dtype == torch.float32
        assert have.shape == want.shape
        # Half precision keeps 11 significant bits: rounding moves a value by at most 2^-11 of it.
        assert ((have - want).abs() <= want.abs() * 2**-11 + 2**-25).all()


def files(cache: FeatureCache) -> list[Path]:
    return sorted(cache.folder.glob("*/*.safetensors"))


def damage(file: Path, position: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(position)
        byte = handle.read(1)
        handle.seek(position)
        handle.write(bytes([byte[0] ^ 0x40]))


def test_reads_back_what_was_extracted(tmp_path, samples):
    assert_close(values(filled(tmp_path, samples), samples), expected(samples))


def test_second_opening_computes_and_reads_no_image(tmp_path, samples, monkeypatch):
    monkeypatch.setattr(content, "_TICK_NS", 0)  # files that were written just now are known too
    before = values(filled(tmp_path, samples), samples)
    monkeypatch.setattr(content, "_hash", forbidden)
    again = make(tmp_path, extractor=forbidden)
    again.fill(samples)
    assert all(torch.equal(a, b) for a, b in zip(values(again, samples), before, strict=True))


def test_only_what_is_missing_is_computed(tmp_path, samples):
    filled(tmp_path, samples[:4])
    seen = []
    make(tmp_path).fill(samples, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


def test_equal_images_take_one_row(tmp_path, samples):
    copy = tmp_path / "images" / "copy.png"
    copy.write_bytes(samples[0].path.read_bytes())
    both = [samples[0], Sample(copy, "thing"), samples[0]]
    cache = filled(tmp_path, both)
    assert len(files(cache)) == 1
    first, second, third = values(cache, both)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_an_image_that_changes_is_computed_anew(tmp_path, samples):
    filled(tmp_path, samples)
    Image.new("RGB", (16, 16), "red").save(samples[2].path)
    os.utime(samples[2].path, ns=(1, 1))  # whatever the clock's resolution is
    assert_close(values(filled(tmp_path, samples), samples), expected(samples))


def test_other_weights_and_other_transforms_keep_apart(tmp_path, samples):
    cache = filled(tmp_path, samples)
    other = filled(tmp_path, samples, extractor=Extractor(scale=2), fingerprint="other weights")
    resized = FeatureCache(tmp_path / "cache", ImageTransform(size=8), Extractor(), "weights")
    assert len({cache.folder, other.folder, resized.folder}) == 3
    assert_close(values(cache, samples), expected(samples))
    assert_close(values(other, samples), [2 * layer for layer in expected(samples)])


def test_a_row_does_not_depend_on_its_batch(tmp_path, samples):
    sizes = []

    def extractor(images: Tensor) -> list[Tensor]:
        sizes.append(len(images))
        return [images]

    cache = make(tmp_path, extractor=extractor)
    cache.fill(samples, batch_size=5)
    assert set(sizes[1:]) == {5}  # the first call asks for the shapes
    images = torch.stack([TRANSFORM.image(sample.path) for sample in samples])
    assert_close(values(cache, samples), [images])


@pytest.mark.parametrize("position", [-1, 3, 70], ids=["value", "size of the head", "head"])
def test_damaged_files_are_noticed_and_only_they_are_made_again(tmp_path, samples, position):
    cache = filled(tmp_path, samples)
    before = values(cache, samples)
    for file in files(cache)[2:4]:
        damage(file, position % file.stat().st_size)
    os.truncate(files(cache)[5], 100)
    seen = []
    again = make(tmp_path)
    with pytest.warns(UserWarning, match=r"\.safetensors is damaged, 3 in all") as warned:
        again.fill(samples, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert len(warned) == 1
    assert seen == [(3, 3)]
    assert all(torch.equal(a, b) for a, b in zip(values(again, samples), before, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path, extractor=forbidden).fill(samples)


def test_shapes_that_changed_under_the_same_fingerprint_empty_the_cache(tmp_path, samples):
    filled(tmp_path, samples[:5])
    again = make(tmp_path, extractor=Extractor(pools=(2,)))
    with pytest.warns(UserWarning, match="holds other shapes"):
        again.fill(samples)
    assert_close(values(again, samples), expected(samples)[:1])


def test_a_damaged_memo_is_written_again(tmp_path, samples):
    memo = filled(tmp_path, samples).folder.parent / "hashes.json"
    memo.touch()
    for damaged in ("{", "[1]", json.dumps({str(samples[0].path): [1, 2, "no hash"]})):
        memo.write_text(damaged)
        with pytest.warns(UserWarning, match=r"hashes\.json: is damaged"):
            make(tmp_path, extractor=forbidden).fill(samples)


@pytest.mark.slow
def test_two_processes_fill_at_once(forking, tmp_path, samples):
    (tmp_path / "cache").mkdir()
    parts = (("forwards", "backwards", samples[:6]), ("backwards", "forwards", samples[:0:-1]))
    fillers = [
        forking.call(
            "helpers.at_once:fill",
            [str(tmp_path / "cache"), [str(sample.path) for sample in part], name, other],
            tmp_path / f"{name}.log",
        )
        for name, other, part in parts
    ]
    assert [forking.wait(filler) for filler in fillers] == [0, 0]
    cache = make(tmp_path, extractor=forbidden)
    cache.fill(samples)
    assert_close(values(cache, samples), expected(samples))
    assert len(files(cache)) == 7


@pytest.mark.slow
def test_what_a_killed_process_half_wrote_does_not_stay(forking, tmp_path, samples):
    (tmp_path / "cache").mkdir()
    paths = [str(sample.path) for sample in samples]
    killed = forking.call(
        "helpers.at_once:fill_and_be_killed", [str(tmp_path / "cache"), paths], tmp_path / "log"
    )
    assert forking.wait(killed) == 9
    assert [file.read_bytes() for file in (tmp_path / "cache").rglob("*.partial")] == [b"half"]
    filled(tmp_path, samples)
    assert list((tmp_path / "cache").rglob("*.partial")) == []


def test_waiting_for_another_process_is_said(tmp_path, samples, caplog):
    cache = filled(tmp_path, samples[:1])
    held = FileLock(cache.folder / "lock", thread_local=False)
    held.acquire()

    class Impatient(FileLock):
        def acquire(self, timeout=None, **options):
            if timeout is None:
                held.release()
            return super().acquire(timeout=0 if timeout else -1, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "FileLock", Impatient)
        cache.fill(samples)
    assert "waiting for another process" in caplog.text


def test_no_samples_are_an_empty_data_set(tmp_path):
    assert len(filled(tmp_path, []).dataset([])) == 0


def test_features_beyond_half_precision_are_refused(tmp_path, samples):
    def extractor(images: Tensor) -> list[Tensor]:
        bright = (images == TRANSFORM.image(samples[4].path)).flatten(1).all(dim=1)
        return [images + 1e5 * bright[:, None, None, None]]

    with pytest.raises(UserError, match=r"4\.png do not fit half precision"):
        filled(tmp_path, samples, extractor=extractor)


def test_too_little_room_is_said_before_anything_is_computed(tmp_path, samples, monkeypatch):
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match=r"needs 3\.36e-06 GB, the disk has 1e-07 GB left"):
        filled(tmp_path, samples, fingerprint="other weights")


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, samples):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"feature cache .*cache.* cannot be used \(Not a directory\)"):
        filled(tmp_path, samples)


def test_a_file_that_may_grow_no_further_is_an_error_of_the_system(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_tensors({"a": torch.zeros(10_000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_keeps_what_was_written(tmp_path, samples, monkeypatch, error):
    save = feature_cache.save_file

    def full(layers, part, metadata):
        if len(files(make(tmp_path))) == 3:
            raise error
        save(layers, part, metadata)

    monkeypatch.setattr(feature_cache, "save_file", full)
    with pytest.raises(UserError, match=r"cannot be used \(No space left on device\)"):
        filled(tmp_path, samples)
    monkeypatch.setattr(feature_cache, "save_file", save)
    seen = []
    make(tmp_path).fill(samples, batch_size=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 4)]


def test_a_missing_image_is_named(tmp_path, samples):
    samples[3].path.unlink()
    with pytest.raises(UserError, match=r"image .*3\.png cannot be read: No such file"):
        filled(tmp_path, samples)

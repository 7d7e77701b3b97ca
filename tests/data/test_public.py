"""Public images from three sources, and none that a client holds."""

import numpy as np
import pytest
import torch
from helpers.images import encoded
from helpers.refusals import refusal, refused
from PIL import Image

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.motifs import motifs
from lit_fedad.data.public import image_folder, natural, refuse_overlap, synthetic


def pixels(count, side=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def test_synthetic_pictures_follow_the_seed_and_grow():
    some = synthetic(260, 16, seed=3)
    assert some.shape == (260, 3, 16, 16)
    assert some.dtype == torch.uint8
    assert torch.equal(synthetic(300, 16, seed=3)[:260], some)
    assert not torch.equal(synthetic(260, 16, seed=4), some)
    assert len({image.numpy().tobytes() for image in some}) == 260


def test_synthetic_pictures_are_varied_and_coloured():
    values = synthetic(500, 32).float() / 255
    contrast = values.std((2, 3))
    assert contrast.mean() > 0.1
    assert contrast.amax(1).min() > 0.02  # none is flat
    assert values.mean((2, 3)).std(0).min() > 0.08
    # Channels are related but not equal: neither grey nor three unrelated pictures.
    flat = values.flatten(2) - values.flatten(2).mean(2, keepdim=True)
    red_green = torch.nn.functional.cosine_similarity(flat[:, 0], flat[:, 1])
    assert red_green.abs().mean() > 0.2
    assert (red_green < 0.95).float().mean() > 0.8
    # Most have structure: neighbours resemble each other far more than pixels of white noise.
    next_to = torch.nn.functional.cosine_similarity(
        (values - values.mean((2, 3), True))[..., 1:].flatten(1),
        (values - values.mean((2, 3), True))[..., :-1].flatten(1),
    )
    assert next_to.median() > 0.5


@pytest.mark.parametrize(("count", "size"), [(0, 8), (5, 0)])
def test_no_synthetic_picture_is_refused(count, size):
    with pytest.raises(UserError, match=r"public.\w+=0 must be at least 1"):
        synthetic(count, size)


@pytest.fixture
def photographs(tmp_path):
    """Four pictures of one colour each, some in folders below; and files to pass over."""
    for i, name in enumerate(("a.png", "below/b.jpg", "below/deep/c.PNG", "d.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            Image.new("RGB", (20, 10), (50 * i, 100, 200)).save(file, "PNG")
    (tmp_path / ".thumbnails").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / ".thumbnails" / "x.png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_and_those_below_it(photographs):
    images = natural(photographs, 6)
    assert images.shape == (4, 3, 6, 6)
    assert images[:, :, 3, 3].tolist() == [[50 * i, 100, 200] for i in range(4)]
    some = natural(photographs, 6, count=2, seed=1)
    assert len(some) == 2
    assert {tuple(i.flatten().tolist()) for i in some} < {tuple(i.flatten().tolist()) for i in images}


def test_folders_without_images_are_one_line(photographs, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "none", "none: no such folder; correct its name, or"),
        (tmp_path / "empty", "holds no image"),
    ):
        with refusal(message):
            natural(path, 6)
    (tmp_path / "empty" / "broken.png").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"broken.png: cannot be read"):
        natural(tmp_path / "empty", 6)
    with pytest.raises(UserError, match="count=0"):
        natural(photographs, 6, count=0)


@pytest.mark.parametrize(
    "keys",
    [{"images": pixels(5)}, {"images": pixels(5), "labels": np.full(5, -1)}, encoded(pixels(5)),
     {"train_images": pixels(5), "test_images": pixels(2)}],
)  # fmt: skip
def test_packed_images_of_all_forms_need_no_labels(tmp_path, keys):
    np.savez(tmp_path / "p.npz", **keys)
    assert np.array_equal(natural(tmp_path / "p.npz", 8).numpy(), pixels(5).transpose(0, 3, 1, 2))
    assert natural(tmp_path / "p.npz", 4, count=3).shape == (3, 3, 4, 4)


def test_packed_files_without_images_are_one_line(tmp_path):
    np.savez(tmp_path / "p.npz", labels=np.zeros(3))
    with refusal(r"p.npz: no key 'images' or 'jpeg', only labels; pack"):
        natural(tmp_path / "p.npz", 8)
    with pytest.raises(UserError, match=r"q.npz: no such file"):
        natural(tmp_path / "q.npz", 8)
    np.savez(tmp_path / "p.npz", images=pixels(2))
    with pytest.raises(UserError, match="count=-1"):
        natural(tmp_path / "p.npz", 8, count=-1)


def test_an_overlap_is_refused():
    private, public = synthetic(40, 8, seed=1), synthetic(30, 8, seed=2)
    refuse_overlap(public, private, "private")
    almost = private[5].clone()
    almost[0, 0, 0] ^= 1
    refuse_overlap(torch.cat([public, almost[None]]), private, "private")
    mixed = torch.cat([public[:7], private[3:5], public[7:]])
    with pytest.raises(UserError, match=r"public: 2 of 32 images are also in private, the first is image 7;"):
        refuse_overlap(mixed, private.contiguous(memory_format=torch.channels_last), "private")


def test_synthetic_pictures_are_no_motifs():
    public, private = synthetic(200, 32), motifs(train_per_class=10).train_images
    refuse_overlap(public, private, "motifs")


def configured(*overrides):
    return build(compose(["image.size=8", "image.resize=null", *overrides])["public"])


def test_the_configurations_build(photographs, tmp_path):
    np.savez(tmp_path / "p.npz", images=pixels(5))
    assert configured("public=synthetic", "public.count=9").shape == (9, 3, 8, 8)
    assert configured("public=natural", "public.count=9").shape == (9, 3, 8, 8)
    assert configured("public=folder", f"public.root={photographs}", "public.count=3").shape == (3, 3, 8, 8)
    given = (f"public.root={tmp_path}", "public.file=p.npz")
    assert configured("public=packed", *given).shape == (5, 3, 8, 8)


def test_natural_images_are_read_where_they_are_given(photographs, tmp_path):
    np.savez(tmp_path / "images.npz", images=pixels(6))
    assert torch.equal(
        natural(tmp_path / "images.npz", 8, 4, seed=1), natural(tmp_path, 8, 4, seed=1, file="images.npz")
    )
    assert torch.equal(natural(None, 8, 5, seed=2), synthetic(5, 8, seed=2))
    with pytest.raises(UserError, match="public.count=null takes every image"):
        natural(None, 8, None)


def test_the_seed_draws_images_of_folders_and_files(photographs, tmp_path):
    np.savez(tmp_path / "p.npz", images=pixels(4))
    for name, given in (("folder", ()), ("packed", ("public.file=p.npz",))):
        draws = [
            configured(
                f"public={name}",
                f"public.root={photographs}",
                "public.count=2",
                f"public.seed={seed}",
                *given,
            )
            for seed in range(8)
        ]
        assert len({draw.numpy().tobytes() for draw in draws}) > 1


def test_an_image_folder_is_a_class_of_its_own(tmp_path):
    for i, name in enumerate(("seen/a.png", "seen/b.png", "unseen/deep/c.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 20), (0, 90 * i, 0)).save(tmp_path / name)
    images = image_folder(tmp_path, test="unseen", train="seen", size=4, name="own")
    assert (images.name, images.classes) == ("own", ("own",))
    assert images.train_images[:, 1, 0, 0].tolist() == [0, 90]
    assert images.test_images[:, :, 0, 0].tolist() == [[0, 180, 0]]
    assert len(image_folder(tmp_path, test="unseen", train="seen", size=4, train_images=1).train) == 1
    assert len(image_folder(tmp_path, test="unseen").train) == 0
    assert image_folder(tmp_path, test="unseen").classes == (tmp_path.name,)
    refused("unseen: is given for training and for testing", image_folder, tmp_path, "unseen", "unseen")
    refused("none: no such folder", image_folder, tmp_path, "none")
    refused(r"data\.test_images=-1 must be at least 0", image_folder, tmp_path, "unseen", test_images=-1)

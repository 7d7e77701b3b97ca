"""Features of images in memory: computed once, read again, and computed anew where the file is damaged."""

import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.data.frozen_features import FrozenDataset, features_key, frozen_features
from lit_fedad.data.labelled import LabelledTargets

IMAGES = torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Encoder:
    """The mean of each channel's upper half; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, pixels):
        self.calls += 1
        return pixels[:, :, :4].mean((2, 3))


def noisy(pixels):
    return pixels + 0.1 * torch.rand(len(pixels), 1, 1, 1)


TURNS = (0, 0, 1, 2, 3)


def compute(encode, file=None, turns=TURNS, number=5):
    return frozen_features(number, lambda at: IMAGES[at.start : at.stop] / 255, encode, noisy, turns, file)


def test_images_and_turned_views():
    found = compute(Encoder())
    pixels = IMAGES.float() / 255
    torch.testing.assert_close(found.plain.float(), pixels[:, :, :4].mean((2, 3)), rtol=1e-3, atol=1e-3)
    assert found.views.shape == (5, 5, 3)
    for place, turn in enumerate(TURNS):
        turned = torch.rot90(pixels, turn, (2, 3))[:, :, :4].mean((2, 3))
        added = found.views[:, place].float() - turned
        assert (added > -0.002).all()
        assert (added < 0.102).all()
        torch.testing.assert_close(added, added[..., :1].expand_as(added), rtol=0, atol=2e-3)
    assert not torch.equal(found.views[:, 0], found.views[:, 1])


def test_is_computed_once_and_the_same_again(tmp_path):
    file, encode = tmp_path / "folder" / "features.safetensors", Encoder()
    first, calls = compute(encode, file), encode.calls
    again = compute(encode, file)
    assert encode.calls == calls
    assert torch.equal(first.plain, again.plain)
    assert torch.equal(first.views, again.views)
    assert torch.equal(compute(Encoder()).views, first.views)  # without a file


@pytest.mark.parametrize("damage", ["cut", "other form"])
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    file, encode = tmp_path / "features.safetensors", Encoder()
    first = compute(encode, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    else:
        compute(Encoder(), tmp_path / "other.safetensors", turns=(0, 0))
        (tmp_path / "other.safetensors").replace(file)
    with pytest.warns(UserWarning, match="damaged"):
        again = compute(encode, file)
    assert torch.equal(first.views, again.views)
    compute(encode, file)


def test_features_beyond_half_precision_are_refused():
    with pytest.raises(UserError, match="do not fit half precision"):
        compute(lambda pixels: 1e6 + pixels.flatten(1))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="feature cache .*file cannot be used"):
        compute(Encoder(), tmp_path / "file" / "features.safetensors")


def test_the_key_tells_images_and_settings_apart():
    key = features_key(IMAGES, "resnet", 64)
    assert key == features_key(IMAGES.clone(), "resnet", 64)
    changed = IMAGES.clone()
    changed[0, 0, 0, 0] ^= 1
    assert len({key, features_key(changed, "resnet", 64), features_key(IMAGES, "resnet", 32)}) == 3
    files = [b"one", b"two"]
    assert features_key(files, 1) == features_key(list(files), 1) != features_key(files[::-1], 1)


def test_batches_have_features_in_the_place_of_images():
    found = compute(Encoder())
    labels = torch.tensor([0, 1, 2, 3, 0])
    batch = FrozenDataset(found, LabelledTargets(labels, normal_classes=2)).__getitems__([1, 3])
    assert torch.equal(batch["image"], found.plain[[1, 3]].float())
    assert torch.equal(batch["views"], found.views[[1, 3]])
    assert batch["category"].tolist() == [1, 3]
    assert batch["label"].tolist() == [0, 1]
    plain = FrozenDataset(found._replace(views=None), LabelledTargets(labels))[2]
    assert int(plain["label"]) == 2
    assert "views" not in plain
    assert "category" not in plain


def test_turned_images_come_with_the_image_itself_first():
    found = compute(Encoder(), turns=(1, 2, 3))
    data = FrozenDataset(
        found._replace(views=None), LabelledTargets(torch.zeros(5, dtype=torch.int64)), found.views
    )
    batch = data.__getitems__([3, 1])
    assert batch["turned"].shape == (2, 4, 3)
    assert torch.equal(batch["turned"][:, 0], batch["image"])
    assert torch.equal(batch["turned"][:, 1:], found.views[[3, 1]].float())
    assert "views" not in batch

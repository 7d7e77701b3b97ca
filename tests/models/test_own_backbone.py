"""The library's own weights: the file is the one of its card, any backbone falls back to it, and it sees something."""

import hashlib
import re
import runpy
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import build_images
from lit_fedad.models.backbones import OWN_NAME, OWN_WEIGHTS, create_backbone
from lit_fedad.models.scenes import Scenes

CARD = OWN_WEIGHTS.parent / "MODEL_CARD.md"
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_backbone.py"
paired_cells = runpy.run_path(str(SCRIPT))["paired_cells"]


def own(**options):
    return create_backbone(OWN_NAME, weights="own", **options)


def test_the_file_is_the_one_of_its_card():
    [wanted] = re.findall(r"\b[0-9a-f]{64}\b", CARD.read_text())
    assert hashlib.sha256(OWN_WEIGHTS.read_bytes()).hexdigest() == wanted
    assert OWN_WEIGHTS.stat().st_size < 8e6
    assert {value.dtype for value in safetensors.torch.load_file(OWN_WEIGHTS).values()} == {torch.float16}


def test_it_is_loaded_as_it_is_and_says_so():
    backbone, file = own(), safetensors.torch.load_file(OWN_WEIGHTS)
    loaded = {name.removeprefix("features.model."): value for name, value in backbone.state_dict().items()}
    assert file.keys() == {name for name in loaded if not name.endswith("num_batches_tracked")}
    assert all(torch.equal(loaded[name], value.float()) for name, value in file.items())
    assert backbone.provenance["taken"] == "own"
    assert (backbone.channels, backbone.strides) == ((64, 128, 256), (4, 8, 16))


def test_its_configuration_names_it():
    assert build(compose(["backbone=own"])["backbone"]).fingerprint == own().fingerprint


@pytest.mark.parametrize(
    ("name", "layers", "line"),
    [
        (
            "resnet18",
            (1, 2),
            r"backbone.weights=own: these weights are of resnet10t, not resnet18: give backbone=own",
        ),
        (OWN_NAME, (3, 4), r"backbone.layers=\[3, 4\]: resnet10t, backbone=own, ends with layer 3"),
    ],
)
def test_what_it_does_not_hold_is_refused(name, layers, line):
    with pytest.raises(UserError, match=line):
        create_backbone(name, layers, weights="own")


@torch.no_grad()
def found_again(backbone, layer: int) -> float:
    """Share of places whose nearest place in the other views of unseen scenes is their own."""
    first, second, shift = Scenes(size=96, scenes=8, textures=8, shift=8, lighting=1.0, seed=123).views(0)
    maps = [F.normalize(backbone(2 * view - 1)[layer], dim=1) for view in (first, second)]
    draws = torch.Generator().manual_seed(0)
    pairs = paired_cells(maps[0].shape[-1], backbone.strides[layer], shift, 16, draws)
    rows, others = (
        view.flatten(2)[:, :, cells].transpose(1, 2).flatten(0, 1)
        for view, cells in zip(maps, pairs, strict=True)
    )
    return float(((rows @ others.T).argmax(1) == torch.arange(len(rows))).float().mean())


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.slow
def test_it_finds_places_again_that_random_weights_lose(layer):
    with warnings.catch_warnings(action="ignore"):
        random = create_backbone(OWN_NAME, weights="random")
    assert found_again(own(), layer) > 0.15 + found_again(random, layer)


@pytest.mark.slow
def test_the_embedded_textures_are_none_of_its_training():
    """Neither module knows the other: no formula and no number of one is the other's."""
    import lit_fedad.data.textures as painting
    import lit_fedad.models.scenes as textures

    def functions(module):
        return {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        }

    assert not {name.strip("_") for name in functions(painting)} & {
        name.strip("_") for name in functions(textures)
    }
    assert build_images(compose([])).categories == list(painting.SURFACES)
    assert not set(painting.SURFACES) & {family.__name__ for family in textures.FAMILIES}

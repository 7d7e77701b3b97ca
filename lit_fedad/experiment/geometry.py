"""The shape that images are brought to, and the tiles that a backbone sees of them, from the configuration."""

from __future__ import annotations

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import pair
from lit_fedad.core.building import call, locate, takes
from lit_fedad.core.config import TILING, Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.transform import ImageTransform
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.models.tiles import Backbone, TiledPyramid


def image_transform(config: Config, task: Task) -> ImageTransform:
    """Builds the transform from image files to the task's input.

    Pixels are normalised as the task's frozen backbone expects them; labelled sets have their own mean and deviation,
    and a frozen encoder undoes what its section names.
    """
    pooled = isinstance(getattr(task, "encoder", None), FrozenEncoder)
    backbone = None if pooled else getattr(task, "backbone", None)
    expected = {} if backbone is None else {"mean": backbone.mean, "std": backbone.std}
    source = config["data"].get("normal", config["data"])
    own = {key: source[key] for key in ("mean", "std") if key in source}
    given = {key: value for key, value in config["image"].items() if key not in TILING}
    return call(ImageTransform, {**expected, **own, **given}, "image")


def check_geometry(config: Config) -> None:
    """Checks that the task takes images that are not square, or cut into tiles, where they are.

    Raises:
        UserError: If it trains from pixels, or does not know tiles.
    """
    image, task = config["image"], locate(config["task"]["_target_"]).__name__
    height, width = pair("image.size", image["size"])
    if height != width and not takes(config["task"], "backbone"):
        raise UserError(
            f"image.size={image['size']}: task {task} learns from pixels, which needs square images; give one number,"
            " or task=subspace or task=memory_bank"
        )
    if image.get("tile") is not None and not takes(config["task"], "tile"):
        raise UserError(
            f"image.tile={image['tile']}: task {task} does not look at patches of a frozen backbone; leave it out, or"
            " give task=subspace or task=memory_bank"
        )


def tiled(config: Config, backbone: FeaturePyramid) -> Backbone:
    """Returns the backbone, or one that sees images tile by tile.

    Raises:
        UserError: If the image cannot be cut so, or the backbone does not say its strides.
    """
    image = config["image"]
    if image.get("tile") is None:
        return backbone
    if not hasattr(backbone, "strides"):
        raise UserError(
            f"image.tile={image['tile']}: {type(backbone).__name__} does not say its strides; give another backbone"
        )
    return TiledPyramid(backbone, pair("image.size", image["size"]), image["tile"], image.get("overlap"))

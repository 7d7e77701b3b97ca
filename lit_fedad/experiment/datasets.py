"""Training and test images of a run, as its task sees them: pixels, feature maps, or pooled features."""

from __future__ import annotations

from lightning.fabric import Fabric
from torch.utils.data import Dataset

from lit_fedad.contracts import Task
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import ImageDataset
from lit_fedad.data.feature_cache import FeatureCache
from lit_fedad.data.labelled import Images, LabelledDataset, LabelledSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.data.transform import ImageTransform
from lit_fedad.experiment.frozen_data import cache_folder, frozen_datasets, frozen_encoder, pooled_folder
from lit_fedad.federation.processes import all_cores
from lit_fedad.models.tiles import Backbone, TiledPyramid
from lit_fedad.report.console import Display
from lit_fedad.tasks.patches import PatchTask


def build_datasets(
    config: Config,
    images: Images,
    transform: ImageTransform,
    task: Task,
    backbone: Backbone | None,
    fabric: Fabric,
    display: Display,
) -> tuple[Dataset, Dataset]:
    """Builds the training and the test data set, and computes frozen features that are not yet kept."""
    if frozen_encoder(task) is not None:
        return frozen_datasets(images, task, transform, pooled_folder(config), fabric, display)
    if isinstance(images, LabelledSet):
        parts = ((images.train_images, images.train_labels), (images.test_images, images.test_labels))
        normal = images.normal_classes if isinstance(images, SemanticSet) else None
        train, test = (LabelledDataset(*part, images.mean, images.std, normal) for part in parts)
        return train, test
    products = task.products if isinstance(task, PatchTask) else ()
    if backbone is None or not config["cache"]["enabled"]:
        return (
            ImageDataset(images.train, transform, products=products),
            ImageDataset(images.test, transform, with_masks=images.has_masks),
        )
    backbone.to(fabric.device)
    cache = FeatureCache(cache_folder(config), transform, backbone, backbone.fingerprint)
    samples = (*images.train, *images.test)
    batch_size = 1 if isinstance(backbone, TiledPyramid) else 16  # an image is a batch of tiles
    if fabric.is_global_zero:
        with all_cores(fabric), display.progress("Frozen features") as progress:
            cache.fill(samples, batch_size, progress, fabric.device)
    fabric.barrier()
    if not fabric.is_global_zero:
        cache.fill(samples, batch_size, device=fabric.device)
    return (
        cache.dataset(images.train, products=products),
        cache.dataset(images.test, with_masks=images.has_masks),
    )


def check_form(config: Config, images: Images) -> None:
    """Checks sizes and channels of images in memory.

    Raises:
        UserError: If others are configured than they have.
    """
    if not isinstance(images, LabelledSet):
        return
    side = images.train_images.shape[-1]
    if config["image"]["size"] != side:
        raise UserError(
            f"image.size={config['image']['size']}, but the images of {images.name} have {side} pixels a side;"
            f" give image.size={side} image.resize=null"
        )
    if config["image"]["channels"] != images.channels:
        raise UserError(
            f"image.channels={config['image']['channels']}, but the images of {images.name} have"
            f" {images.channels}; give image.channels={images.channels}"
        )

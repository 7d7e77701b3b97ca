"""Builds the data sets of a run as its task sees the images (pixels, tiles or frozen features), and hashes them."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import Dataset

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import pair
from lit_fedad.core.building import call, locate, takes
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home, user_cache
from lit_fedad.core.identity import TILING
from lit_fedad.core.sizes import pixel_statistics
from lit_fedad.data.content import content_hashes
from lit_fedad.data.datamodule import ImageDataset, Targets
from lit_fedad.data.feature_cache import HASHES, FeatureCache
from lit_fedad.data.frozen_features import FrozenDataset, FrozenFeatures, features_key, frozen_features
from lit_fedad.data.image_files import images_in
from lit_fedad.data.labelled import Images, LabelledDataset, LabelledSet, LabelledTargets
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample, grouped
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.data.transform import ImageTransform
from lit_fedad.federation.processes import all_cores
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.models.large_images import Backbone, TiledPyramid
from lit_fedad.report.console import Display
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.patches import PatchTask
from lit_fedad.tasks.representation import Representation

Progress = Callable[[int, int], None]


class _Views(NamedTuple):
    """Views of an image whose features are stored in addition to those of the image itself.

    Attributes:
        turns: Rotation of each view, in quarter turns.
        draw: Draws a random view of each image of a batch; None for views that are only rotated.
    """

    turns: tuple[int, ...] = ()
    draw: ContrastiveViews | None = None


_TURNED = _Views((1, 2, 3))


def frozen_encoder(task: Task) -> FrozenEncoder | None:
    """Returns the task's frozen encoder; None where its encoder sees pixels."""
    encoder = getattr(task, "encoder", None)
    return encoder if isinstance(encoder, FrozenEncoder) else None


def cache_folder(config: Config) -> Path:
    """Returns the folder of frozen features, which is in the configured cache folder or else in `user_cache`."""
    folder = config["cache"]["folder"]
    return (expand_home(folder) if folder else user_cache()) / "features"


def hashes_file(config: Config) -> Path | None:
    """Returns the file that stores hashes of image files; None where nothing is cached."""
    return cache_folder(config) / HASHES if config["cache"]["enabled"] else None


def pooled_folder(config: Config) -> Path | None:
    """Returns the folder of pooled frozen features; None where nothing is cached."""
    return cache_folder(config) / "pooled" if config["cache"]["enabled"] else None


class _Extractor:
    """Computes the features of a task's frozen encoder, or reads them from the cache folder, if there is one."""

    def __init__(self, task: Task, mean: Sequence[float], std: Sequence[float], folder: Path | None) -> None:
        encoder = frozen_encoder(task)
        assert encoder is not None
        self.encoder, self.folder = encoder, folder
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def of_arrays(self, images: Tensor, views: _Views, progress: Progress) -> FrozenFeatures:
        """Returns the features of images uint8 [N, C, S, S]."""
        return self._find(
            images, (), lambda indices: images[indices.start : indices.stop] / 255, views, progress
        )

    def of_files(
        self, samples: Sequence[Sample], transform: ImageTransform, views: _Views, progress: Progress
    ) -> FrozenFeatures:
        """Returns the features of image files."""
        images = ImageDataset(samples, transform)
        paths = [sample.path for sample in samples]
        digests = content_hashes(paths, self.folder.parent / HASHES if self.folder else None)
        return self._find(
            [digests[path] for path in paths],
            (transform.fingerprint,),
            lambda indices: (images.__getitems__(indices)["image"] * self.std + self.mean).clamp(0, 1),
            views,
            progress,
        )

    def _find(
        self,
        images: Tensor | Sequence[bytes],
        settings: tuple[object, ...],
        read: Callable[[range], Tensor],
        views: _Views,
        progress: Progress,
    ) -> FrozenFeatures:
        """Returns features from the cache, or computes them.

        Args:
            images: The images, or a digest of each.
            settings: What the features depend on, in addition to the images, the encoder and the views.
            read: Reads the pixels of a range of images, in [0, 1].
            views: Views whose features are computed too.
            progress: Called with the number of images that are done and their total.
        """
        # Mean and standard deviation are not among the settings: a frozen encoder undoes the normalisation, so they
        # affect only the last digits.
        settings = (*settings, self.encoder.backbone.fingerprint, self.encoder.size)
        if not self.encoder.unit_length:
            settings = (*settings, "of any length")
        if views.turns:
            settings = (*settings, views.turns, vars(views.draw) if views.draw else "as they are")
        file = self.folder and self.folder / f"{features_key(images, *map(str, settings))}.safetensors"
        draw = views.draw or torch.nn.Identity()
        return frozen_features(len(images), read, self._encode, draw, views.turns, file or None, progress)

    def _encode(self, pixels: Tensor) -> Tensor:
        """Computes features of pixels in [0, 1] on the encoder's device, and moves them to the CPU."""
        normalised = (pixels - self.mean) / self.std
        return self.encoder.features(normalised.to(self.encoder.pixel_std.device)).cpu()


def frozen_datasets(
    images: LabelledSet | ImageSet,
    task: Task,
    transform: ImageTransform,
    folder: Path | None,
    fabric: Fabric,
    display: Display,
) -> tuple[FrozenDataset, FrozenDataset]:
    """Computes the features of training and test images, or reads them from the cache."""
    statistics = images if isinstance(images, LabelledSet) else transform
    extract = _Extractor(task, statistics.mean, statistics.std, folder)
    extract.encoder.to(fabric.device)
    learner = task if isinstance(task, Representation) else None
    scores_turned = learner is not None and learner.scores_turned

    def find(part: str, views: _Views) -> FrozenFeatures:
        kind = "" if not views.turns else ", random views" if views.draw else ", turned"
        with all_cores(fabric), display.progress(f"Frozen features, {part}{kind}") as progress:
            if isinstance(images, LabelledSet):
                arrays = images.train_images if part == "training" else images.test_images
                return extract.of_arrays(arrays, views, progress)
            samples = images.train if part == "training" else images.test
            return extract.of_files(samples, transform, views, progress)

    def compute(part: str) -> tuple[FrozenFeatures, Tensor | None]:
        random = _Views(extract.encoder.turns, learner.draw) if learner and part == "training" else _Views()
        return find(part, random), find(part, _TURNED).views if scores_turned else None

    def both() -> tuple[tuple[FrozenFeatures, Tensor | None], ...]:
        return compute("training"), compute("test")

    labels = _targets(images, transform)
    # The first process computes the features; the others read them from the cache, if there is one.
    computed = both() if fabric.is_global_zero or folder is None else None
    fabric.barrier()
    (train, train_turned), (test, test_turned) = computed or both()
    return FrozenDataset(train, labels[0], train_turned), FrozenDataset(test, labels[1], test_turned)


def _targets(
    images: LabelledSet | ImageSet, transform: ImageTransform
) -> tuple[Targets | LabelledTargets, Targets | LabelledTargets]:
    """Builds labels and masks of training and test images; done before features, to report a wrong mask early."""
    if isinstance(images, ImageSet):
        train = Targets(images.train, transform, with_masks=False)
        return train, Targets(images.test, transform, images.has_masks)
    normal = images.normal_classes if isinstance(images, SemanticSet) else None
    return LabelledTargets(images.train_labels, normal), LabelledTargets(images.test_labels, normal)


def frozen_public(public: Tensor, task: Contrastive, folder: Path | None) -> Tensor:
    """Computes the frozen features [P, C] of public images uint8 [P, 3, S, S]; the server keeps only the features."""
    mean, std = (values.flatten().tolist() for values in (task.mean, task.std))
    extract = _Extractor(task, mean, std, folder)
    return extract.of_arrays(public, _Views(), lambda done, total: None).plain.float()


def build_datasets(
    config: Config,
    images: Images,
    transform: ImageTransform,
    task: Task,
    backbone: Backbone | None,
    fabric: Fabric,
    display: Display,
) -> tuple[Dataset, Dataset]:
    """Builds the training and the test data set, and computes frozen features that are not cached yet."""
    if frozen_encoder(task) is not None:
        return frozen_datasets(images, task, transform, pooled_folder(config), fabric, display)
    products = task.products if isinstance(task, PatchTask) else ()
    if isinstance(images, LabelledSet):
        parts = ((images.train_images, images.train_labels), (images.test_images, images.test_labels))
        normal = images.normal_classes if isinstance(images, SemanticSet) else None
        train, test = (
            LabelledDataset(*part, images.mean, images.std, normal, len(products)) for part in parts
        )
        return train, test
    if backbone is None or not config["cache"]["enabled"]:
        return (
            ImageDataset(images.train, transform, products=products),
            ImageDataset(images.test, transform, with_masks=images.has_masks),
        )
    train_targets = Targets(images.train, transform, with_masks=False, products=products)
    test_targets = Targets(images.test, transform, images.has_masks)  # before features, as in `_targets`
    backbone.to(fabric.device)
    cache = FeatureCache(cache_folder(config), transform, backbone, backbone.fingerprint)
    samples = (*images.train, *images.test)
    batch_size = 1 if isinstance(backbone, TiledPyramid) else 16  # a tiled image is a batch of tiles itself
    if fabric.is_global_zero:
        with all_cores(fabric), display.progress("Features of the frozen backbone") as progress:
            cache.fill(samples, batch_size, progress, fabric.device)
    fabric.barrier()
    if not fabric.is_global_zero:
        cache.fill(samples, batch_size, device=fabric.device)
    return cache.dataset(images.train, train_targets), cache.dataset(images.test, test_targets)


def check_form(config: Config, images: Images) -> None:
    """Checks sides, channels and normalisation of images that are held in memory.

    Raises:
        UserError: If the images are not square, or the configuration contradicts their size, channels or normalisation.
    """
    if not isinstance(images, LabelledSet):
        return
    height, side = images.train_images.shape[-2:]
    if height != side:
        raise UserError(
            f"the images of {images.name} have {height} x {side} pixels (height, width), and networks learn from square"
            " ones: make them square"
        )
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
    if configured := [f"image.{key}" for key in ("mean", "std") if key in config["image"]]:
        raise UserError(
            f"{configured[0]}: the images of {images.name} are normalised by mean and std of their data section; leave"
            f" {' and '.join(configured)} out"
        )


def image_transform(config: Config, task: Task) -> ImageTransform:
    """Builds the transform from image files to the task's input.

    Pixels are normalised as the task's frozen backbone expects them, unless the configuration gives mean and standard
    deviation (`pixel_statistics`). A frozen encoder expects nothing: it undoes the normalisation.
    """
    backbone = getattr(task, "backbone", None) if frozen_encoder(task) is None else None
    expected = {} if backbone is None else {"mean": backbone.mean, "std": backbone.std}
    given = {key: value for key, value in config["image"].items() if key not in TILING}
    return call(ImageTransform, {**expected, **given, **pixel_statistics(config)}, "image")


def check_geometry(config: Config) -> None:
    """Checks that the task supports images that are not square, or that are cut into tiles.

    Raises:
        UserError: If images are not square and the task trains from pixels, or there are tiles and the task does not
            support them; also if an overlap is given without tiles.
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
    if image.get("overlap") is not None and image.get("tile") is None:
        raise UserError(
            f"image.overlap={image['overlap']} belongs to image.tile; give image.tile too, or leave it out"
        )


def tiled(config: Config, backbone: FeaturePyramid) -> Backbone:
    """Returns the backbone, wrapped to see images tile by tile if tiles are configured.

    Raises:
        UserError: If the image cannot be cut into such tiles, or the backbone does not declare its strides.
    """
    image = config["image"]
    if image.get("tile") is None:
        return backbone
    if not hasattr(backbone, "strides"):
        raise UserError(
            f"image.tile={image['tile']}: {type(backbone).__name__} does not say its strides; give another backbone"
        )
    return TiledPyramid(backbone, pair("image.size", image["size"]), image["tile"], image.get("overlap"))


def data_digest(
    images: Images, partition: Partition, memo: Path | None = None, display: Display | None = None
) -> str:
    """Hashes a partition and its images.

    Of images in memory the pixels and labels are hashed; of image files their product, kind of defect, path and
    content, and the content of their masks.

    Args:
        images: The images.
        partition: Their partition.
        memo: File that stores hashes of image files; None for none.
        display: Shows the progress of long reading; None to show nothing.

    Returns:
        32 hexadecimal digits, which do not depend on the folder of the data.

    Raises:
        UserError: If an image file is missing.
    """
    digest = hashlib.sha256()
    for owner, indices in partition.index_lists():
        digest.update(json.dumps([owner, indices]).encode())
    digest.update(json.dumps([images.name, images.categories, partition.schedule]).encode())
    for content in (
        _in_memory(images)
        if isinstance(images, LabelledSet)
        else _on_disk(memo, display or Display(quiet=True), images.train, images.test)
    ):
        digest.update(content)
    return digest.hexdigest()[:32]


def _in_memory(images: LabelledSet) -> Iterator[memoryview | bytes]:
    """Yields the bytes of images in memory that a digest is made of."""
    for tensor in (images.train_images, images.train_labels, images.test_images, images.test_labels):
        yield json.dumps(list(tensor.shape)).encode()
        yield tensor.flatten().numpy().data


def _on_disk(memo: Path | None, display: Display, *parts: Sequence[Sample]) -> Iterator[bytes]:
    """Yields the bytes of training and test images in files that a digest is made of; warns of common images."""
    by_product = grouped((one.category, str(one.path.absolute().parent)) for one in chain(*parts))
    # Paths are taken relative to the folder of their product: the folders above it differ between machines.
    home = {product: os.path.commonpath(folders) for product, folders in by_product.items()}
    files = [file for sample in chain(*parts) for file in (sample.path, *_mask_files(sample.mask))]
    with display.progress("Hashes of the images", announced=False) as progress:
        hashes = content_hashes(files, memo, progress)
    train, test = ([sample.path for sample in samples] for samples in parts)
    trained = {hashes[path] for path in train}
    if leaks := [path for path in test if hashes[path] in trained]:
        warnings.warn(
            f"{len(leaks)} of {len(test)} test images are training images too, and metrics are too good, first"
            f" {leaks[0]}; lit-fedad data check names all",
            stacklevel=2,
        )
    for samples in parts:
        for sample in samples:
            relative = sample.path.absolute().relative_to(home[sample.category]).as_posix()
            content = [hashes[file].hex() for file in (sample.path, *_mask_files(sample.mask))]
            yield json.dumps([sample.category, sample.defect, relative, *content]).encode()


def _mask_files(mask: Path | None) -> list[Path]:
    """Lists the files of a mask, which may be a folder with one file for each region."""
    if mask is None:
        return []
    return images_in(mask) if mask.is_dir() else [mask]

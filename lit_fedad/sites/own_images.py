"""The images that a site holds, as its federation sees them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.pixels import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.data.content import content_hashes
from lit_fedad.data.labelled import Images, LabelledImage, LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.privacy.protection import is_protected
from lit_fedad.sites.messages import Facts, are_products
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import SiteSettings

T = TypeVar("T", bound=LabelledSet)


def own_images(
    images: Images, form: Mapping[str, Sequence[float]] | None, classes: Sequence[str], settings: SiteSettings
) -> Images:
    """Returns a site's images as its federation sees them.

    Args:
        images: The images.
        form: ``mean`` and ``std`` by which the federation normalises labelled images; None where it does not say.
        classes: Names of the classes that the federation learns.
        settings: What the site's operator says.

    Raises:
        UserError: If they do not suit the task, show a class that the federation does not learn, or have names that
            the site does not tell.
    """
    if isinstance(images, ImageSet):
        images = _named(images, settings)
        if not are_products(images.categories):
            raise RefusalError(
                Code.NAMED,
                detail="give at most 200, of 1 to 100 printable characters each, or policy.names=false",
            )
        return images
    if settings.apart:
        raise UserError("apart=true is for products of files; classes have one name at all sites")
    if not settings.policy.names:
        raise RefusalError(Code.NAMED, detail="policy.names=false, and sites compare the names of classes")
    form = form or {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    images = replace(images, mean=form["mean"], std=form["std"])
    return images if isinstance(images, SemanticSet) else relabelled(images, classes)


def relabelled(images: T, classes: Sequence[str]) -> T:
    """Returns images whose labels are places in other classes: a site need not hold each.

    Raises:
        RefusalError: If a class that it holds is not among them.
    """
    held = torch.cat([images.train_labels, images.test_labels]).unique().tolist()
    if unknown := [images.classes[label] for label in held if images.classes[label] not in classes]:
        raise RefusalError(Code.CLASS, detail=unknown[0])
    places = torch.tensor([classes.index(own) if own in classes else -1 for own in images.classes])
    return replace(
        images,
        classes=tuple(classes),
        train_labels=places[images.train_labels],
        test_labels=places[images.test_labels],
    )


def own_partition(config: Config, images: Images, settings: SiteSettings, client: int) -> Partition:
    """Gives the images that a site trains with to the client of its number, at once or in the site's stages.

    Args:
        config: The run's configuration.
        images: Its images, with the names that its operator knows; of semantic ones the normal train.
        settings: What its operator says.
        client: The site's number.

    Raises:
        RefusalError: If stages do not suit the run, or the site has other images than of products, or a product that
            is in no stage or in two.
    """
    if not settings.stages:
        training: Sequence[int] = range(len(images.train))
        if isinstance(images, SemanticSet):
            training = (images.train_labels < images.normal_classes).nonzero().flatten().tolist()
        return Partition.of_clients([*([()] * client), training])
    if is_protected(config):
        raise RefusalError(Code.STAGES, detail="sums of stages are neither masked nor noised")
    if not isinstance(images, ImageSet):
        raise RefusalError(Code.STAGES, detail="they are of products of files; classes come all at once")
    stages = settings.stages
    found: list[list[int]] = [[] for _ in stages]
    named = [product for own in stages for product in own]
    for product in images.categories:
        places = [place for place, own in enumerate(stages) if product in own]
        if len(places) != 1:
            raise RefusalError(
                Code.STAGES, detail=f"product {product} must be in one, and is in {len(places)}"
            )
        found[places[0]] += [i for i, sample in enumerate(images.train) if sample.category == product]
    if len(named) > len(images.categories) or not all(found):
        raise RefusalError(
            Code.STAGES, detail=f"it has the products {', '.join(images.categories)}, and no others"
        )
    return Partition.in_stages([*([[()]] * client), found])


def told_apart(classes: Sequence[str], products: Sequence[str], images: Images) -> list[str]:
    """Lists the classes or products that a site's model tells apart.

    Before the products of other sites are known, one more than its own stands for them: what is disclosed of each
    product is then judged already.

    Args:
        classes: The federation's classes.
        products: Products of all sites, as far as they are known.
        images: The site's images.

    Raises:
        RefusalError: If the site has a product that the coordinator does not know.
    """
    own = products_of(images)
    if products and (unknown := [name for name in own if name not in products]):
        raise RefusalError(Code.PRODUCT, detail=unknown[0])
    return list(classes or products or [*own, "those of other sites"])


def content_of(images: Images, memo: Path | None) -> list[str]:
    """Returns a hash of each training image's content, 16 hexadecimal digits, whatever it is called.

    Args:
        images: The images.
        memo: File of known hashes of files; None for none.

    Raises:
        UserError: If a file cannot be read.
    """
    if isinstance(images, ImageSet):
        files = [sample.path for sample in images.train]
        hashes = content_hashes(files, memo)
        return [hashes[file].hex()[:16] for file in files]
    return [hashlib.sha256(image.contiguous().numpy()).hexdigest()[:16] for image in images.train_images]


def by_product(
    images: Sequence[Sample | LabelledImage], products: Sequence[str], indices: Iterable[int]
) -> dict[str, float]:
    """Counts images by product, of those with these indices."""
    return {**dict.fromkeys(products, 0), **Counter(images[index].category for index in indices)}


def products_of(images: Images) -> list[str]:
    """Lists the products or classes, without the sets of semantic anomalies."""
    anomalies = images.anomalies if isinstance(images, SemanticSet) else ()
    return [name for name in images.categories if name not in anomalies]


def facts_of(images: Images, partition: Partition, whole: Partition, client: int) -> Facts:
    """Counts what a site tells of its images when it says who it is.

    Args:
        images: The images.
        partition: Those that it trains with, as the client of this number.
        whole: Those that it calibrates with, too.
        client: The number.
    """
    products, form, semantic = products_of(images), "", isinstance(images, SemanticSet)
    if semantic:  # what all sites' images must have in common
        names = hashlib.sha256(json.dumps(images.categories).encode()).hexdigest()[:8]
        form = f"{len(images.categories)} classes and sets of anomalies ({names})"
    return Facts(
        stages=[by_product(images.train, products, indices) for indices in partition.by_stage[client]],
        held=by_product(images.train, products, whole.clients[client]),
        tested=by_product(images.test, images.categories, range(len(images.test))),
        anomalies=list(images.anomalies) if isinstance(images, SemanticSet) else [],
        form=form,
    )


def _named(images: ImageSet, settings: SiteSettings) -> ImageSet:
    """Calls products as the federation knows them."""
    if settings.policy.names and not settings.apart:
        return images
    own = {
        product: f"{settings.name}.{product if settings.policy.names else number}"
        for number, product in enumerate(images.categories, start=1)
    }

    def named(samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(replace(sample, category=own[sample.category]) for sample in samples)

    return ImageSet(images.name, named(images.train), named(images.test))

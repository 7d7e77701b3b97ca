"""The images that a site holds, as its federation sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images, LabelledSet
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.data.transform import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.sites.refusals import Code, RefusalError

T = TypeVar("T", bound=LabelledSet)


def own_images(
    images: Images, form: Mapping[str, Sequence[float]] | None, classes: Sequence[str], name: str, apart: bool
) -> Images:
    """Returns a site's images as its federation sees them.

    Args:
        images: The images.
        form: ``mean`` and ``std`` by which the federation normalises labelled images; None where it does not say.
        classes: Names of the classes that the federation learns.
        name: Name of the site.
        apart: Whether its products are its own, even where those of another site have the same name.

    Raises:
        UserError: If they do not suit the task, or show a class that the federation does not learn.
    """
    if isinstance(images, ImageSet):
        return _apart(images, name) if apart else images
    if apart:
        raise UserError("apart=true is for products of files; classes have one name at all sites")
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


def training_indices(images: Images) -> range | list[int]:
    """Lists the images that a site trains with: of those with semantic anomalies the normal ones."""
    if isinstance(images, SemanticSet):
        return (images.train_labels < images.normal_classes).nonzero().flatten().tolist()
    return range(len(images.train))


def training_stages(images: Images, stages: Sequence[Sequence[str]], site: str) -> list[list[int]]:
    """Lists the images that a site trains with in each of its stages.

    Args:
        images: Its images.
        stages: Its products by stage, as its operator calls them.
        site: Name of the site, which stands before its products where these are its own.

    Raises:
        RefusalError: If it has other images than of products, or a product that is in no stage or in two.
    """
    if not isinstance(images, ImageSet):
        raise RefusalError(Code.STAGES, detail="they are of products of files; classes come all at once")
    found: list[list[int]] = [[] for _ in stages]
    named = [product for own in stages for product in own]
    for product in images.categories:
        bare = product.removeprefix(f"{site}.")
        places = [place for place, own in enumerate(stages) if product in own or bare in own]
        if len(places) != 1:
            raise RefusalError(Code.STAGES, detail=f"product {bare} must be in one, and is in {len(places)}")
        found[places[0]] += [i for i, sample in enumerate(images.train) if sample.category == product]
    if len(named) > len(images.categories) or not all(found):
        raise RefusalError(
            Code.STAGES, detail=f"it has the products {', '.join(images.categories)}, and no others"
        )
    return found


def products_of(images: Images) -> list[str]:
    """Lists the products or classes, without the sets of semantic anomalies."""
    return [name for name in images.categories if name not in anomalies_of(images)]


def anomalies_of(images: Images) -> list[str]:
    """Lists the sets of semantic anomalies; none of other images."""
    return list(images.anomalies) if isinstance(images, SemanticSet) else []


def form_of(images: Images) -> str:
    """Describes what all sites' images with semantic anomalies must have in common: the classes; empty for others."""
    if not isinstance(images, SemanticSet):
        return ""
    names = hashlib.sha256(json.dumps(images.categories).encode()).hexdigest()[:8]
    return f"{len(images.categories)} classes and sets of anomalies ({names})"


def _apart(images: ImageSet, name: str) -> ImageSet:
    def own(samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(replace(sample, category=f"{name}.{sample.category}") for sample in samples)

    return ImageSet(images.name, own(images.train), own(images.test))

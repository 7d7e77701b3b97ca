"""A site's part in a federation, for a review and for a run: its images, its model, and what exchanges take of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from lit_fedad.contracts import Exchanges
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.sizes import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.data.content import content_hashes
from lit_fedad.data.labelled import Images, LabelledImage, LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample, grouped
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.calibration import with_calibration
from lit_fedad.experiment.build import build_images, build_model, tells_products
from lit_fedad.experiment.datasets import hashes_file
from lit_fedad.privacy.ledger import LEDGER, Ledger
from lit_fedad.privacy.protection import is_protected
from lit_fedad.sites.messages import MOST_PRODUCTS, Facts, are_products
from lit_fedad.sites.offer import Taken, taken_by
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.site_noise import SiteNoise, planned

T = TypeVar("T", bound=LabelledSet)


class SitePart:
    """A site's part in a federation.

    Args:
        config: The federation's configuration (`Offer.composed`).
        settings: The settings of the site.
        number: The site's client number.
        classes: Names of the classes that the federation learns.
        products: Names of all sites' products; none before they are known.

    Attributes:
        config: The configuration, with the site's own section ``data``.
        form: How the federation normalises labelled images.
        images: The images, with the classes or names of products that the federation uses.
        apart: Classes or products that the model tells apart.
        model: The model.
        partition: Which images train, and which calibrate.
        facts: Numbers of images, as the site tells them to the coordinator.

    Raises:
        RefusalError: If the images do not suit the federation.
        UserError: If they cannot be read.
    """

    def __init__(
        self,
        config: Config,
        settings: SiteSettings,
        number: int,
        classes: Sequence[str],
        products: Sequence[str] = (),
    ) -> None:
        self.settings, self.number, self.classes = settings, number, classes
        self.form, self.config = config["data"], {**config, "data": compose([*settings.data])["data"]}
        read = build_images(self.config)
        self.images = federated_images(read, self.form, classes, settings)
        self.apart = self._told_apart(products)
        self.model = build_model(self.config, self.apart)
        self._contents = content_hashes_of(read, hashes_file(self.config))
        whole = site_partition(self.config, read, settings, number)
        self.partition = with_calibration(self.config, self.images, whole, self.model.method)
        self.facts = self._facts(whole)
        staged = enumerate(whole.by_stage[number])
        self._stages = {self.images.train[i].category: stage for stage, indices in staged for i in indices}

    def tell_apart(self, products: Sequence[str]) -> None:
        """Builds the model anew if it tells all sites' products apart and these have changed.

        Raises:
            RefusalError: If the site has a product that is not among them.
        """
        apart = self._told_apart(products)
        if tells_products(self.config) and apart != self.apart:
            self.model, self.apart = build_model(self.config, apart, backbone=self.model.backbone), apart

    def _told_apart(self, products: Sequence[str]) -> list[str]:
        """Lists the classes or products that the model tells apart.

        Before the products of other sites are known, one more product stands for them, so that what is disclosed of
        each product can already be judged.
        """
        held = self.images.normal_categories
        if products and (unknown := [name for name in held if name not in products]):
            raise RefusalError(Code.PRODUCT, detail=unknown[0])
        return list(self.classes or products or [*held, "those of other sites"])

    def _facts(self, whole: Partition) -> Facts:
        """Counts the images, as the site tells the coordinator; `whole` also has those kept back for calibration."""
        images, products, form, anomalies = self.images, self.images.normal_categories, "", list[str]()
        if isinstance(images, SemanticSet):  # all sites must have the same classes and sets
            names = hashlib.sha256(json.dumps(images.categories).encode()).hexdigest()[:8]
            form = f"{len(images.categories)} classes and sets of anomalies ({names})"
            anomalies = list(images.anomalies)
        training = self.partition.by_stage[self.number]
        return Facts(
            stages=[by_product(images.train, products, indices) for indices in training],
            held=by_product(images.train, products, whole.clients[self.number]),
            tested=by_product(images.test, images.categories, range(len(images.test))),
            anomalies=anomalies,
            form=form,
        )

    def noise(self, folder: Path, images: str) -> SiteNoise | None:
        """Plans the noise of the site; see `SiteNoise`. Returns None for a federation without noise.

        Raises:
            UserError: If the federation cannot keep the privacy that it promises.
        """
        plan = planned(self.config, self.model, {self.number: self.facts.size})
        ledger = Ledger(self.settings.folder / LEDGER, self.settings.epsilon)
        return None if plan is None else SiteNoise(plan, folder, images, ledger)

    def declared(self, noise: SiteNoise | None) -> Exchanges:
        """Returns the exchanges with the noise around them, to judge what they disclose: its key is no secret."""
        method = self.model.method
        return method.exchanges if noise is None else noise.plan.noised(method, b"declared")

    def taken(self, noise: SiteNoise | None) -> list[Taken]:
        """Lists what the exchanges take of the images with this noise."""
        hidden = noise is not None and noise.hides
        picture = self.images.train_images.shape[1:] if isinstance(self.images, LabelledSet) else ()
        return taken_by(
            self.declared(noise),
            self.model.client,
            self.config,
            self.fewest(by_product=True),
            hidden,
            picture,
        )

    def summed(self, by_product: bool) -> dict[str, list[str]]:
        """Returns content hashes of the images that are summed together, by stage, or by stage and product."""
        return grouped(
            (f"{stage}/{self.images.train[index].category if by_product else ''}", self._contents[index])
            for stage, indices in enumerate(self.partition.by_stage[self.number])
            for index in indices
        )

    def fewest(self, by_product: bool = False) -> int:
        """Returns the fewest images that are summed together; copies of an image count as one."""
        return min((len(set(images)) for images in self.summed(by_product).values()), default=0)

    def fewest_scored(self, question: str) -> int:
        """Returns the number of images in the smallest group of which the answer to a question tells separately.

        Calibration and decisions have a group for each product, scores for each stage and for each class or set of
        semantic anomalies. Scores and decisions also separate normal from anomalous images.
        """
        if question == "calibration":
            indices = (self.partition.calibration or self.partition.clients)[self.number]
            return min(Counter(self.images.train[index].category for index in indices).values(), default=0)
        separate: Sequence[str] = ()
        if isinstance(self.images, LabelledSet):
            separate = self.images.anomalies if isinstance(self.images, SemanticSet) else self.images.classes
        group_sizes = Counter(
            (
                image.category
                if question != "scores" or image.category in separate
                else self._stages.get(image.category, 0),
                getattr(image, "label", image.category in separate),
            )
            for image in self.images.test
        )
        return min(group_sizes.values(), default=0)


def federated_images(
    images: Images, form: Mapping[str, Sequence[float]] | None, classes: Sequence[str], settings: SiteSettings
) -> Images:
    """Returns a site's images with the names, labels and normalisation that its federation uses.

    Args:
        images: The images.
        form: ``mean`` and ``std`` by which the federation normalises labelled images; None for those of ImageNet.
        classes: Names of the classes that the federation learns.
        settings: The settings of the site.

    Raises:
        UserError: If the images do not suit the task, show a class that the federation does not learn, or have names
            that the site does not tell.
    """
    if isinstance(images, ImageSet):
        images = _renamed(images, settings)
        if (number := len(images.categories)) > MOST_PRODUCTS:
            detail = f"it has {number}, and at most {MOST_PRODUCTS} take part: name these in data.products"
            raise RefusalError(Code.PRODUCTS, detail=detail)
        if not are_products(images.categories):
            raise RefusalError(
                Code.NAMED, detail="give names of 1 to 100 printable characters, or policy.names=false"
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
    """Replaces labels by indices into the federation's classes, of which a site may hold only some.

    Raises:
        RefusalError: If the site holds a class that is not among them.
    """
    labels = torch.cat([images.train_labels, images.test_labels]).unique().tolist()
    if unknown := [images.classes[label] for label in labels if images.classes[label] not in classes]:
        raise RefusalError(Code.CLASS, detail=unknown[0])
    new_labels = torch.tensor([classes.index(name) if name in classes else -1 for name in images.classes])
    return replace(
        images,
        classes=tuple(classes),
        train_labels=new_labels[images.train_labels],
        test_labels=new_labels[images.test_labels],
    )


def site_partition(config: Config, images: Images, settings: SiteSettings, client: int) -> Partition:
    """Builds the partition that gives a site's training images to its client, at once or in the site's stages.

    Args:
        config: The run's configuration.
        images: The site's images, with the operator's names; for semantic anomalies, only normal images train.
        settings: The settings of the site.
        client: The site's client number.

    Raises:
        RefusalError: If the site has stages and they do not suit the run, its images are not sorted by product, or a
            product is in no stage or in two.
    """
    if not settings.stages:
        normal = frozenset(images.normal_categories)
        training = [index for index in range(len(images.train)) if images.train[index].category in normal]
        return Partition.of_clients([*([()] * client), training])
    if is_protected(config):
        raise RefusalError(Code.STAGES, detail="sums of stages are neither masked nor noised")
    if not isinstance(images, ImageSet):
        raise RefusalError(Code.STAGES, detail="they are of products of files; classes come all at once")
    stages = settings.stages
    by_stage: list[list[int]] = [[] for _ in stages]
    named = [product for products in stages for product in products]
    for product in images.categories:
        found = [stage for stage, products in enumerate(stages) if product in products]
        if len(found) != 1:
            raise RefusalError(
                Code.STAGES, detail=f"product {product} must be in one, and is in {len(found)}"
            )
        by_stage[found[0]] += [i for i, sample in enumerate(images.train) if sample.category == product]
    if len(named) > len(images.categories) or not all(by_stage):
        raise RefusalError(
            Code.STAGES, detail=f"it has the products {', '.join(images.categories)}, and no others"
        )
    return Partition.in_stages([*([[()]] * client), by_stage])


def content_hashes_of(images: Images, memo: Path | None) -> list[str]:
    """Returns a hash of each training image's content, of 16 hexadecimal digits; names do not matter.

    Args:
        images: The images.
        memo: File of hashes of files that are known already; None for no such file.

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
    """Counts the images with these indices by product."""
    return {**dict.fromkeys(products, 0), **Counter(images[index].category for index in indices)}


def _renamed(images: ImageSet, settings: SiteSettings) -> ImageSet:
    """Gives products the names that the federation gets of them."""
    if settings.policy.names and not settings.apart:
        return images
    names = {
        product: f"{settings.name}.{product if settings.policy.names else number}"
        for number, product in enumerate(images.categories, start=1)
    }
    return images.renamed(names.__getitem__)

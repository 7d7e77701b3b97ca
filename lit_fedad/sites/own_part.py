"""A site's part in a federation, as it is reviewed and as it is played: images, model, and what is taken of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lit_fedad.core.config import Config, compose
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.sample import grouped
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.calibration import with_calibration
from lit_fedad.experiment.build import build_images, build_model, tells_products
from lit_fedad.experiment.datasets import hashes_file
from lit_fedad.privacy.ledger import LEDGER, Ledger
from lit_fedad.sites.offer import Taken, taken_by
from lit_fedad.sites.own_images import content_of, facts_of, own_images, own_partition, told_apart
from lit_fedad.sites.own_noise import OwnNoise, planned
from lit_fedad.sites.settings import SiteSettings


class OwnPart:
    """A site's part.

    Args:
        config: The federation's configuration (`compose_offered`).
        settings: What the site's operator says.
        number: The client that the site is.
        classes: Names of the classes that the federation learns.
        products: Names of all sites' products; none before they are known.

    Attributes:
        config: The configuration, with the site's own images.
        form: How the federation normalises labelled images.
        images: The images, as the federation sees them.
        apart: Classes or products that the model tells apart.
        model: The model.
        partition: Images that train, and that calibrate.
        facts: Their numbers.

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
        self.images = own_images(read, self.form, classes, settings)
        self.apart = told_apart(classes, products, self.images)
        self.model = build_model(self.config, self.apart)
        self._contents = content_of(read, hashes_file(self.config))
        whole = own_partition(self.config, read, settings, number)
        self.partition = with_calibration(self.config, self.images, whole, self.model.method)
        self.facts = facts_of(self.images, self.partition, whole, number)
        staged = enumerate(whole.by_stage[number])
        self._stages = {self.images.train[index].category: stage for stage, own in staged for index in own}

    def tell_apart(self, products: Sequence[str]) -> None:
        """Builds the model anew where it tells all sites' products apart and these are others than before.

        Raises:
            RefusalError: If the site has a product that is not among them.
        """
        apart = told_apart(self.classes, products, self.images)
        if tells_products(self.config) and apart != self.apart:
            self.model, self.apart = build_model(self.config, apart, backbone=self.model.backbone), apart

    def noise(self, folder: Path, images: str) -> OwnNoise | None:
        """Plans the noise of the site; see `OwnNoise`. None for a federation without.

        Raises:
            UserError: If the federation cannot keep its promise.
        """
        plan = planned(self.config, self.model, self.number, self.facts.size)
        ledger = Ledger(self.settings.folder / LEDGER, self.settings.epsilon)
        return None if plan is None else OwnNoise(plan, folder, images, ledger)

    def taken(self, noise: OwnNoise | None) -> list[Taken]:
        """Lists what the exchanges take of the images, under such noise."""
        method = self.model.method
        exchanges = method.exchanges if noise is None else noise.plan.noised(method, b"declared")
        hidden = noise is not None and noise.hides
        picture = self.images.train_images.shape[1:] if isinstance(self.images, LabelledSet) else ()
        return taken_by(
            exchanges, self.model.client, self.config, self.fewest(by_product=True), hidden, picture
        )

    def summed(self, by_product: bool) -> dict[str, list[str]]:
        """Returns the contents of the images that are summed together: of a stage, or of one product of it."""
        return grouped(
            (f"{stage}/{self.images.train[index].category if by_product else ''}", self._contents[index])
            for stage, indices in enumerate(self.partition.by_stage[self.number])
            for index in indices
        )

    def fewest(self, by_product: bool = False) -> int:
        """Returns the fewest images that are summed together; copies of an image count as one."""
        return min((len(set(images)) for images in self.summed(by_product).values()), default=0)

    def fewest_scored(self, question: str) -> int:
        """Returns the fewest images of which an answer to a question tells apart from others.

        Calibration and decisions tell of each product, scores of each stage, and of each class or set of semantic
        anomalies; scores and decisions of normal and of anomalous images.
        """
        if question == "calibration":
            chosen = (self.partition.calibration or self.partition.clients)[self.number]
            return min(Counter(self.images.train[index].category for index in chosen).values(), default=0)
        apart: Sequence[str] = ()
        if isinstance(self.images, LabelledSet):
            apart = self.images.anomalies if isinstance(self.images, SemanticSet) else self.images.classes
        scored = Counter(
            (
                image.category
                if question != "scores" or image.category in apart
                else self._stages.get(image.category, 0),
                getattr(image, "label", image.category in apart),
            )
            for image in self.images.test
        )
        return min(scored.values(), default=0)

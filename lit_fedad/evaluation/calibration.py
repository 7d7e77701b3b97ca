"""Calibrates decisions: the images that are held out, the scores that clients count on them, and the rates promised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Free, LeaveOut, Message, MessageSpec, Method, TensorSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.config import Config
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.hold_out import hold_out, image_groups
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import grouped
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.federation.evaluator import ClientQuery, QueriedFederation
from lit_fedad.metrics.conformal import Alpha, Calibration, ScoreCounts
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

HELD_OUT = 0.2
"""Share of each client's images that calibrates, where a method's model cannot leave images out again."""

LEAST = 9
"""Images that a client with a model of its own holds out at least, up to half of them: as many as 0.1 needs."""


def alphas(config: Config) -> list[Alpha]:
    """Returns the promised rates of false alarms; the first is the one that decisions are shipped with."""
    given = config["evaluation"]["alpha"]
    return list(given) if isinstance(given, list) else [given]


def noised_run(config: Config) -> bool:
    """Tells whether a run's sums are noised: images cannot be taken out of them again."""
    privacy = config["federation"].get("privacy")
    return privacy is not None and privacy["epsilon"] is not None


def with_calibration(config: Config, images: Images, partition: Partition, method: Method) -> Partition:
    """Holds images out for calibration, unless the method needs none or classifies.

    Raises:
        UserError: If ``calibration.group`` does not fit the images.
    """
    settings = config["calibration"]
    share, least = settings["share"], 0
    if share is None:
        share = 0.0 if method.exchanges.leave_out is not None and not noised_run(config) else HELD_OUT
        least = 0 if method.client.predictors.shared or not share else LEAST
    if method.client.task.kind == "classification":
        share = 0.0
    return hold_out(partition, images, share, config["seed"], settings["group"], least)


def calibration_scores(
    config: Config,
    images: Images,
    partition: Partition,
    module: FederatedDataModule,
    fabric: Fabric,
    method: Method,
) -> CalibrationScores:
    """Builds the function that counts a client's calibration scores."""
    folds, group = config["calibration"]["folds"], config["calibration"]["group"]
    leave_out = None if noised_run(config) else method.exchanges.leave_out
    return CalibrationScores(images, partition, module, fabric, folds, config["seed"], group, leave_out)


class CalibrationScores:
    """A function that counts a client's calibration scores by product.

    The scores are those of images that the client keeps back (`Partition.calibration`). Of a method whose model is made
    of sums (`Exchanges.leave_out`) they are those of all training images, a fold at a time, by the model without that
    fold (cross-conformal prediction; Vovk, 2015): the federation trains with all of them all the same. Images of
    a stage that the sums do not hold are scored by the model as it is.

    Args:
        images: Products of the training images.
        partition: Indices of training and calibration images by client.
        module: Loads training images.
        fabric: Moves batches and sets precision.
        folds: Number of folds.
        seed: Seed of the folds.
        group: Regular expression of images of a client that stay in one fold (`image_groups`); None for none. Those
            of other clients stay in the sums: ``partition=by_group`` keeps a group at one client.
        leave_out: Takes images out of the model's sums; None of models that are no sums, or noised ones.

    Raises:
        UserError: If the expression does not fit the images.
    """

    def __init__(
        self,
        images: Images,
        partition: Partition,
        module: FederatedDataModule,
        fabric: Fabric,
        folds: int = 5,
        seed: int = 0,
        group: str | None = None,
        leave_out: LeaveOut | None = None,
    ) -> None:
        self.groups = image_groups(images.train, group)
        self.images, self.partition, self.module, self.fabric = images, partition, module, fabric
        self.folds, self.seed, self.leave_out = folds, seed, leave_out

    def __call__(self, client: Client, number: int) -> dict[str, ScoreCounts]:
        """Counts the scores of one client's images by product; none of a client that holds no image out."""
        if self.partition.calibration:
            indices = list(self.partition.calibration[number])
            if not indices:
                return {}
            return self._by_product(indices, self._scores(client, self.module.normal_loader(indices)))
        if self.leave_out is None:
            return {}
        indices = list(self.partition.clients[number])
        return self._by_product(indices, self._scores_by_fold(client, self.leave_out, number, indices))

    def _scores(self, client: Client, loader: DataLoader) -> Tensor:
        return image_scores(client, loader, self.fabric)

    def _scores_by_fold(self, client: Client, sums: LeaveOut, number: int, indices: list[int]) -> Tensor:
        scores = torch.full((len(indices),), torch.nan)
        held = {
            index: sums.holds(client, stage)
            for stage, own in enumerate(self.partition.by_stage[number])
            for index in own
        }
        named = grouped((self.groups[index], place) for place, index in enumerate(indices) if held[index])
        groups = list(named.values())
        order = numpy_generator(self.seed, "calibration folds", number).permutation(len(groups))
        folds = [
            sorted(chain.from_iterable(groups[group] for group in chosen))
            for chosen in np.array_split(order, max(min(self.folds, len(groups)), 1))
            if len(chosen)  # no fold of a client whose images the sums do not hold
        ]
        loaders = [self.module.normal_loader([indices[place] for place in places]) for places in folds]
        for places, found in zip(folds, sums.scores(client, loaders, self._scores), strict=True):
            if found is not None:  # without these images there is no model to score them by otherwise
                scores[places] = found
        unseen = [
            place
            for place, index in enumerate(indices)
            if held[index] is False and self.groups[index] not in named
        ]
        if unseen:  # the model is as it is without them
            scores[unseen] = self._scores(
                client, self.module.normal_loader([indices[place] for place in unseen])
            )
        return scores

    def _by_product(self, indices: Sequence[int], scores: Tensor) -> dict[str, ScoreCounts]:
        products = [self.images.train[index].category for index in indices]
        counts = {}
        for product in dict.fromkeys(products):
            of_product = scores[[place for place, other in enumerate(products) if other == product]]
            if len(of_product := of_product[~of_product.isnan()]):
                counts[product] = ScoreCounts.of(of_product)
        return counts


class CalibrationQuery(ClientQuery[dict[str, ScoreCounts]]):
    """The query for the counts of a client's calibration scores, by product.

    Args:
        products: Names of all clients' products; a product crosses as its place in this list.
        scores: Counts the client's scores; None on a server whose clients hold their images.
    """

    name = "calibration"

    def __init__(self, products: Sequence[str], scores: CalibrationScores | None) -> None:
        self.products, self.scores = list(products), scores

    def __call__(self, client: Client, number: int) -> dict[str, ScoreCounts]:
        """Counts the scores of the client's calibration images."""
        assert self.scores is not None
        return self.scores(client, number)

    discloses = (counted("numbers of calibration images by bin of their score, and product"),)

    def pack(self, answer: dict[str, ScoreCounts]) -> Message:
        """Returns product, bin and count of every bin that holds a score."""
        places = [
            torch.full_like(counts.bins, self.products.index(product)) for product, counts in answer.items()
        ]
        columns = (places, *([getattr(c, name) for c in answer.values()] for name in ("bins", "counts")))
        return {
            name: torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
            for name, parts in zip(("products", "bins", "counts"), columns, strict=True)
        }

    def spec(self) -> MessageSpec:
        """Declares three lists of one length."""
        rows = Free("bins", len(self.products) * DEFAULT_BINS.count)
        return {
            "products": TensorSpec((rows,), torch.int64, low=0, high=len(self.products) - 1),
            "bins": TensorSpec((rows,), torch.int64, low=0, high=DEFAULT_BINS.count - 1),
            "counts": TensorSpec((rows,), torch.int64, low=1, counted=True),
        }

    def unpack(self, message: Message) -> dict[str, ScoreCounts]:
        """Builds the counts by product.

        Raises:
            UserError: If the bins of a product do not ascend.
        """
        found = {}
        for place in message["products"].unique().tolist():
            chosen = message["products"] == place
            counts = {name: message[name][chosen].tolist() for name in ("bins", "counts")}
            found[self.products[place]] = ScoreCounts.from_json(counts)
        return found


def calibrate(federation: QueriedFederation, round: int, query: CalibrationQuery) -> Calibration:
    """Asks all clients for their calibration scores after a round; empty on all processes but the first."""
    counted = federation.ask(round, query, sums=federation.exchanges.leave_out is not None)
    return Calibration(counted, federation.client.predictors.shared)

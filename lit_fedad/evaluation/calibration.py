"""Calibration of decisions: images that are held out, clients' counts of their scores, and rates that are promised."""

from __future__ import annotations

import warnings
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
"""Share of each client's images that is held out, for methods whose model cannot leave images out afterwards."""

LEAST = 9
"""Images that a client with a model of its own holds out at least, up to half of its images: a rate of 0.1 needs 9."""

_FEW_BINS = 20
"""Number of bins below which a warning is given, if there are ten times as many scores."""


def alphas(config: Config) -> list[Alpha]:
    """Returns the promised rates of false alarms; the first is the one that decisions are shipped with."""
    given = config["evaluation"]["alpha"]
    return list(given) if isinstance(given, list) else [given]


def noised_run(config: Config) -> bool:
    """Tells whether a run's sums are noised, so that images cannot be taken out of them again."""
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

    The scores are those of images that the client keeps back (`Partition.calibration`). For a method whose model is
    made of sums (`Exchanges.leave_out`) they are those of all training images: each fold is scored by the model without
    that fold (cross-conformal prediction; Vovk, 2015), although the federation trains with all of them. Images of a
    stage that the sums do not hold are scored by the model as it is.

    Args:
        images: Products of the training images.
        partition: Indices of training and calibration images by client.
        module: Loads training images.
        fabric: Moves batches and sets precision.
        folds: Number of folds.
        seed: Seed of the folds.
        group: Regular expression of images of a client that stay in one fold (`image_groups`); None for none. Images
            of the group at other clients stay in the sums: ``partition=by_group`` keeps a group at one client.
        leave_out: Takes images out of the model's sums; None for models that are no sums, and for noised sums.

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
        """Counts the scores of one client's images by product; empty for a client that holds no image out."""
        if self.partition.calibration:
            indices = list(self.partition.calibration[number])
            if not indices:
                return {}
            return self._by_product(indices, self._scores(client, self.module.normal_loader(indices)))
        if self.leave_out is None:
            return {}
        return self._by_product(*self._scores_by_fold(client, self.leave_out, number))

    def _scores(self, client: Client, loader: DataLoader) -> Tensor:
        return image_scores(client, loader, self.fabric)

    def _scores_by_fold(self, client: Client, sums: LeaveOut, number: int) -> tuple[list[int], Tensor]:
        """Scores a client's images without their folds; returns the indices of those scored, and their scores."""
        indices = list(self.partition.clients[number])
        scores, scored = torch.zeros(len(indices)), torch.zeros(len(indices), dtype=torch.bool)
        in_sums = {
            index: sums.holds(client, stage)
            for stage, stage_indices in enumerate(self.partition.by_stage[number])
            for index in stage_indices
        }
        members = grouped(
            (self.groups[index], position) for position, index in enumerate(indices) if in_sums[index]
        )
        groups = list(members.values())
        order = numpy_generator(self.seed, "calibration folds", number).permutation(len(groups))
        folds = [
            sorted(chain.from_iterable(groups[group] for group in chosen))
            for chosen in np.array_split(order, max(min(self.folds, len(groups)), 1))
            if len(chosen)  # a client none of whose images the sums hold has no fold
        ]
        loaders = [
            self.module.normal_loader([indices[position] for position in positions]) for positions in folds
        ]
        for positions, fold_scores in zip(folds, sums.scores(client, loaders, self._scores), strict=True):
            if fold_scores is not None:  # None: there is no model without these images
                scores[positions], scored[positions] = fold_scores, True
        unseen = [
            position
            for position, index in enumerate(indices)
            if in_sums[index] is False and self.groups[index] not in members
        ]
        if unseen:  # the model does not contain them
            loader = self.module.normal_loader([indices[position] for position in unseen])
            scores[unseen], scored[unseen] = self._scores(client, loader), True
        return [indices[position] for position in scored.nonzero().flatten().tolist()], scores[scored]

    def _by_product(self, indices: Sequence[int], scores: Tensor) -> dict[str, ScoreCounts]:
        products = [self.images.train[index].category for index in indices]
        positions = grouped((product, position) for position, product in enumerate(products))
        return {product: ScoreCounts.of(scores[of_product]) for product, of_product in positions.items()}


class CalibrationQuery(ClientQuery[dict[str, ScoreCounts]]):
    """The query for the counts of a client's calibration scores, by product.

    Args:
        products: Names of all clients' products; a product crosses as its position in this list.
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
        numbers = [
            torch.full_like(counts.bins, self.products.index(product)) for product, counts in answer.items()
        ]
        columns = (numbers, *([getattr(c, name) for c in answer.values()] for name in ("bins", "counts")))
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
        counts_of = {}
        for number in message["products"].unique().tolist():
            chosen = message["products"] == number
            counts = {name: message[name][chosen].tolist() for name in ("bins", "counts")}
            counts_of[self.products[number]] = ScoreCounts.from_json(counts)
        return counts_of


def calibrate(federation: QueriedFederation, round: int, query: CalibrationQuery) -> Calibration:
    """Asks all clients for their calibration scores after a round; empty on all processes but the first.

    Warns where the scores differ by less than the width of a bin: then no threshold tells images apart.
    """
    score_counts = federation.ask(round, query, sums=federation.exchanges.leave_out is not None)
    every = ScoreCounts.union(
        counts for by_product in score_counts.values() for counts in by_product.values()
    )
    if len(every.bins) < min(_FEW_BINS, every.total / 10):
        warnings.warn(
            f"{every.total} calibration scores fall into {len(every.bins)} bins, each a thousandth of a score wide, and"
            " decisions cannot tell them apart; let the task subtract from its scores what all have in common",
            stacklevel=2,
        )
    return Calibration(score_counts, federation.client.predictors.shared)

"""Scores of normal images by detectors that have not seen them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Client, SumsExchange
from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.hold_out import image_groups
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.federation.evaluator import Interview
from lit_fedad.metrics.conformal import Calibration, ScoreCounts


class CalibrationScores:
    """A function that counts a client's calibration scores by product.

    The scores are those of images that the client keeps back (`Partition.calibration`). Of a method whose model is made
    of sums (`Exchanges.sums`) they are those of all training images, a fold at a time, by the model without that fold
    (cross-conformal prediction; Vovk, 2015): the federation trains with all of them all the same.

    Args:
        images: Products of the training images.
        partition: Indices of training and calibration images by client.
        module: Loads training images.
        fabric: Moves batches and sets precision.
        folds: Number of folds.
        seed: Seed of the folds.
        group: Regular expression of images that stay in one fold (`image_groups`); None for none.
        exact: Whether images can be taken out of the model's sums; not of noised ones.

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
        exact: bool = True,
    ) -> None:
        self.groups = image_groups(images.train, group)
        self.images, self.partition, self.module, self.fabric = images, partition, module, fabric
        self.folds, self.seed, self.exact = folds, seed, exact

    def __call__(self, client: Client, number: int) -> dict[str, ScoreCounts]:
        """Counts the scores of one client's images by product; none of a client that holds no image out."""
        if self.partition.calibration:
            indices = list(self.partition.calibration[number])
            return self._by_product(indices, self._scores(client, indices)) if indices else {}
        sums = client.exchanges.sums
        if sums is None or not self.exact:
            return {}
        indices = list(self.partition.clients[number])
        return self._by_product(indices, self._scores_by_fold(client, sums, number, indices))

    def _scores(self, client: Client, indices: Sequence[int]) -> Tensor:
        return image_scores(client, self.module.normal_loader(indices), self.fabric)

    def _scores_by_fold(self, client: Client, sums: SumsExchange, number: int, indices: list[int]) -> Tensor:
        scores = torch.full((len(indices),), torch.nan)
        members: dict[str, list[int]] = {}
        for place, index in enumerate(indices):
            members.setdefault(self.groups[index], []).append(place)
        groups = list(members.values())
        order = numpy_generator(self.seed, "calibration folds", number).permutation(len(groups))
        names = client.task.local_buffers
        whole = {name: getattr(client.task, name) for name in names}
        for chosen in np.array_split(order, min(self.folds, len(groups))):
            places = sorted(chain.from_iterable(groups[group] for group in chosen))
            fold = [indices[place] for place in places]
            try:
                sums.leave_out(client, self.module.normal_loader(fold))
                scores[places] = self._scores(client, fold)
            except UserError:
                continue  # without this fold there is no model: its images cannot be scored
            finally:
                for name in names:
                    setattr(client.task, name, whole[name])
        return scores

    def _by_product(self, indices: Sequence[int], scores: Tensor) -> dict[str, ScoreCounts]:
        products = [self.images.train[index].category for index in indices]
        found = {}
        for product in dict.fromkeys(products):
            own = scores[[place for place, other in enumerate(products) if other == product]]
            if len(own := own[~own.isnan()]):
                found[product] = ScoreCounts.of(own)
        return found


def calibrate(
    interview: Interview, round: int, scores: Callable[[Client, int], dict[str, ScoreCounts]]
) -> Calibration:
    """Asks all clients for their calibration scores after a round; empty on all processes but the first."""
    sums = interview.exchanges.sums is not None
    counted: Mapping[int, dict[str, ScoreCounts]] = interview.ask(round, scores, sums=sums)
    return Calibration(counted, interview.client.predictors.shared)

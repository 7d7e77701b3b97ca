"""Image and pixel metrics of anomaly detectors, of all test images and of each product's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, MessageSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.evaluation.predict import Cases, Predicted, predictions
from lit_fedad.evaluation.state_messages import of_images, packed_states, states_spec, unpacked_states
from lit_fedad.federation.evaluator import Evaluation, Evaluator, QueriedFederation
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.base import union
from lit_fedad.metrics.federated import Summary, over_clients, plain_values, summarise, with_products


class Scored(NamedTuple):
    """Metrics of the scores of one model.

    Attributes:
        state: Metric state of all test images.
        products: Values of each product's images, by product and name. They are numbers, because a state for each
            product would take several megabytes for every client.
        predicted: The scores, and the maps that are drawn; None where they stay with the client.
    """

    state: AnomalyMetrics
    products: dict[str, dict[str, float]]
    predicted: Predicted | None = None


class AnomalyEvaluator(Evaluator):
    """An evaluator of every client on the union of all test images (FedDyMem Eq. 4), and on each product's.

    Over sites every client is scored on its own test images, and only bins and counts of its scores cross.

    Args:
        loader: Test batches in a fixed order; None on a server whose clients have test images of their own.
        products: Product of each test image, by the ``index`` of batches.
        pixel: Whether there are masks; pixel metrics are then computed for tasks that localise.
        fabric: Moves batches and sets precision.
        pro_limit: Largest false positive rate of PRO.
        spro_limit: Largest false positive rate of sPRO; None where regions do not saturate.
        common: Whether all clients are scored on these images.
        cases: Images that may be drawn; None for none.
    """

    metrics: tuple[str, ...] = ("i_auroc", "p_auroc", "pro", "aupr", "f1_max", "p_ap", "pro_05", "aupimo")

    def __init__(
        self,
        loader: DataLoader | None,
        products: Sequence[str],
        pixel: bool,
        fabric: Fabric,
        pro_limit: float = 0.3,
        spro_limit: float | None = None,
        common: bool = True,
        cases: Cases | None = None,
    ) -> None:
        self.loader, self.products, self.pixel, self.common = loader, products, pixel, common
        self.cases = cases
        self.fabric, self.pro_limit, self.spro_limit = fabric, pro_limit, spro_limit
        if spro_limit is not None:
            self.metrics = (*self.metrics, "spro")

    def evaluate(self, federation: QueriedFederation, round: int) -> Evaluation | None:
        """Computes the metrics after a round; keeps maps for the figures of the client with most images."""
        if self.cases is not None:
            self.cases.choose(federation.clients)
        return super().evaluate(federation, round)

    def score(self, client: Client, number: int) -> Scored:
        """Computes the metric state of one client, its values of each product, and its predictions."""
        predicted = Predicted.empty(len(self.products))
        drawn = self.cases is not None and (
            number == self.cases.client or self.alike(client, client.context.round - 1)
        )
        states = self.states(client, predicted, self.cases if drawn else None)
        products = {product: plain_values(state) for product, state in states.items()}
        return Scored(union(states.values()), products, predicted)

    def states(
        self, client: Client, predicted: Predicted, cases: Cases | None = None
    ) -> dict[str, AnomalyMetrics]:
        """Computes a client's metric states by product, whose `union` is that of all images; fills ``predicted``."""
        assert self.loader is not None
        states: dict[str, AnomalyMetrics] = {}
        for batch, prediction in predictions(client, self.loader, self.fabric, predicted, cases):
            scores, maps = prediction.image_score.cpu(), prediction.anomaly_map if self.pixel else None
            names = [self.products[index] for index in batch["index"].tolist()]
            for product in dict.fromkeys(names):
                rows = torch.tensor([row for row, name in enumerate(names) if name == product])
                pixels: dict[str, Any] = {}
                if maps is not None:
                    pixels = {"anomaly_maps": maps.cpu()[rows], "masks": batch["mask"][rows]}
                    pixels["regions"] = [batch["regions"][i] for i in rows] if "regions" in batch else None
                if product not in states:
                    spro_limit = None if maps is None else self.spro_limit
                    states[product] = AnomalyMetrics(
                        bool(pixels), limit=self.pro_limit, spro_limit=spro_limit
                    )
                states[product].update(scores[rows], batch["label"][rows], **pixels)
        return states

    discloses = (
        counted(
            "numbers of test images and their pixels by bin of their score (of few: nearly the score), and label"
        ),
    )

    def pack(self, answer: Scored) -> Message:
        """Returns bins and counts: of image scores by label, and of pixels in five histograms."""
        return packed_states([answer.state])

    def spec(self) -> MessageSpec:
        """Declares ascending bins and their counts."""
        return states_spec(1)

    def unpack(self, message: Message) -> Scored:
        """Builds the metric state; every image score is the largest one of its bin."""
        return Scored(unpacked_states(message, 1, self.pro_limit)[0], {})

    def summarise(self, states: dict[int, Scored]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled, per-client and per-product values of each metric.

        Pixel metrics are left out where a client has no masks.
        """
        pixel = all(scored.state.pixel for scored in states.values())
        return with_products(
            summarise({c: s.state if pixel else of_images(s.state) for c, s in states.items()}),
            over_clients({client: scored.products for client, scored in states.items()}),
        )

"""What a detector says of new images before they become part of it, and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.additions import Addition
from lit_fedad.data.subset import by_product
from lit_fedad.deployment.live_detector import OpenedClient, most_look_like
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.datasets import image_transform
from lit_fedad.experiment.finished_run import load_client, one_process
from lit_fedad.experiment.run_folder import RunFolder

_CHANCE = 0.01
"""New images are foreign if normal images had as many beyond the threshold with a smaller probability than this."""


@dataclass(frozen=True)
class Judged:
    """How many new images of one client and product lie beyond the threshold.

    Attributes:
        client: Client number.
        product: Name of the product.
        images: Number of images.
        beyond: Number of them beyond the threshold.
        chance: Probability of at least so many, if they are like the calibration images.
        alike: The product that most of them look like, where the model tells products apart; else None.
    """

    client: int
    product: str
    images: int
    beyond: int
    chance: float
    alike: str | None


def judge_new(folder: RunFolder, config: Config, model: Model, new: Addition) -> list[Judged]:
    """Scores new images with the clients that they are for.

    The threshold is that of the run's decisions or, where alpha cannot be promised, the largest calibration score.
    Where new and calibration images are alike, the number beyond the calibration score of rank r among n is
    beta-binomial with parameters n + 1 - r and r.

    Args:
        folder: A complete run, or a version of it.
        config: Its configuration on this machine.
        model: Its model, into which the clients are loaded.
        new: The images.

    Raises:
        UserError: If an image cannot be read.
    """
    fabric, transform, judged = one_process(config), image_transform(config, model.task), []
    calibration, result, alpha = folder.calibration(), folder.result() or {}, folder.alpha()
    for client, all_samples in sorted(new.images.items()):
        load_client(model, folder.path, folder.config(), client, fabric)
        opened = OpenedClient(folder, result, config, model.client, client, calibration, fabric, transform)
        for samples in by_product(all_samples):
            product = samples[0].category
            rule = calibration.rule(client, alpha, product if product in calibration.products else None)
            scores = rule.scores
            if not scores.total:
                continue
            scored = opened.scored((transform.image(sample.path) for sample in samples), rule, product)
            rate = max(rule.alpha, 1 / (scores.total + 1))
            rank, threshold = scores.rank(rate), scores.threshold(rate)
            beyond = sum(not image.score <= threshold for image in scored)  # NaN too
            chance = stats.betabinom.sf(beyond - 1, len(samples), scores.total + 1 - rank, rank)
            alike = most_look_like([image.alike for image in scored])
            judged.append(Judged(client, product, len(samples), beyond, float(chance), alike))
    return judged


def refuse_foreign(judged: Sequence[Judged]) -> None:
    """Refuses new images that are unlike those that the detector was calibrated with.

    Raises:
        UserError: If they look like another product, or more lie beyond the threshold than normal images would.
    """
    for new in judged:
        if new.chance < _CHANCE:
            raise UserError(
                f"{new.beyond} of the {new.images} new images of client {new.client}, product {new.product}, are"
                " anomalous to the detector: look at them (predict); force=true adds them as normal all the same"
            )
        if new.alike not in (None, new.product):
            raise UserError(
                f"most of the {new.images} new images of client {new.client}, product {new.product}, look like"
                f" {new.alike} to the detector: correct the product; force=true adds them as they are"
            )

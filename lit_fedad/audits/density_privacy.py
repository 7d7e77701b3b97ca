"""How strongly densities that clients share depend on the images behind them (FADngs)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.figures.embedding import (
    density_scores,
    draw_some,
    embed_images,
    generator_of,
    loader_of,
)
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.methods.fadngs import COVARIANCE, MEAN, FADngsClient, FADngsServer
from lit_fedad.privacy.distance_correlation import density_privacy
from lit_fedad.report.correlation_heatmap import draw_correlation_heatmap
from lit_fedad.report.files import whole_file

_RAW, _RAW_EACH = 2000, 200  # training images that are compared with the densities, in all and of one client


class DensityPrivacy(RunCallback):
    """Measures it after the last round where densities are shared, for ``privacy`` in ``result.json``."""

    def on_rounds_end(self, run: Run) -> None:
        """Measures it, unless ``evaluation.pictures`` is 0."""
        client = run.federation.client
        if (
            run.config["evaluation"]["pictures"]
            and isinstance(client, FADngsClient)
            and client.share_densities
        ):
            figures = run.folder.path / "figures"
            run.extras["privacy"] = report_privacy(run.federation, run.data, run.fabric, figures)


def report_privacy(
    federation: Federation, data: Data, fabric: Fabric, figures: Path
) -> dict[str, float] | None:
    """Measures how strongly the densities shared last depend on the images behind them.

    FADngs Eq. 18, FADngs Eq. 19 and FADngs Fig. 9.

    Of up to 2,000 training images, at most 200 a client, each stands behind that density of its client that it is
    nearest to.

    Args:
        federation: Of FADngs, after its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        figures: Folder of ``distance_correlation.png`` and ``distance_correlation.json``, which has all numbers.

    Returns:
        Distance correlation with the raw images, of samples from the densities (``shared``) and of Gaussian noise of
        the same width (``noise``): plain R^2 and R, and R^2 without its bias. None in all processes but the first,
        and where there are fewer than 4 images.
    """
    assert isinstance(federation.server, FADngsServer)
    assert isinstance(data.images, SemanticSet)
    draw = generator_of(federation, "privacy")
    each = min(_RAW_EACH, max(1, _RAW // len(federation.clients)))
    chosen = {c: draw_some(torch.tensor(data.partition.clients[c]), each, draw) for c in federation.clients}

    def answer(client: Client, number: int) -> Tensor:
        return embed_images(client.task, loader_of(data.module.train, chosen[number], data))

    answers = federation.ask(federation.rounds, answer)
    if not fabric.is_global_zero:
        return None
    raw = []
    for client, message in federation.server.densities.items():
        known = [
            (mean[None], cov[None]) for mean, cov in zip(message[MEAN], message[COVARIANCE], strict=True)
        ]
        if known:
            nearest = torch.stack([density_scores(*density, answers[client]) for density in known]).argmin(0)
            raw += [data.images.train_images[chosen[client][nearest == place]] for place in range(len(known))]
    if sum(map(len, raw)) < 4:
        return None
    joined = federation.server.density_set
    found = density_privacy(joined[MEAN], joined[COVARIANCE], raw, draw)
    tables = {"r_squared": found.r_squared, "r": found.r, "corrected": found.corrected}
    draw_correlation_heatmap(figures / "distance_correlation.png", found.names, *tables.values())
    with whole_file(figures / "distance_correlation.json") as part:
        numbers = {name: table.tolist() for name, table in tables.items()}
        part.write_text(json.dumps({"names": found.names, "images": sum(map(len, raw)), **numbers}, indent=1))
    rows = {"shared": found.names.index("shared densities"), "noise": found.names.index("Gaussian 1")}
    return {
        f"{of}_raw_{name}": float(table[0, row]) for of, row in rows.items() for name, table in tables.items()
    }

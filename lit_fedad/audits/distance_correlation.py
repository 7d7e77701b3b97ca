"""Measures how far the densities that a finished run shared (FADngs) depend on the images behind them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.audits.page import Outcome
from lit_fedad.audits.statistics import evidence_of
from lit_fedad.contracts import Client
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.federations import draw_some
from lit_fedad.experiment.figures.embedding import (
    density_scores,
    embed_images,
    generator_of,
)
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_files import save_json
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.loop import Federation
from lit_fedad.report.audit_figures import correlation_figure
from lit_fedad.report.figures import save_figure

# Centred distances below this share of the distances themselves are rounding, not spread.
_ROUNDING = 1e-12


class DensityPrivacy(NamedTuple):
    """Distance correlations between raw data, samples of the shared densities and plain noise.

    Attributes:
        names: Names of the k rows and columns.
        r_squared: Plain R^2 [k, k]; FADngs Eq. 18 states the square, not R.
        r: Plain R [k, k].
        corrected: Bias-corrected R^2 [k, k], may be negative.
    """

    names: tuple[str, ...]
    r_squared: Tensor
    r: Tensor
    corrected: Tensor


def density_privacy(
    means: Tensor, covariances: Tensor, raw: Sequence[Tensor], generator: torch.Generator
) -> DensityPrivacy:
    """Measures the dependence of shared densities, and of noise, on the raw data (FADngs, Fig. 9).

    As many points are drawn from each density as there are raw samples behind it, and paired with them in their
    order. Beside them stand three samples of noise of the same dimension: Gaussian 1 with mean 1 and variance
    10, Gaussian 2 with mean 0 and variance 1, and uniform in [0, 1]. Distance correlation knows neither shift
    nor scale, so the two Gaussians differ by the draw alone.

    Args:
        means: Means of the densities [M, D].
        covariances: Their covariances [M, D, D].
        raw: The raw samples behind each density, M times [n_k, ...]; n >= 4 in total, memory is O(n^2).
        generator: Source of all random draws.

    Returns:
        Correlations of raw data, shared densities, Gaussian 1, Gaussian 2 and uniform noise, float64 [5, 5].
    """
    # Eigenvectors instead of a Cholesky factor: a density of few samples may be singular.
    variances, axes = torch.linalg.eigh(covariances.double())
    roots = axes * variances.clamp(min=0).sqrt().unsqueeze(-2)
    counts = torch.tensor([len(samples) for samples in raw])
    shape = (int(counts.sum()), means.shape[1])

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    densities = zip(means.double(), roots, normal().split(counts.tolist()), strict=True)
    shared = torch.cat([mean + noise @ root.T for mean, root, noise in densities])
    samples = {
        "raw data": torch.cat([part.flatten(1) for part in raw]),
        "shared densities": shared,
        "Gaussian 1": 1 + 10**0.5 * normal(),
        "Gaussian 2": normal(),
        "uniform": torch.rand(shape, generator=generator, dtype=torch.float64),
    }
    plain = distance_correlation_matrix(list(samples.values()))
    corrected = distance_correlation_matrix(list(samples.values()), corrected=True)
    return DensityPrivacy(tuple(samples), plain, plain.sqrt(), corrected)


def distance_correlation_matrix(samples: Sequence[Tensor], corrected: bool = False) -> Tensor:
    """Computes the squared distance correlation R^2 of every pair of paired samples.

    Source: Székely, Rizzo and Bakirov, Annals of Statistics 35(6), 2007; FADngs Eq. 18, FADngs Eq. 19.

    Args:
        samples: k samples [n, p_k], n >= 4; rows of the same index belong together.
        corrected: Whether to remove the bias (Székely and Rizzo, 2013, 2014).

    Returns:
        float64 [k, k], symmetrical, with 1 on the diagonal. Plain, R^2 lies in [0, 1]. Corrected, it is about 0 for
        independent samples and may be negative. A sample without spread gives 0, by convention.
    """
    centred = torch.stack([_centred_distances(sample, corrected).flatten() for sample in samples])
    covariances = centred @ centred.T  # the factor 1/n^2, or 1/(n (n - 3)), cancels below
    deviations = covariances.diagonal().sqrt()
    product = deviations.outer(deviations)
    correlations = torch.where(product > 0, covariances / product, 0)
    return correlations.clamp(-1 if corrected else 0, 1)  # bounds that hold up to rounding


def _centred_distances(sample: Tensor, corrected: bool) -> Tensor:
    """Computes double-centred Euclidean distances within a sample [n, n]; U-centred where corrected."""
    points = sample.double()
    points = points - points[0]  # a common offset would cost digits of the distances
    distances = torch.cdist(points, points).fill_diagonal_(0)
    n = len(points)
    rows = distances.sum(0) / (n - 2 if corrected else n)
    total = distances.sum() / ((n - 1) * (n - 2) if corrected else n**2)
    centred = distances - rows - rows.unsqueeze(1) + total
    if corrected:
        centred.fill_diagonal_(0)
    if centred.norm() <= _ROUNDING * distances.norm():
        centred.zero_()
    return centred


# Most training images that are compared with the densities: in all, and of one client.
_MAX_IMAGES, _MAX_IMAGES_EACH = 2000, 200


class MeasureDensities(RunCallback):
    """Computes `report_privacy` after the last round where densities are shared, for ``privacy`` in ``result.json``."""

    def on_rounds_end(self, run: Run) -> None:
        """Computes it where images have classes and ``evaluation.pictures`` is not 0."""
        labelled = isinstance(run.local.images, SemanticSet)
        if labelled and run.config["evaluation"]["pictures"] and _shares_densities(run.federation):
            figures = run.folder.path / "figures"
            run.extras["privacy"] = report_privacy(run.federation, run.local, run.fabric, figures)


def report_privacy(
    federation: Federation, data: Data, fabric: Fabric, figures: Path
) -> dict[str, float] | None:
    """Measures how strongly the densities shared last depend on the images behind them.

    FADngs Eq. 18, FADngs Eq. 19 and FADngs Fig. 9.

    Up to 2,000 training images are taken, at most 200 of a client. Each counts as one behind the density of its client
    that it is nearest to.

    Args:
        federation: Of a method that shares densities, after its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        figures: Folder of ``distance_correlation.png``, and of all numbers in ``distance_correlation.json``.

    Returns:
        Distance correlation with the raw images, of samples from the densities (``shared``) and of Gaussian noise of
        the same dimension (``noise``): plain R^2 and R, and R^2 without its bias. None in all processes but the first,
        and where there are fewer than 4 images.
    """
    evidence = evidence_of(federation)
    assert evidence.densities is not None
    assert isinstance(data.images, SemanticSet)
    rng = generator_of(federation, "privacy")
    per_client = min(_MAX_IMAGES_EACH, max(1, _MAX_IMAGES // len(federation.clients)))
    chosen = {
        c: draw_some(torch.tensor(data.partition.clients[c]), per_client, rng) for c in federation.clients
    }

    def answer(client: Client, number: int) -> Tensor:
        return embed_images(client.task, data.module.normal_loader(chosen[number].tolist()))

    answers = federation.ask(federation.rounds, LocalQuery("embeddings", answer))
    if not fabric.is_global_zero:
        return None
    # Clients that failed are left out: their images are unknown here.
    raw, densities = [], {c: own for c, own in evidence.densities(federation.server).items() if c in answers}
    for client, (means, covariances) in densities.items():
        gaussians = [(mean[None], cov[None]) for mean, cov in zip(means, covariances, strict=True)]
        if gaussians:
            nearest = torch.stack(
                [density_scores(*density, answers[client]) for density in gaussians]
            ).argmin(0)
            raw += [
                data.images.train_images[chosen[client][nearest == place]] for place in range(len(gaussians))
            ]
    if sum(map(len, raw)) < 4:
        return None
    means, covariances = (torch.cat(parts) for parts in zip(*densities.values(), strict=True))
    measured = density_privacy(means, covariances, raw, rng)
    tables = {"r_squared": measured.r_squared, "r": measured.r, "corrected": measured.corrected}
    figure = correlation_figure(measured.names, *tables.values())
    save_figure(figure, figures / "distance_correlation.png")
    with atomic(figures / "distance_correlation.json") as part:
        numbers = {name: table.tolist() for name, table in tables.items()}
        part.write_text(
            json.dumps({"names": measured.names, "images": sum(map(len, raw)), **numbers}, indent=1)
        )
    rows = {"shared": measured.names.index("shared densities"), "noise": measured.names.index("Gaussian 1")}
    return {
        f"{label}_raw_{name}": float(table[0, row])
        for label, row in rows.items()
        for name, table in tables.items()
    }


def _shares_densities(federation: Federation) -> bool:
    evidence = federation.exchanges.evidence
    return evidence is not None and evidence.densities is not None


def correlate(run: FinishedRun) -> Outcome:
    """Recomputes the run's distance correlations; writes ``privacy/dcor.json`` (FADngs, Fig. 9).

    The shared densities are compared with Gaussian noise of the same dimension, which does not depend on the images.

    Args:
        run: Of a method that shares densities.

    Returns:
        The correlations.

    Raises:
        UserError: If its method shares no densities, fewer than 4 training images are behind one, or the data are no
            set of semantic anomalies, whose images are of one size.
    """
    if not _shares_densities(run.federation):
        raise UserError(
            f"attack=dcor: method {run.result['method']} shares no densities, so nothing it shares can be paired with"
            " images; attack=lira looks at other messages, and attack=inversion at banks, images or a classifier's"
            " weights"
        )
    if not isinstance(run.data.images, SemanticSet):
        raise UserError(
            f"attack=dcor: data={run.data.images.name} is no set of semantic anomalies, whose images can be compared"
            " pixel by pixel"
        )
    correlations = report_privacy(run.federation, run.data, run.fabric, run.folder.path / "figures")
    if correlations is None:
        raise UserError(
            f"attack=dcor: fewer than 4 training images stand behind densities of {run.folder.path}"
        )
    path = save_json(run.folder.path / "privacy", "dcor.json", correlations)
    return Outcome("dcor", correlations, {}, [path])

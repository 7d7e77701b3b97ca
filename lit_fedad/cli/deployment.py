"""The commands that use a finished run: ``evaluate``, ``predict``, ``watch``, ``update`` and ``export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_fedad.core.options import read


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``lit-fedad evaluate``.

    Attributes:
        run: MLflow run id, or the run's folder.
        version: Number of the detector's version: 0 as it was trained, None for the newest.
    """

    run: str
    version: int | None = None


@dataclass(frozen=True)
class PredictOptions:
    """Options of ``lit-fedad predict``.

    Attributes:
        run: MLflow run id, or the run's folder.
        images: Folder of images, or one image.
        client: Whose detector scores them; None for the client with most training images.
        out: Folder of the scores; None for ``predictions`` in the run's folder.
        alpha: Promised rate of false alarms; None for the run's.
        product: Product that all images show, where it is known.
        version: As for `EvaluateOptions`.
    """

    run: str
    images: str
    client: int | str | None = None
    out: str | None = None
    alpha: float | None = None
    product: str | None = None
    version: int | None = None


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``lit-fedad export``.

    Attributes:
        run: MLflow run id, or the run's folder.
        client: Whose detector is written; None for the client with most training images.
        format: One or several of ``onnx``, ``pt2`` (`torch.export`), ``openvino`` and ``openvino_int8``.
        images: Folder of images that live and exported detector are compared on; None for random ones alone.
        out: Folder of the files; None for ``export/client_N`` in the run's folder.
        product: Product that all images show, where it is known.
        version: As for `EvaluateOptions`.
        normal: Folder of the client's normal images, which choose the ranges of ``openvino_int8``.
    """

    run: str
    client: int | str | None = None
    format: tuple[str, ...] = ("onnx", "pt2")
    images: str | None = None
    out: str | None = None
    product: str | None = None
    version: int | None = None
    normal: str | None = None


def evaluate(options: Sequence[str]) -> None:
    """Recomputes a finished run's metrics from its last checkpoint.

    Args:
        options: Those of `EvaluateOptions`, and overrides such as ``data.root=DIR``.

    Raises:
        UserError: For bad input.
    """
    chosen, overrides = read(EvaluateOptions, options, "evaluate")
    from lit_fedad.deployment import predict

    predict.evaluate(chosen.run, overrides, chosen.version)


def predict(options: Sequence[str]) -> None:
    """Scores new images with a trained client.

    Args:
        options: Those of `PredictOptions`, and overrides such as ``backbone.weights=FILE``.

    Raises:
        UserError: For bad input, and at the end, if an image could not be read.
    """
    chosen, overrides = read(PredictOptions, options, "predict")
    from lit_fedad.deployment import predict

    predict.predict(
        chosen.run,
        chosen.images,
        chosen.client,
        chosen.out,
        chosen.alpha,
        chosen.product,
        chosen.version,
        overrides,
    )


def export(options: Sequence[str]) -> None:
    """Writes a trained client's detector as files, and checks them.

    Args:
        options: Those of `ExportOptions`, and overrides such as ``backbone.weights=FILE``.

    Raises:
        UserError: For bad input, or if a file computes something else than the client.
    """
    chosen, overrides = read(ExportOptions, options, "export")
    from lit_fedad.deployment import export

    export.export(
        chosen.run,
        chosen.client,
        chosen.format,
        chosen.images,
        chosen.out,
        chosen.product,
        chosen.version,
        chosen.normal,
        overrides,
    )


def watch(options: Sequence[str]) -> None:
    """Scores a folder of images as it grows, and says when they drift.

    Args:
        options: Those of `WatchOptions`, and overrides such as ``backbone.weights=FILE``.

    Raises:
        UserError: For bad input.
    """
    from lit_fedad.deployment.watch import WatchOptions, watch

    watch(*read(WatchOptions, options, "watch"))


def update(options: Sequence[str]) -> None:
    """Folds new normal images into a detector, as a new version of it.

    Args:
        options: Those of `UpdateOptions`, and overrides such as ``data.root=DIR``.

    Raises:
        UserError: For bad input.
    """
    from lit_fedad.deployment.update import UpdateOptions, update

    update(*read(UpdateOptions, options, "update"))

"""The model card of an exported detector: what it is, what it is for, how good it is and how to use it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from lit_fedad import __version__
from lit_fedad.core.bounds import pair
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.data.cards import CARDS, Source
from lit_fedad.metrics.conformal import DecisionRule
from lit_fedad.privacy.image_privacy import in_words
from lit_fedad.report.html import templates
from lit_fedad.report.naming import human_bytes, method_title, metric_text, metric_title, named_version

_PACKAGES = ("torch", "torchvision", "timm", "lightning")


class OnImages(NamedTuple):
    """How an exported detector differs from the live client on image files.

    Attributes:
        images: Number of the images.
        median: Median over the images of the difference of scores, as a share of the live score; of classifiers the
            largest difference of a probability, as a share of that of the likeliest class.
        largest: Largest such difference.
        changed: Number of images with another decision or class.
    """

    images: int
    median: float
    largest: float
    changed: int


class DetectorFile(NamedTuple):
    """An exported detector.

    Attributes:
        files: Names of its files; the first is read, the others belong beside it.
        size: Size of all in bytes.
        difference: Difference from the live client, as a share of the largest value of an output.
        on_images: Difference on image files, if there were any.
    """

    files: tuple[str, ...]
    size: int
    difference: float
    on_images: OnImages | None


@dataclass(frozen=True)
class Facts:
    """Facts that a model card states.

    Attributes:
        result: Content of the run's ``result.json``.
        config: The run's configuration.
        client: Number of the client whose detector it is.
        rules: Decision rules by client; empty for classifiers.
        preprocessing: Content of ``preprocessing.json``.
        outputs: Shape of each output, without the number of images.
        files: The exported detectors.
        compared: Numbers of random images and of image files that they were compared with the client on.
        normal: Number of normal images that chose the ranges of eight-bit numbers; 0 if there are none.
        earlier: Size in bytes by name of files that an earlier export of the same detector wrote.
    """

    result: Mapping[str, Any]
    config: Config
    client: int
    rules: Mapping[int, DecisionRule]
    preprocessing: Mapping[str, Any]
    outputs: Mapping[str, tuple[int, ...]]
    files: Sequence[DetectorFile]
    compared: tuple[int, int]
    normal: int = 0
    earlier: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> ClientNames:
        """Returns what the run's clients are called."""
        return ClientNames.of(self.result)

    @property
    def title(self) -> str:
        """Names the client whose detector it is."""
        return self.names.title(self.client)

    @property
    def classifies(self) -> bool:
        """Tells whether it is a classifier."""
        return "probabilities" in self.outputs

    @property
    def metrics(self) -> dict[str, Mapping[str, Any]]:
        """Returns the metrics of the run's last round, without those whose mean is undefined."""
        metrics = {name: values for name, values in self.result["last"].items() if name != "round"}
        return {name: values for name, values in metrics.items() if values["mean"] is not None}

    @property
    def compared_images(self) -> str:
        """Counts the images that the files were compared with the client on, in words."""
        random, files = self.compared
        return f"{random} random images" + (f" and {files} image files" if files else "")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Lists the downloads that the run's images come from; none if they are not known."""
        data = self.config["data"]
        names = (self.result["data"], data.get("name"), data.get("_target_", "").rpartition(".")[2])
        return next((CARDS[name].sources for name in names if name in CARDS), ())


def model_card(facts: Facts) -> str:
    """Writes the model card in Markdown."""
    environment = templates(
        Path(__file__).parent, metric=metric_title, number=metric_text, human=human_bytes, private=in_words
    )
    result = facts.result
    height, width = pair("size", facts.preprocessing["size"])
    card = environment.get_template("model_card_template.md").render(
        facts=facts,
        result=result,
        method=method_title(facts.config["method"]),
        metadata=_metadata(facts),
        version=named_version(result),
        rule=facts.rules.get(facts.client),
        height=height,
        width=width,
        tile=facts.config["image"].get("tile"),
        programs=[*(file.files[0] for file in facts.files), *facts.earlier],
        versions=[
            f"Python {platform.python_version()}",
            f"lit-fedad {__version__}",  # which may run from a folder, without being installed
            *(f"{package} {version(package)}" for package in _PACKAGES),
        ],
    )
    return f"{card}\n"


def _metadata(facts: Facts) -> str:
    """Writes what a hub reads of a card: library, kind of task, metrics of the run's last round (means of clients)."""
    result = facts.result
    task = "image-classification" if facts.classifies else "image-anomaly-detection"
    data = {"dataset_type": result["data"], "dataset_name": result["data"]}
    results = [
        EvalResult(
            task, **data, metric_type=name, metric_name=metric_title(name), metric_value=values["mean"]
        )
        for name, values in facts.metrics.items()
    ]
    metadata = ModelCardData(
        library_name="lit_fedad",
        tags=["anomaly-detection", "federated-learning", result["method"]],
        pipeline_tag=task if facts.classifies else None,
        model_name=f"{result['method']}, {facts.title}",
        eval_results=results,
    )
    return metadata.to_yaml()

"""The model card of an exported detector: what it is, what it is for, how good it is and how to use it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lit_fedad.core.bounds import pair
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.text import printable_lines
from lit_fedad.data.cards import CARDS, Source
from lit_fedad.deployment.live_detector import named_version
from lit_fedad.metrics.conformal import DecisionRule
from lit_fedad.privacy.image_privacy import in_words
from lit_fedad.report.html import markdown_table
from lit_fedad.report.naming import human_bytes, metric_title

_PACKAGES = ("lit-fedad", "torch", "torchvision", "timm", "lightning")
_MANY = 20  # classes; more are counted, not named

_MEANINGS = {
    "image_score": "how anomalous the image is; high is anomalous, and comparable within this detector alone",
    "anomaly_map": "how anomalous each pixel is, on the same kind of scale",
    "p_value": "share of normal images that score at least as high, at most",
    "decision": "true where the score is above the threshold: anomalous",
    "probabilities": "of each class, in the order of the section above",
    "class": "position of the likeliest class",
}

_Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class OnImages:
    """How an exported detector differs from the live client on image files.

    Attributes:
        images: Number of the images.
        median: Median over the images of the difference of scores, as a share of the live score; of classifiers that
            of the likeliest class's probability.
        largest: Largest such difference.
        changed: Number of images with another decision or class.
    """

    images: int
    median: float
    largest: float
    changed: int


@dataclass(frozen=True)
class DetectorFile:
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

    @property
    def name(self) -> str:
        """Name of the file that is read."""
        return self.files[0]


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
    def compared_images(self) -> str:
        """Counts the images that the files were compared with the client on, in words."""
        random, own = self.compared
        return f"{random} random images" + (f" and {own} image files" if own else "")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Lists the downloads that the run's images come from; none if they are not known."""
        data = self.config["data"]
        names = (self.result["data"], data.get("name"), data.get("_target_", "").rpartition(".")[2])
        return next((CARDS[name].sources for name in names if name in CARDS), ())


def model_card(facts: Facts) -> str:
    """Writes the model card.

    Args:
        facts: What it states.

    Returns:
        The card in Markdown.
    """
    result, partition = facts.result, facts.result["partition"]
    kind = "classifier" if facts.classifies else "anomaly detector"
    return _template().render(
        metadata=_metadata(facts),
        title=f"{result['method']} {kind}, {result['data']}, {facts.title}{named_version(result)}",
        summary=_summary(facts),
        classifies=facts.classifies,
        random_backbone=result["backbone"]["taken"] == "random",
        private=result.get("differential_privacy") is not None,
        client=facts.title,
        last_round=result["last"]["round"],
        metrics=_metrics(facts),
        classes=partition["products"],
        rule=facts.rules.get(facts.client),
        rules=[
            (
                f"**{facts.names.label(n)}**" if n == facts.client else facts.names.label(n),
                f"{rule.threshold:.9g}",
                f"{rule.alpha:g}",
                str(rule.scores.total),
                rule.of,
            )
            for n, rule in facts.rules.items()
        ],
        signature=_signature(facts),
        geometry=_geometry(facts),
        tile=facts.config["image"].get("tile"),
        files=[
            *(_file(file) for file in facts.files),
            *(
                (f"`{name}`", f"{size:,}", *["by an earlier export"] * 3)
                for name, size in facts.earlier.items()
            ),
        ],
        names=[*(file.name for file in facts.files), *facts.earlier],
        quantised=facts.normal,
        compared=facts.compared_images,
        data=result["data"],
        strategy=partition["strategy"],
        clients=[
            (facts.names.label(number), str(size), _classes(partition["products"], counts))
            for number, (size, counts) in enumerate(zip(partition["sizes"], partition["counts"], strict=True))
        ],
        sources=facts.sources,
        versions=[
            f"Python {platform.python_version()}",
            *(f"{package} {version(package)}" for package in _PACKAGES),
        ],
    )


def _metadata(facts: Facts) -> str:
    """Writes what a hub reads of a card: library, kind of task, metrics of the run's last round (means of clients)."""
    result = facts.result
    task = "image-classification" if facts.classifies else "image-anomaly-detection"
    data = {"dataset_type": result["data"], "dataset_name": result["data"]}
    results = [
        EvalResult(
            task, **data, metric_type=name, metric_name=metric_title(name), metric_value=values["mean"]
        )
        for name, values in result["last"].items()
        if name != "round" and values["mean"] is not None
    ]
    metadata = ModelCardData(
        library_name="lit_fedad",
        tags=["anomaly-detection", "federated-learning", result["method"]],
        pipeline_tag=task if facts.classifies else None,
        model_name=f"{result['method']}, {facts.title}",
        eval_results=results,
    )
    return metadata.to_yaml()


def _summary(facts: Facts) -> _Rows:
    result, method, backbone = facts.result, facts.config["method"], facts.result["backbone"]
    frozen = f"{backbone['name']}, weights {backbone['taken']}, SHA-256 {backbone['sha256']}"
    rows = [
        ("method", f"{method['name']} ({method['paper']})"),
        ("task", result["task"]),
        ("backbone", "none, trained from pixels" if backbone["name"] == "none" else frozen),
        ("clients", f"{len(result['partition']['sizes'])}; this is {facts.title}"),
        ("rounds", str(result["rounds"])),
        ("seed", str(result["seed"])),
    ]
    if (private := result.get("differential_privacy")) is not None:
        rows.append(("differential privacy", f"{in_words(private)}, of all that was sent to train"))
    return [*rows, *([("MLflow run", result["tracking_run_id"])] if result["tracking_run_id"] else [])]


def _metrics(facts: Facts) -> _Rows:
    rows: _Rows = []
    for name, values in facts.result["last"].items():
        if name == "round" or values["mean"] is None:
            continue
        own = values["per_client"].get(str(facts.client))
        worst = [
            facts.names.label(int(number))
            for number, value in values["per_client"].items()
            if value == values["worst"]
        ]
        cells = (_number(own), _number(values["mean"]), f"{_number(values['worst'])} ({', '.join(worst)})")
        rows.append((metric_title(name), *cells, _number(values["pooled"])))
    return rows


def _signature(facts: Facts) -> _Rows:
    channels, (height, width) = len(facts.preprocessing["mode"]), pair("size", facts.preprocessing["size"])
    colours = "grey" if channels == 1 else "red, green, blue"
    rows: _Rows = [
        ("`pixels`", f"[B, {channels}, {height}, {width}]", f"input: float32 in 0 .. 1, {colours}")
    ]
    for name, shape in facts.outputs.items():
        rows.append((f"`{name}`", f"[{', '.join(map(str, ('B', *shape)))}]", _MEANINGS[name]))
    return rows


def _file(file: DetectorFile) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in file.files)
    cells = ("-", "-")
    if (seen := file.on_images) is not None:
        cells = (f"{seen.median:.1e} / {seen.largest:.1e}", f"{seen.changed} of {seen.images}")
    return names, f"{file.size} ({human_bytes(file.size)})", f"{file.difference:.1e}", *cells


def _geometry(facts: Facts) -> str:
    (height, width), short = pair("size", facts.preprocessing["size"]), facts.preprocessing["resize"]
    if height == width:
        return {
            "squeeze": f"both sides to {height}",
            "pad": f"the long side to {height}, with black beside the short one",
            "crop": f"the short side to {short or height}, then the centre crop",
        }[facts.preprocessing["fit"]]
    return {
        "squeeze": f"the height to {height}, the width to {width}",
        "pad": f"by one factor to fit into {height} x {width} (height, width), with black beside it",
        "crop": f"by one factor to cover {height} x {width} (height, width), then the centre crop",
    }[facts.preprocessing["fit"]]


def _classes(names: Sequence[str], counts: Sequence[int]) -> str:
    """Names the classes of a client's images with their numbers, or counts them if they are many."""
    present = [f"{name} {count}" for name, count in zip(names, counts, strict=True) if count]
    return ", ".join(present) or "nothing" if len(present) <= _MANY else f"{len(present)} classes"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@cache
def _template() -> Template:
    environment = Environment(  # noqa: S701 - the card is Markdown, not HTML
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        finalize=printable_lines,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["table"] = markdown_table
    return environment.get_template("model_card_template.md")

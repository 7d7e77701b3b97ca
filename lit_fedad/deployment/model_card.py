"""The model card of an exported detector: what it is, what it is for, how good it is and how to use it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from lit_fedad.config import Config
from lit_fedad.data.cards import CARDS, Source
from lit_fedad.report.naming import human_bytes, metric_title

_PACKAGES = ("lit-fedad", "torch", "torchvision", "timm", "lightning")
_MANY = 20  # products; more are counted, not named

_READ = """\
import json

import numpy as np
from PIL import Image, ImageOps

how = json.load(open("preprocessing.json"))


def read(path):
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB").convert(how["mode"])
    side, short = how["size"], how["resize"]
    width, height = image.size
    if short is None:
        image = image.resize((side, side), Image.BICUBIC)
    else:
        long = int(short * max(width, height) / min(width, height))
        image = image.resize((short, long) if width <= height else (long, short), Image.BICUBIC)
        left, top = round((image.width - side) / 2), round((image.height - side) / 2)
        image = image.crop((left, top, left + side, top + side))
    pixels = np.asarray(image, np.float32).reshape(side, side, -1) / 255
    return pixels.transpose(2, 0, 1)[None]


pixels = read("image.png")"""

_LOADERS = {
    "detector.onnx": """\
import onnxruntime

session = onnxruntime.InferenceSession("detector.onnx")
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(names, {"pixels": pixels})))""",
    "detector.pt2": """\
import torch

with torch.no_grad():
    outputs = torch.export.load("detector.pt2").module()(torch.from_numpy(pixels))""",
}

_MEANINGS = {
    "image_score": "how anomalous the image is; high is anomalous, and comparable within this detector alone",
    "anomaly_map": "how anomalous each pixel is, on the same kind of scale",
    "decision": "true where the score is above the threshold: anomalous",
    "probabilities": "of each class, in the order of the section above",
    "class": "position of the likeliest class",
}


@dataclass(frozen=True)
class File:
    """An exported detector.

    Attributes:
        name: Of the file.
        size: In bytes.
        difference: From the live client, as a share of the largest value of an output.
    """

    name: str
    size: int
    difference: float


@dataclass(frozen=True)
class Facts:
    """What a card is made from.

    Attributes:
        result: Content of the run's ``result.json``.
        config: The run's configuration.
        client: Whose detector it is.
        thresholds: Of image scores, by client; empty for classifiers.
        preprocessing: How an image becomes the input.
        outputs: Shape of each output, less the number of images.
        files: The exported detectors.
        compared: Numbers of random images and of image files that they were compared with the client on.
    """

    result: Mapping[str, Any]
    config: Config
    client: int
    thresholds: Mapping[int, float]
    preprocessing: Mapping[str, Any]
    outputs: Mapping[str, tuple[int, ...]]
    files: Sequence[File]
    compared: tuple[int, int]

    @property
    def seen(self) -> str:
        """The images of the comparison, in words."""
        random, own = self.compared
        return f"{random} random images" + (f" and {own} image files" if own else "")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the run's images come from, as far as it is known."""
        data = self.config["data"]
        names = (self.result["data"], data.get("name"), data["_target_"].rpartition(".")[2])
        return next((CARDS[name].sources for name in names if name in CARDS), ())


def model_card(facts: Facts) -> str:
    """The card, in Markdown."""
    sections = {
        f"# {_title(facts)}": _what(facts),
        "## Use and limits": _limits(facts),
        "## Metrics of the run": _metrics(facts),
        "## " + ("Classes" if _classifies(facts) else "Threshold"): _decision(facts),
        "## Input and outputs": _signature(facts),
        "## Files": _files(facts),
        "## How to use it": _usage(facts),
        "## Data": _data(facts),
        "## Versions": _versions(),
    }
    return "\n\n".join(f"{head}\n\n{body}" for head, body in sections.items()) + "\n"


def _classifies(facts: Facts) -> bool:
    return "probabilities" in facts.outputs


def _title(facts: Facts) -> str:
    kind = "classifier" if _classifies(facts) else "anomaly detector"
    return f"{facts.result['method']} {kind}, {facts.result['data']}, client {facts.client}"


def _what(facts: Facts) -> str:
    result, method, backbone = facts.result, facts.config["method"], facts.result["backbone"]
    frozen = f"{backbone['name']}, weights {backbone['taken']}, SHA-256 {backbone['sha256']}"
    rows = [
        ("method", f"{method['name']} ({method['paper']})"),
        ("task", result["task"]),
        ("backbone", "none, trained from pixels" if backbone["name"] == "none" else frozen),
        ("clients", f"{len(result['partition']['sizes'])}; this is client {facts.client}"),
        ("rounds", str(result["rounds"])),
        ("seed", str(result["seed"])),
    ]
    if result["tracking_run_id"]:
        rows.append(("MLflow run", result["tracking_run_id"]))
    return _table(("", ""), rows)


def _limits(facts: Facts) -> str:
    lines = [
        "Made for images like those it was trained on, listed below. On anything else it is untested: another camera,"
        " light, position or product moves its scores."
    ]
    lines.append("It points a person to images, and decides nothing alone. It is no medical device.")
    if _classifies(facts):
        lines.append(
            "It knows the classes below and no others: an image of none of them gets one of them, too."
        )
    else:
        lines.append(
            "It knows normal images alone: a defect that looks like normal variation is missed, and what is new but"
            " harmless is reported."
        )
    if facts.result["backbone"]["taken"] == "random":
        lines.append(
            "**Its backbone has random weights: it shows that everything works, and detects nothing well.**"
        )
    lines.append(
        "The file holds weights, and for most detectors features or densities of training images: share it as"
        " carefully as what it was trained on."
    )
    return "\n".join(f"- {line}" for line in lines)


def _metrics(facts: Facts) -> str:
    last = facts.result["last"]
    rows = []
    for name, values in last.items():
        if name == "round" or values["mean"] is None:
            continue
        own = values["per_client"].get(str(facts.client))
        worst = [number for number, value in values["per_client"].items() if value == values["worst"]]
        cells = (_number(own), _number(values["mean"]), f"{_number(values['worst'])} ({', '.join(worst)})")
        rows.append((metric_title(name), *cells, _number(values["pooled"])))
    heads = ("metric", f"client {facts.client}", "mean", "worst (client)", "pooled")
    return f"Round {last['round']}, on the test images of all clients.\n\n{_table(heads, rows)}"


def _decision(facts: Facts) -> str:
    if _classifies(facts):
        return "In order: " + ", ".join(facts.result["partition"]["products"]) + "."
    quantile = facts.config["evaluation"]["threshold_quantile"]
    rows = [
        (f"**{number}**" if number == facts.client else str(number), f"{value:.9g}")
        for number, value in facts.thresholds.items()
    ]
    return (
        f"An image is called anomalous above **{facts.thresholds[facts.client]:.9g}**: the {quantile:g} quantile of the"
        " scores of the client's own training images. No test label was looked at. Of new normal images, which the"
        f" detector has not seen, expect more than {1 - quantile:.1%} above it. The run's thresholds by"
        f" client:\n\n{_table(('client', 'threshold'), rows)}"
    )


def _signature(facts: Facts) -> str:
    how = facts.preprocessing
    channels, side = len(how["mode"]), how["size"]
    rows = [
        ("`pixels`", f"[B, {channels}, {side}, {side}]", f"input: float32 in 0 .. 1, {_colours(channels)}")
    ]
    for name, shape in facts.outputs.items():
        rows.append((f"`{name}`", f"[{', '.join(map(str, ('B', *shape)))}]", _MEANINGS[name]))
    short = how["resize"]
    geometry = (
        f"both sides to {side}" if short is None else f"the short side to {short}, then the centre crop"
    )
    return (
        f"{_table(('name', 'shape', 'meaning'), rows)}\n\nB is any number of images. Normalisation is part of the file;"
        f" resizing is not: {geometry}, bicubic with antialiasing (Pillow), as `preprocessing.json` says. Other"
        " resampling moves the scores. Transparent images were put on white, 16 bits scaled to 8."
    )


def _files(facts: Facts) -> str:
    rows = [
        (f"`{file.name}`", f"{file.size} ({human_bytes(file.size)})", f"{file.difference:.1e}")
        for file in facts.files
    ]
    return (
        f"{_table(('file', 'bytes', 'difference'), rows)}\n\nThe difference is the largest from the live client on"
        f" {facts.seen}, as a share of the largest value of an output, in single precision on a CPU."
    )


def _usage(facts: Facts) -> str:
    blocks = [_READ, *(_LOADERS[file.name] for file in facts.files)]
    return "In the folder of the files:\n\n" + "\n\n".join(f"```python\n{block}\n```" for block in blocks)


def _data(facts: Facts) -> str:
    partition = facts.result["partition"]
    rows = [
        (str(number), str(size), _held(partition["products"], counts))
        for number, (size, counts) in enumerate(zip(partition["sizes"], partition["counts"], strict=True))
    ]
    heads = ("client", "training images", "of")
    sources = [
        f"- {source.title}: licence {source.licence}; {source.address}; cite: {source.paper}"
        for source in facts.sources
    ] or ["- Licences of these images are not known here; they may bind this detector, too."]
    return (
        f"{facts.result['data']}, dealt by {partition['strategy']}.\n\n{_table(heads, rows)}\n\n"
        + "\n".join(sources)
        + "\n- The weights of a backbone are under the licence of where they were taken from."
    )


def _versions() -> str:
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *versions]) + "."


def _held(products: Sequence[str], counts: Sequence[int]) -> str:
    held = [f"{product} {count}" for product, count in zip(products, counts, strict=True) if count]
    return _listed(held) if held else "nothing"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MANY else f"{len(names)} classes"


def _colours(channels: int) -> str:
    return "grey" if channels == 1 else "red, green, blue"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

"""Measures ``lit-fedad watch`` on streams of real images that begin to drift: alarms, delay, false alarms.

    python scripts/measure_drift.py runs=RUN,RUN root=DATA new=FOLDER [streams=20] [weights=FILE]

Each run is of data in MVTec layout below ``root``. A stream shows one of its products: normal images that the run has
not trained with, then ``after`` images that have changed. Scores are computed once; streams draw from them.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _script import script
from torch import Tensor

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.options import bind
from lit_fedad.data.image_files import LeftOut, find_images
from lit_fedad.data.sample import ImageSet
from lit_fedad.deployment.live_detector import choose_client
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import build_images
from lit_fedad.experiment.datasets import image_transform
from lit_fedad.experiment.finished_run import complete_run, load_client, one_process, same_model
from lit_fedad.metrics.conformal import Calibration
from lit_fedad.metrics.drift import DriftTest
from lit_fedad.report.console import Display

from torchvision.transforms.functional import gaussian_blur  # isort: skip  (lit_fedad makes it importable)

_BATCH = 16
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda pixels: pixels,
    "brightness x 1.1": lambda pixels: (1.1 * pixels).clamp(max=1),
    "brightness x 1.3": lambda pixels: (1.3 * pixels).clamp(max=1),
    "blur, 0.5 pixels": lambda pixels: gaussian_blur(pixels, [5, 5], [0.5, 0.5]),
    "blur, 1 pixel": lambda pixels: gaussian_blur(pixels, [9, 9], [1.0, 1.0]),
}
_NEW, _DEFECTS = "a new product", {"5 % defects": 0.05, "30 % defects": 0.3}


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        runs: Folders of complete runs.
        root: Folder of the data.
        new: Folder of images of a product that no client holds.
        weights: File of the backbone's weights, where the runs' is not there.
        streams: Streams of each kind, over all runs and products.
        quiet: Further streams without drift, over all runs and products, for false alarms.
        before: Normal images of a stream before it drifts.
        after: Images after.
        most: Normal images of a product that are scored.
        run_length: Mean number of images between false alarms, at least; several are compared.
    """

    runs: tuple[str, ...]
    root: str
    new: str
    weights: str | None = None
    streams: int = 20
    quiet: int = 400
    before: int = 60
    after: int = 60
    most: int = 150
    run_length: tuple[int, ...] = (1_000, 10_000)


@dataclass(frozen=True)
class Pool:
    """Scores of one run's detector on images of one product.

    Attributes:
        calibration: The run's calibration.
        client: The client that is watched.
        product: The product.
        scores: Scores of normal images by change, of a new product, and of defects.
    """

    calibration: Calibration
    client: int
    product: str
    scores: dict[str, Tensor]

    def alarms(self, stream: Sequence[float], run_length: int, seed: int) -> list[int]:
        """Returns the images, from 0, at which an alarm is raised."""
        rule = self.calibration.rule(self.client, 0.5, self.product)
        steps = DriftTest(rule.scores, run_length, seed).add(stream)
        return [number for number, step in enumerate(steps) if step.alarm]


def score(run: str, options: Options) -> Iterator[Pool]:
    """Scores the images of each product with the run's detector."""
    given = {"data.root": options.root} | ({"backbone.weights": options.weights} if options.weights else {})
    folder, result, config = complete_run(run, given)
    model, calibration, fabric = same_model(config, result), folder.calibration(), one_process(config)
    client = choose_client(None, result, calibration.clients)
    load_client(model, folder.path, folder.config(), client, fabric)
    transform = image_transform(config, model.task)
    plain = replace(transform, mean=(0,), std=(1,))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))

    def scores(paths: Sequence[Path], change: str = "nothing") -> Tensor:
        found = []
        for start in range(0, len(paths), _BATCH):
            pixels = torch.stack([plain.image(path) for path in paths[start : start + _BATCH]])
            batch = {"image": (_CHANGES[change](pixels) - mean) / std}
            found.append(predict_batch(model.client, batch, fabric).image_score.cpu())
        return torch.cat(found)

    images = build_images(config)
    assert isinstance(images, ImageSet)
    trained = {sample.path.resolve() for sample in images.train}
    new = scores(_some(find_images(Path(options.new), LeftOut()), options, run))
    for place in config["data"]["products"]:
        product = Path(place).name
        good = [
            path for path in find_images(Path(options.root) / place, LeftOut()) if path.parent.name == "good"
        ]
        normal = _some([path for path in good if path.resolve() not in trained], options, run)
        tests = find_images(Path(options.root) / place / "test", LeftOut())
        defects = _some([path for path in tests if path.parent.name != "good"], options, run)
        found = {change: scores(normal, change) for change in _CHANGES}
        yield Pool(calibration, client, product, {**found, _NEW: new, "defects": scores(defects)})


def _some(paths: Sequence[Path], options: Options, run: str) -> list[Path]:
    order = numpy_generator("images", run).permutation(len(paths))[: options.most]
    return [paths[place] for place in order]


def draw(pool: Pool, change: str, options: Options, seed: int) -> list[float]:
    """Draws a stream: no image occurs twice in it."""
    rng = numpy_generator(seed, "stream", pool.product, change)
    normal = rng.permutation(len(pool.scores["nothing"]))[: options.before + options.after]
    stream: list[float] = pool.scores["nothing"][normal].tolist()
    later = range(options.before, options.before + options.after)
    if change in _CHANGES:
        stream[options.before :] = pool.scores[change][normal[options.before :]].tolist()
        return stream
    share, held = (1.0, pool.scores[_NEW]) if change == _NEW else (_DEFECTS[change], pool.scores["defects"])
    other = held[rng.permutation(len(held))].tolist()
    for place in later:
        if rng.random() < share:
            stream[place] = other.pop()
    return stream


def measure(options: Options) -> list[dict[str, str]]:
    """Raises alarms on all streams, and counts them by kind of drift and run length."""
    pools = [pool for run in options.runs for pool in score(run, options)]
    length, rows = options.before + options.after, []
    for run_length in options.run_length:
        for change in (*_CHANGES, _NEW, *_DEFECTS):
            early, delays = 0, []
            for number in range(options.streams):
                pool = pools[number % len(pools)]
                found = pool.alarms(draw(pool, change, options, number), run_length, number)
                early += sum(image < options.before for image in found)
                delays += [image - options.before + 1 for image in found if image >= options.before][:1]
            rows.append(
                {
                    "run length": str(run_length),
                    "drift": change,
                    "alarms before": str(early),
                    "streams with an alarm after": f"{len(delays)} of {options.streams}",
                    "images until it, median": f"{statistics.median(delays):g}" if delays else "-",
                    "most": str(max(delays, default="-")),
                }
            )
        alarms = [
            len(
                pools[n % len(pools)].alarms(
                    draw(pools[n % len(pools)], "nothing", options, n), run_length, n
                )
            )
            for n in range(options.streams, options.streams + options.quiet)
        ]
        Display().note(
            f"run length {run_length}: {sum(alarms)} false alarms in {options.quiet} streams of {length} images without"
            f" drift; promised are at most {options.quiet * length / run_length:g} on average"
        )
    return rows


if __name__ == "__main__":
    with script() as display:
        display.table(bind(measure, sys.argv[1:], "measure_drift")())

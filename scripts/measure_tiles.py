"""Measures what tiles find in large images of a photographed texture, in which a small disc shows another one.

    python scripts/measure_tiles.py weights=FILE [out=DIR] [forms=strip,square] [images=8] [seed=0]

Textures are photographs that ship inside scikit-image, mirrored at their edges to strips of 1,200 x 400 pixels and
squares of 2,048. Training and test images come from different halves of the photograph. The disc is 20 pixels wide, and
has mean and contrast of what it replaces. Each form is scored as a whole at 256 pixels and in tiles of 256, by ordinary
runs of ``method=federated_subspace``; ``FILE`` holds the weights of ResNet-18. A disc is found where the highest pixel
of the image's map lies on it, or beside it by at most its width. One map is computed with its tiles one by one and with
several in a call; the table has the largest difference, as a share of the map's highest value.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from _script import script
from PIL import Image
from torch.nn.functional import max_pool2d

from lit_fedad.contracts import Client
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind
from lit_fedad.data.sample import Sample
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.train import train
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.models.large_images import TiledPyramid

FORMS = {"strip": (400, 1200), "square": (2048, 2048)}  # height, width
NORMAL, FOREIGN = "brick", "gravel"
DEFECT = 20  # pixels across
RIM = 64  # pixels between the disc and the edge of the image


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        weights: File of ResNet-18's weights.
        out: Folder of images and runs.
        forms: Keys of `FORMS`.
        images: Training images, normal test images and anomalous test images of a form, each.
        seed: Seed of the images and of the runs.
    """

    weights: str
    out: str = "outputs/tiles"
    forms: tuple[str, ...] = tuple(FORMS)
    images: int = 8
    seed: int = 0


def texture(half: np.ndarray, shape: tuple[int, int], draw: np.random.Generator) -> np.ndarray:
    """Mirrors a photograph to an image of a shape, from a random place on."""
    start = [int(draw.integers(0, side)) for side in half.shape]
    ends = [
        max(0, begin + pixels - side) for begin, pixels, side in zip(start, shape, half.shape, strict=True)
    ]
    whole = np.pad(half, [(0, end) for end in ends], mode="symmetric")
    return whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]].copy()


def add_disc(image: np.ndarray, foreign: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Replaces a disc of an image by another texture of the same mean and contrast; returns the mask."""
    top, left = (int(draw.integers(RIM, side - RIM - DEFECT)) for side in image.shape)
    place = slice(top, top + DEFECT), slice(left, left + DEFECT)
    up, across = (int(draw.integers(0, side - DEFECT)) for side in foreign.shape)
    patch = foreign[up : up + DEFECT, across : across + DEFECT].astype(float)
    patch = (patch - patch.mean()) / patch.std() * image[place].std() + image[place].mean()
    y, x = np.mgrid[:DEFECT, :DEFECT] - (DEFECT - 1) / 2
    inside = y**2 + x**2 <= (DEFECT / 2) ** 2
    image[place] = np.where(inside, patch.clip(0, 255), image[place]).astype(np.uint8)
    mask = np.zeros(image.shape, np.uint8)
    mask[place] = 255 * inside
    return mask


def draw_set(options: Options, form: str, folder: Path) -> None:
    """Writes the images of one form in MVTec layout, unless they are there."""
    if folder.exists():
        return
    draw = np.random.default_rng(options.seed)
    photograph, foreign = (np.asarray(getattr(skimage.data, name)()) for name in (NORMAL, FOREIGN))
    middle = photograph.shape[1] // 2
    halves = {"train": photograph[:, :middle], "test": photograph[:, middle:]}
    kinds = [("train", "good"), ("test", "good"), ("test", "disc")]
    for number, (part, kind) in enumerate(kind for kind in kinds for _ in range(options.images)):
        image = texture(halves[part], FORMS[form], draw)
        files = {folder / part / kind / f"{number:03}.png": image}
        if kind == "disc":
            files[folder / "ground_truth" / kind / f"{number:03}_mask.png"] = add_disc(image, foreign, draw)
        for path, pixels in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


class Maps(RunCallback):
    """Adds to the result how many discs the maps find, and how far the batch of tiles moves a map.

    Args:
        form: Key of `FORMS`.
    """

    def __init__(self, form: str) -> None:
        self.shape = FORMS[form]

    def on_rounds_end(self, run: Run) -> None:
        """Asks the first of the clients, which share a model."""

        def look(client: Client, number: int) -> tuple[int, float]:
            found = sum(self._found(client, batch, run) for batch in run.local.module.test_dataloader() or ())
            return found, self._moved(client, run)

        found, moved = run.federation.ask(
            run.federation.rounds, LocalQuery("look", look), run.federation.clients[:1]
        )[0]
        run.extras["maps"] = {"found": found, "moved": moved}

    def _found(self, client: Client, batch: dict[str, Any], run: Run) -> int:
        maps = predict_batch(client, batch, run.fabric).anomaly_map
        assert maps is not None
        up, across = (
            round(DEFECT * now / side) for now, side in zip(maps.shape[1:], self.shape, strict=True)
        )
        near = max_pool2d(batch["mask"][:, None].float(), (2 * up + 1, 2 * across + 1), 1, (up, across))
        highest = maps.cpu().flatten(1).argmax(1)
        return int(near.flatten(1).gather(1, highest[:, None]).sum())

    def _moved(self, client: Client, run: Run) -> float:
        backbone = run.model.backbone
        if not isinstance(backbone, TiledPyramid):
            return 0.0
        first = run.local.images.test[0]
        assert isinstance(first, Sample)
        batch = {"image": run.local.transform.image(first.path)[None]}
        usual, maps = backbone.at_once, []
        for backbone.at_once in (1, usual):
            anomaly_map = predict_batch(client, batch, run.fabric).anomaly_map
            assert anomaly_map is not None
            maps.append(anomaly_map)
        return float((maps[0] - maps[1]).abs().max() / maps[1].max())


def measure(options: Options) -> list[dict[str, str]]:
    """Makes images and runs, and returns a row of the table for each run.

    Args:
        options: What is measured, and where images and runs lie.

    Raises:
        UserError: As a run does.
    """
    if unknown := set(options.forms) - set(FORMS):
        raise UserError(f"forms={','.join(options.forms)}: '{min(unknown)}' is none of {', '.join(FORMS)}")
    rows = []
    for form in options.forms:
        (height, width), out = FORMS[form], Path(options.out)
        draw_set(options, form, out / "data" / form)
        geometries = {
            "whole": ["image.size=256"],
            "tiles": [f"image.size=[{height},{width}]", "image.tile=256"],
        }
        for name, geometry in geometries.items():
            began = time.monotonic()
            result = train(
                compose(
                    ["method=federated_subspace", "data=mvtec_mixture", f"data.root={out / 'data'}", "grid=32",
                     f"data.products=[{form}]", "backbone=resnet18", f"backbone.weights={options.weights}",
                     "partition=iid", "partition.clients=2", "batch_size=2", "evaluation.batch_size=2",
                     "tracking=off", "evaluation.alpha=0.2", "evaluation.pictures=0",
                     f"seed={options.seed}", f"out={out / f'{form}-{name}'}", *geometry]
                ),
                quiet=True,
                callbacks=[Maps(form)],
            )  # fmt: skip
            last = result["last"]
            figures = {key: f"{last[key]['mean']:.3f}" for key in ("i_auroc", "p_auroc", "pro", "p_ap")}
            peak = f"{result['peak_rss_bytes'] / 2**30:.1f} GB"
            seconds = f"{time.monotonic() - began:.0f}"
            maps = {
                "found": f"{result['maps']['found']} of {options.images}",
                "batch": f"{result['maps']['moved']:.0e}",
            }
            rows.append(
                {"image": form, "seen as": name, **figures, **maps, "seconds": seconds, "memory": peak}
            )
    return rows


if __name__ == "__main__":
    with script() as screen:
        screen.table(bind(measure, sys.argv[1:], "measure_tiles")())

"""Figures of condensed images, and of their features among those of real images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.data.labelled import LabelledDataset, LabelledSet
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.loop import Federation
from lit_fedad.methods.parts.condensed_images import Knowledge
from lit_fedad.methods.parts.condensed_server import CondensedServer
from lit_fedad.report.figures import save_figure
from lit_fedad.report.knowledge import evenly, knowledge_plane, knowledge_sheet, tsne_layout

_EACH, _IN_THE_PLANE = 40, 1000  # images of a class and kind at most; images in the plane at most


class CondensedImages(RunCallback):
    """A callback that draws condensed images after the last round, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws condensed images."""
        if run.config["evaluation"]["pictures"]:
            draw_condensed(run.federation, run.local, run.fabric, run.folder.path)


def draw_condensed(federation: Federation, data: Data, fabric: Fabric, folder: Path) -> None:
    """Draws condensed images by class and round, and their features among test images; nothing if there are none.

    Features are those of the first client, as it predicts after the last round, laid out with t-SNE.
    """
    shared = cast("CondensedServer", federation.server).images_by_round()
    count = len(data.images.categories)
    chosen = fabric.broadcast(_chosen(shared, count))
    if chosen is None:
        return
    assert isinstance(data.images, LabelledSet)
    assert isinstance(data.module.test, LabelledDataset)
    condensed, labels = chosen
    real = _some(data.images.test_labels, count)
    test = data.module.test
    images = torch.cat([test.normalise(condensed), test.__getitems__(real.tolist())["image"]])

    def answer(client: Client, number: int) -> Tensor:
        with torch.inference_mode(), fabric.autocast():
            parts = [
                client.task({"image": part.to(fabric.device)}).flatten(1).float().cpu()
                for part in images.split(data.module.eval_batch_size)
            ]
        return torch.cat(parts)

    first = federation.clients[0]
    features = federation.ask(federation.rounds, LocalQuery("features of images", answer), [first]).get(first)
    if features is None:
        return
    sheet = {round: (own.numpy(), kinds.numpy()) for round, (own, kinds) in shared.items()}
    save_figure(knowledge_sheet(sheet, data.images.classes), folder / "figures" / "knowledge.png")
    plane = knowledge_plane(
        tsne_layout(features),
        torch.cat([labels, data.images.test_labels[real]]),
        torch.arange(len(images)) < len(condensed),
        data.images.classes,
    )
    save_figure(plane, folder / "figures" / "knowledge_tsne.png")


def _chosen(shared: Mapping[int, Knowledge], classes: int) -> tuple[Tensor, Tensor] | None:
    """Returns selected images of all rounds, and their labels."""
    if not shared:
        return None
    parts, kinds = zip(*shared.values(), strict=True)
    labels = torch.cat(kinds)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[_some(labels, classes)] = True
    masks = chosen.split([len(part) for part in parts])  # many rounds' images are not copied
    return torch.cat([part[mask] for part, mask in zip(parts, masks, strict=True)]), labels[chosen]


def _some(labels: Tensor, classes: int) -> Tensor:
    """Returns positions of a few images of each class, evenly selected, ascending."""
    each = min(_EACH, max(1, _IN_THE_PLANE // (2 * classes)))
    own = [(labels == label).nonzero()[:, 0] for label in range(classes)]
    return torch.cat([positions[evenly(len(positions), each)] for positions in own]).sort().values

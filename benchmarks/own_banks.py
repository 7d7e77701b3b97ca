"""One evaluation of CSI from pixels: clients score the same test images by banks of their own, embedded once or anew.

Processor seconds, which other processes disturb less.
"""

import time
from collections.abc import Callable
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_fedad.contracts import Client
from lit_fedad.evaluation.predict import ImageScorer, image_scores
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.models.convnets import ResNetCifar
from lit_fedad.tasks.csi import CSI

CLIENTS, IMAGES, BANK = 10, 500, 300


def evaluation(client: Client, banks: Tensor, score: Callable[[Client], Tensor]) -> tuple[float, Tensor]:
    """Scores the test images with every bank [clients, 4, images, D]; returns processor seconds and the scores."""
    began, scores = time.process_time(), []
    for bank in banks:
        client.task.bank = bank
        scores.append(score(client))
    return time.process_time() - began, torch.stack(scores)


def main() -> None:
    """Prints the seconds of both ways, and whether they give the same scores."""
    torch.manual_seed(0)
    task = CSI(
        ResNetCifar(channels=16), views=ContrastiveViews(flip=0), rounds=1, image_size=32, samples=1
    ).eval()
    client, fabric = FedAvgClient(task), Fabric(accelerator="auto", devices=1)
    client.to(fabric.device)
    banks = torch.nn.functional.normalize(torch.randn(CLIENTS, 4, BANK, task.projected), dim=3)
    images = cast("Dataset", [{"image": image} for image in torch.rand(IMAGES, 3, 32, 32)])
    loader: DataLoader = DataLoader(images, batch_size=64)
    ways: dict[str, Callable[[Client], Tensor]] = {
        "client by client": lambda client: image_scores(client, loader, fabric),
        "embedded once": ImageScorer(loader, fabric),
    }
    found = {name: evaluation(client, banks.to(fabric.device), score) for name, score in ways.items()}
    for name, (seconds, _) in found.items():
        print(f"{CLIENTS} clients, {IMAGES} images, one crop, {name}: {seconds:.1f} s", flush=True)
    scores = [scores for _, scores in found.values()]
    print("equal scores" if torch.equal(*scores) else "DIFFERENT scores")


if __name__ == "__main__":
    main()

"""A round of GLDP against FedRep's with the same epochs (ResNet-18, one client of 300 images): what prototypes cost."""

import time

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.federation.client_runner import fit
from lit_fedad.memory.prototypes import Prototypes
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.gldp import GLDPClient
from lit_fedad.models.convnets import ResNetCifar
from lit_fedad.tasks.classifier import Classifier

CLASSES, IMAGES, BATCH = 4, 300, 32
TENTHS = 10  # of a round's t = 10 and s = 20 epochs, one base epoch and two head epochs are played
REPEATS = 4


def clients(channels: int) -> dict[str, FedRepClient]:
    """In a second task: GLDP knows older prototypes, and those of all clients."""
    encoders = [ResNetCifar(channels=channels) for _ in range(2)]
    fedrep, gldp = (Classifier(encoder, CLASSES, momentum=0) for encoder in encoders)
    own = GLDPClient(gldp, base_epochs=1, head_epochs=2)
    known = Prototypes(torch.rand(CLASSES, gldp.num_features), torch.ones(CLASSES, dtype=torch.bool))
    own.old = own.common_prototypes = known
    return {"FedRep": FedRepClient(fedrep, head_epochs=2, base_epochs=1, base_first=True), "GLDP": own}


def seconds(client: FedRepClient, loader: DataLoader, fabric: Fabric) -> tuple[float, float]:
    """Processor time of a tenth of a round's epochs, and of making the message."""
    client.context = Context(0, 1, client=0)
    began = time.process_time()
    scalars = fit(client, loader, fabric)
    fitted = time.process_time()
    client.send(loader)
    assert all(scalars.get(f"{name}_relation", 1) > 0 for name in ("local", "global"))
    return fitted - began, time.process_time() - fitted


def main() -> None:
    """Prints processor seconds a round (other processes disturb the clock), the least of several in turns."""
    torch.manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
    data = LabelledDataset(images, torch.arange(IMAGES) % CLASSES)
    loader = FederatedDataModule(data, data, [range(IMAGES)], BATCH).client_loader(0, torch.Generator())
    fabric = Fabric(accelerator="cpu", devices=1)
    for channels in (64, 16):
        both = clients(channels)
        taken = [
            {name: seconds(client, loader, fabric) for name, client in both.items()} for _ in range(REPEATS)
        ]
        parts = {name: [min(run[name][part] for run in taken) for part in (0, 1)] for name in both}
        fedrep, gldp = (TENTHS * fit + send for fit, send in parts.values())
        fits, sends = zip(*parts.values(), strict=True)
        print(
            f"{channels} channels, processor seconds a round: FedRep {fedrep:.1f}, GLDP {gldp:.1f},"
            f" {gldp / fedrep - 1:+.1%}; training {fits[1] / fits[0] - 1:+.1%},"
            f" the pass for prototypes {sends[1] - sends[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

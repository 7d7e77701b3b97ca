"""Images a second through frozen backbones: the library's own against ResNets (128 pixels, layers 1 to 3, float32)."""

import statistics
import time
import warnings

import torch

from lit_fedad.models.backbones import OWN_NAME, FeaturePyramid, create_backbone

BATCH, BATCHES = 16, 12
NAMES = (OWN_NAME, "resnet18", "wide_resnet50_2")


def main() -> None:
    """Prints the median over batches, on all cores that torch uses."""
    images = torch.rand(BATCH, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {torch.get_num_threads()} threads")
    for name in NAMES:
        with warnings.catch_warnings(action="ignore"):
            backbone = create_backbone(name, weights="random")
        print(
            f"{name:<18} {images_a_second(backbone.to(device), images.to(device)):8.0f} images/s", flush=True
        )


def images_a_second(backbone: FeaturePyramid, images: torch.Tensor) -> float:
    """Of the median batch, the first two left out."""
    seconds = []
    for _ in range(BATCHES + 2):
        began = time.perf_counter()
        backbone(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return BATCH / statistics.median(seconds[2:])


if __name__ == "__main__":
    main()

"""Speed and memory of frozen backbones with random weights, each in a process of its own, float32."""

import multiprocessing
import resource
import statistics
import time
import warnings

import torch

from lit_fedad.models.backbones import OWN_NAME, create_backbone

BATCH, BATCHES = 4, 12
# Name, layers or blocks, pixels a side.
MODELS = (
    (OWN_NAME, (1, 2, 3), 128),
    ("resnet18", (1, 2, 3), 128),
    ("wide_resnet50_2", (1, 2, 3), 128),
    ("resnet18", (1, 2, 3), 224),
    ("wide_resnet50_2", (1, 2, 3), 224),
    ("efficientnet_b0", (1, 2, 3), 224),
    ("mobilenetv4_conv_small", (1, 2, 3), 224),
    ("convnext_tiny.dinov3_lvd1689m", (1, 2), 224),
    ("hiera_tiny_224", (1, 2), 224),
    ("vit_small_patch14_reg4_dinov2.lvd142m", (5, 8, 11), 224),
    ("vit_small_patch16_dinov3.lvd1689m", (5, 8, 11), 224),
)


def main() -> None:
    """Prints medians over batches, and the most memory that a process held."""
    heads = f"{'pixels':>6} {'images/s':>9} {'processor ms/image':>19} {'peak MB':>8} {'cached MB/image':>16}"
    print(f"{'backbone':<38} {heads}")
    for model in MODELS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            wall, processor, peak, cached = pool.apply(measure, model)
        print(
            f"{model[0]:<38} {model[2]:>6} {1 / wall:9.1f} {1000 * processor:19.0f} {peak:8.0f} {cached:16.2f}",
            flush=True,
        )


def measure(name: str, layers: tuple[int, ...], size: int) -> tuple[float, float, float, float]:
    """Measures seconds an image by clock and processor (medians), and MB of the process and of a cached image."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.rand(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings(action="ignore"):
        backbone = create_backbone(name, layers, weights="random").to(device)
    wall, processor = [], []
    for _ in range(BATCHES + 2):  # the first two are left out
        began = time.perf_counter(), time.process_time()
        maps = backbone(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        wall.append((time.perf_counter() - began[0]) / BATCH)
        processor.append((time.process_time() - began[1]) / BATCH)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    cached = sum(layer[0].numel() for layer in maps) * 2 / 1e6  # in half precision
    return statistics.median(wall[2:]), statistics.median(processor[2:]), peak, cached


if __name__ == "__main__":
    main()

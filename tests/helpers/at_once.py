"""What two processes do at once; each is forked from one that has imported everything (`forking.py`)."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import avg_pool2d

from lit_fedad.data import feature_cache
from lit_fedad.data.feature_cache import FeatureCache
from lit_fedad.data.sample import Sample
from lit_fedad.data.textures import textures
from lit_fedad.data.transform import ImageTransform


def in_group(program, folder, rank):
    """Runs a program, which knows its ``rank``, as one of two gloo processes that meet in a folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/store"
    dist.init_process_group("gloo", meeting, timedelta(seconds=120), rank=rank, world_size=2)
    exec(program, {"rank": rank, "torch": torch, "json": json})
    dist.destroy_process_group()


def draw(folder, settings):
    """Draws textures where another process does."""
    textures(folder, **settings)


def fill_and_be_killed(folder, samples):
    """Fills a feature cache, and is killed while it writes a file."""

    def killed(tensors, file, metadata):
        file.write_bytes(b"half")
        os._exit(9)

    feature_cache.save_tensors = killed
    fill(folder, samples, "one", "one")


def fill(folder, samples, name, other):
    """Fills a feature cache image by image, once the other process is there too."""

    def pooled(images):
        time.sleep(0.02)
        return [avg_pool2d(images, 2), avg_pool2d(images, 4)]

    cache = FeatureCache(Path(folder), ImageTransform(size=16), pooled, "weights")
    Path(folder, name).touch()
    late = time.monotonic() + 60
    while not Path(folder, other).exists():
        assert time.monotonic() < late
        time.sleep(0.001)
    cache.fill([Sample(Path(path), "thing", "good") for path in samples], batch_size=1)

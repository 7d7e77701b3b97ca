"""Maps of frozen features, computed once per image and kept on disk in half precision."""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.threads import file_threads
from lit_fedad.data.content import content_hashes
from lit_fedad.data.datamodule import Batch, BatchDataset, Targets
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform

HASHES = "hashes.json"
"""Name of the file of known hashes, in the folder of all caches."""

_FORMAT = 2  # raise it when the same images, transform and backbone begin to give other files
_REMEDY = "choose another folder (cache.folder=...) or compute features each time (cache.enabled=false)"

_logger = logging.getLogger(__name__)


def _read(file: Path) -> tuple[list[Tensor], int]:
    """Reads the layers of an image, float16 ``[C_l, H_l, W_l]`` each, and the checksum of what was written."""
    with safe_open(file, "pt") as tensors:
        layers = [tensors.get_tensor(name) for name in sorted(tensors.keys())]
        return layers, int(tensors.metadata()["crc"])


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors to a safetensors file.

    The library's own error tells only in its text what the disk refuses; an `OSError` is made of it.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        save_file(dict(tensors), file, metadata)
    except SafetensorError as error:
        if (number := re.search(r"(?:os error|code:) (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder of features, which is created if it is missing, against other processes; they wait.

    Raises:
        UserError: If the disk refuses something, also in the block.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=1)
        except Timeout:
            _logger.warning("waiting for another process that fills the feature cache %s", folder)
            lock.acquire()
        except NotImplementedError:
            warnings.warn(
                f"{folder}: its file system has no locks; start no second command on it", stacklevel=4
            )
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"feature cache {folder} cannot be used ({reason}): {_REMEDY}") from error


def _checksum(layers: Iterable[Tensor]) -> int:
    checksum = 0
    for layer in layers:
        checksum = zlib.crc32(layer.numpy().data, checksum)
    return checksum


class CachedFeatures(BatchDataset):
    """Feature pyramids read from the files of a cache.

    Args:
        files: The file of each sample.
        shapes: ``[C_l, H_l, W_l]`` of each layer.
        targets: Labels and masks of the samples.
    """

    def __init__(self, files: Sequence[Path], shapes: Sequence[torch.Size], targets: Targets) -> None:
        self._files, self._shapes, self._targets = files, shapes, targets
        self._sizes = [shape.numel() for shape in shapes]

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch."""
        batch = self._targets[indices]
        # A file ends with the values, in the order of layers. Parsing its header would take longer than reading them.
        total = sum(self._sizes)
        contents = [self._files[index].read_bytes() for index in batch["index"].tolist()]
        rows = torch.from_numpy(
            np.stack([np.frombuffer(content, np.float16)[-total:] for content in contents])
        )
        layers = zip(rows.split(self._sizes, dim=1), self._shapes, strict=True)
        batch["pyramid"] = tuple(layer.float().view(-1, *shape) for layer, shape in layers)
        return batch


class FeatureCache:
    """Cache of the features that a frozen extractor gives for images.

    Each image has a file, called after the hash of its bytes: copies and renamed files are computed once, and a killed
    process loses no more than what it was computing. Several processes may fill the same folder at the same time: one
    computes, the others wait and read.

    Args:
        folder: Folder of all caches; each pair of transform and extractor gets a folder of its own in it.
        transform: Transform from files to images.
        extractor: Frozen model: images ``[B, 3, S, S]`` to one tensor ``[B, C_l, H_l, W_l]`` a layer.
        fingerprint: Identifies the extractor: it changes whenever its features do.

    Attributes:
        folder: The folder of this transform and extractor.
    """

    def __init__(
        self,
        folder: Path,
        transform: ImageTransform,
        extractor: Callable[[Tensor], Sequence[Tensor]],
        fingerprint: str,
    ) -> None:
        self._transform, self._extractor = transform, extractor
        identity = {"format": _FORMAT, "transform": transform.fingerprint, "backbone": fingerprint}
        self.folder = Path(folder) / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self._hashes = Path(folder) / HASHES
        self._digests: dict[Path, bytes] = {}  # hash of each image file
        self._shapes: dict[bytes, list[torch.Size]] = {}  # by hash, of images whose features are known whole

    def fill(
        self,
        samples: Sequence[Sample],
        batch_size: int = 16,
        progress: Callable[[int, int], None] = lambda done, total: None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Computes the features that are missing or damaged.

        Args:
            samples: The samples whose features will be read.
            batch_size: Images a call of the extractor.
            progress: Called after each batch with the number of images done and of images to do.
            device: Device of the extractor.

        Raises:
            UserError: If an image cannot be read, its features do not fit half precision, or the folder
                cannot be written or has too little room.
        """
        paths = dict.fromkeys(sample.path for sample in samples)
        with locked(self.folder):
            self._digests |= content_hashes(paths, self._hashes)
            path_of = {self._digests[path]: path for path in paths}
            self._check(path_of)
            missing = [digest for digest in path_of if digest not in self._shapes]
            if not missing:
                return
            first = self._transform.image(path_of[missing[0]])[None].to(device)
            first_layers = [layer[0] for layer in self._extract(first, 1)]
            shapes = [layer.shape for layer in first_layers]
            if any(self._shapes.get(digest, shapes) != shapes for digest in path_of):
                self._warn(self.folder, f"holds other shapes than {shapes}, which the backbone gives")
                missing = list(path_of)
            self._check_room(len(missing) * sum(layer.nbytes for layer in first_layers))
            batches = [missing[start : start + batch_size] for start in range(0, len(missing), batch_size)]
            done = 0
            for batch, images in zip(batches, self._decode(batches, path_of), strict=True):
                layers = self._extract(images.to(device), batch_size)
                for position, digest in enumerate(batch):
                    features = [layer[position].contiguous() for layer in layers]
                    if not all(layer.isfinite().all() for layer in features):
                        raise UserError(
                            f"features of {path_of[digest]} do not fit half precision: set cache.enabled=false"
                        )
                    with atomic(self._file(digest), alone=True) as partial:
                        tensors = {f"{number:02}": layer for number, layer in enumerate(features)}
                        save_tensors(tensors, partial, {"crc": str(_checksum(features))})
                    self._shapes[digest] = shapes
                done += len(batch)
                progress(done, len(missing))

    def dataset(self, samples: Sequence[Sample], targets: Targets | None = None) -> CachedFeatures:
        """Returns the features of samples that `fill` has seen.

        Args:
            samples: The samples.
            targets: Their labels and masks; None for labels alone.
        """
        targets = targets or Targets(samples, self._transform, with_masks=False)
        digests = [self._digests[sample.path] for sample in samples]
        shapes = self._shapes[digests[0]] if digests else []
        return CachedFeatures([self._file(digest) for digest in digests], shapes, targets)

    def _file(self, digest: bytes) -> Path:
        return self.folder / digest.hex()[:2] / f"{digest.hex()}.safetensors"

    def _check(self, digests: Iterable[bytes]) -> None:
        """Reads the existing files of features, each once in a process, and warns of damaged ones."""
        damaged = []
        for digest in digests:
            if digest in self._shapes or not self._file(digest).exists():
                continue
            try:
                layers, checksum = _read(self._file(digest))
                if _checksum(layers) != checksum:
                    raise ValueError("another checksum")
                self._shapes[digest] = [layer.shape for layer in layers]
            except (SafetensorError, ValueError, KeyError, TypeError):
                damaged.append(self._file(digest))
        if damaged:
            self._warn(damaged[0], f"is damaged, {len(damaged)} in all")

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            sizes = f"{needed / 1e9:.3g} GB, the disk has {free / 1e9:.3g} GB left"
            raise UserError(f"feature cache {self.folder} needs {sizes}: {_REMEDY}")

    def _warn(self, file: Path, problem: str) -> None:
        warnings.warn(f"feature cache {file} {problem}: it is made again", stacklevel=4)

    @torch.inference_mode()
    def _extract(self, images: Tensor, batch_size: int) -> list[Tensor]:
        """Computes the layers of a batch of images, float16 ``[B, C_l, H_l, W_l]`` each, on the CPU."""
        # The last bits of a convolution can depend on the size of the batch. With full batches only, features
        # do not depend on how many others are missing, and those made again are the same bit for bit.
        filling = images[-1:].expand(batch_size - len(images), -1, -1, -1)
        pyramid = self._extractor(torch.cat([images, filling]))
        return [layer[: len(images)].half().cpu() for layer in pyramid]

    def _decode(self, batches: list[list[bytes]], path_of: dict[bytes, Path]) -> Iterator[Tensor]:
        """Reads images in threads, one batch ahead of the extractor."""
        with file_threads() as pool:

            def submit(batch: list[bytes]) -> list[Future[Tensor]]:
                return [pool.submit(self._transform.image, path_of[digest]) for digest in batch]

            ahead = submit(batches[0])
            for following in [*batches[1:], []]:
                current, ahead = ahead, submit(following)
                yield torch.stack([future.result() for future in current])

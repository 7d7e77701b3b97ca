"""Images annotated in COCO files: those without annotations are normal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.input_files import read_json
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import split_normals
from lit_fedad.data.vision import AnnotatedImage, annotations_key, mask_cache, read_coco, write_masks


def coco(
    root: str | Path,
    annotations: str | Sequence[str],
    images: str | None = None,
    train_share: float = 0.8,
    mask_folder: str | Path | None = None,
    seed: int = 0,
    name: str | None = None,
) -> ImageSet:
    """Reads COCO annotation files for anomaly detection.

    Images without annotations are normal; a random share of them is for training. The others are anomalous, called
    after their most frequent category, with a mask of all their annotations (`AnnotatedImage.mask`).

    Args:
        root: The folder that the others are relative to.
        annotations: The JSON file, or several.
        images: Folder of the images; None to look beside the file, and in folders ``images`` near it.
        train_share: Share of the normal images that is for training, between 0 and 1.
        mask_folder: As for `vision`.
        seed: Seed of the split.
        name: Name of the set and of its one product; by default the name of ``root``.

    Raises:
        UserError: The file is missing or of another form, names a missing image, or has no normal image.
    """
    root = Path(root).expanduser()
    product = name or root.absolute().name
    cache = Path(mask_folder).expanduser() if mask_folder else mask_cache()
    normal: dict[Path, Sample] = {}
    anomalous: dict[Path, Sample] = {}
    drawings: dict[Path, AnnotatedImage] = {}
    for file in [root / one for one in ([annotations] if isinstance(annotations, str) else annotations)]:
        listed = read_coco(file, root / images if images is not None else image_folder(file, root))
        masks = cache / f"{product}-{annotations_key(file)}"
        for number, one in enumerate(listed):
            if one.path in normal or one.path in anomalous:
                raise UserError(f"{file}: lists {one.path} again; remove one of its entries")
            if one.annotations:
                mask = masks / f"{number}-{one.path.name}.png"
                drawings[mask] = one
                anomalous[one.path] = Sample(one.path, product, one.defect, mask)
            else:
                normal[one.path] = Sample(one.path, product)
    if not normal:
        raise UserError(
            f"{root}: each of {len(anomalous)} images is annotated, and none is normal; add normal images"
        )
    write_masks(drawings)
    whole = ImageSet(product, tuple(normal.values()), tuple(anomalous.values()))
    return split_normals(whole, train_share, seed)


def image_folder(file: Path, root: Path) -> Path:
    """Finds the folder of the images that an annotation file names, by the first; its own where there is none."""
    try:
        first = str(read_json(file)["images"][0]["file_name"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return file.parent
    part = file.stem.removeprefix("instances_")
    places = [file.parent, file.parent / "images", root / "images", root, file.parent.parent, root / part]
    return next((place for place in places if (place / first).is_file()), file.parent)

"""Image sets as the benchmark MedIAnomaly packs them: RSNA, VinCXR, BrainTumor, LAG.

A set is a folder with ``images`` and ``data.json``, which lists file names under ``train.0`` (normal), ``test.0``
(normal) and ``test.1`` (anomalous). Its other sets, BraTS2021 among them, are plain `folders`.

Source: Cai et al., MedIAnomaly: A comparative study of anomaly detection in medical images, arXiv 2404.04518.
"""

from pathlib import Path

from lit_fedad.data.input_files import read_json
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.errors import UserError


def medianomaly(root: str | Path, name: str | None = None) -> ImageSet:
    """Reads one set of MedIAnomaly with its own split.

    Args:
        root: The folder of the set.
        name: Name of the set and of its one product; by default the name of ``root``.

    Returns:
        The image set, in the order of ``data.json``. It has no masks.

    Raises:
        UserError: ``data.json`` or an image is missing, or an image is listed for training and for testing.
    """
    root = Path(root).expanduser()
    index = root / "data.json"
    if not index.is_file():
        raise UserError(
            f"{index}: no such file; give the folder of one set, with data.json and images inside"
        )
    try:
        split = read_json(index)
        train, normal, anomalous = split["train"]["0"], split["test"]["0"], split["test"]["1"]
    except ValueError as error:
        raise UserError(f"{index}: is not valid JSON: {error}; unpack the set again") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{index}: needs lists of file names under train.0, test.0 and test.1") from error

    files = [*train, *normal, *anomalous]
    missing = [file for file in files if not (root / "images" / file).is_file()]
    if missing:
        raise UserError(
            f"{index}: no image {root / 'images' / missing[0]}"
            f" ({len(missing)} of {len(files)} missing); unpack the set again"
        )
    leaked = set(train) & {*normal, *anomalous}
    if leaked:
        raise UserError(f"{index}: lists {min(leaked)} for training and for testing; remove it from one")

    product = name or root.absolute().name

    def samples(names: list[str], defect: str) -> tuple[Sample, ...]:
        return tuple(Sample(root / "images" / file, product, defect) for file in names)

    return ImageSet(
        product, samples(train, "good"), samples(normal, "good") + samples(anomalous, "anomalous")
    )

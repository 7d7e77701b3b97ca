"""Samples and image sets: what the readers of data sets return."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

DICOM_SUFFIXES = (".dcm", ".dicom")
"""Suffixes of DICOM files, which the extra ``dicom`` reads."""


def defect_name(word: str) -> str:
    """Names a defect after a folder or label; ``good`` is what images without one are called.

    Example:
        >>> defect_name("scratch"), defect_name("good")
        ('scratch', 'called good')
    """
    return "called good" if word == "good" else word


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Lists values by their keys, keys in order of first appearance.

    Example:
        >>> grouped([("screw", 0), ("nut", 1), ("screw", 2)])
        {'screw': [0, 2], 'nut': [1]}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


@dataclass(frozen=True, slots=True)
class Sample:
    """One image on disk.

    Attributes:
        path: The image file.
        category: Product type, body part or scanner: what partitions and mixtures distinguish.
        defect: ``"good"``, or the name of the defect.
        mask: The file that marks the anomalous pixels, or the folder of one file a region (MVTec LOCO); None for good
            images and for sets without masks.
        saturation: The file that says, of masks by region, from which area on a region counts as found; else None.
    """

    path: Path
    category: str
    defect: str = "good"
    mask: Path | None = None
    saturation: Path | None = None

    def __post_init__(self) -> None:
        """Refuses paths that are texts: what reads the files needs more than their names."""
        if not isinstance(self.path, Path) or not isinstance(self.mask, Path | None):
            raise TypeError(f"Sample({self.path!r}, mask={self.mask!r}): give each as a pathlib.Path")

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def files(self) -> tuple[Path, ...]:
        """The image, and its mask where it has one."""
        return (self.path,) if self.mask is None else (self.path, self.mask)

    @property
    def label(self) -> int:
        """0 for a normal image, 1 for an anomalous one."""
        return int(self.defect != "good")


@dataclass(frozen=True)
class ImageSet:
    """Normal training images and labelled test images of one or several categories.

    Attributes:
        name: Short name, used in run names and tables.
        train: Normal images only.
        test: Normal and anomalous images.
    """

    kind: ClassVar[Literal["anomaly"]] = "anomaly"

    name: str
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]

    def renamed(self, name: Callable[[str], str]) -> "ImageSet":
        """Returns the set with new names of its categories, by their old ones."""
        train, test = (
            tuple(replace(sample, category=name(sample.category)) for sample in part)
            for part in (self.train, self.test)
        )
        return replace(self, train=train, test=test)

    @property
    def categories(self) -> list[str]:
        """Categories in order of first appearance."""
        return list(dict.fromkeys(sample.category for sample in (*self.train, *self.test)))

    @property
    def normal_categories(self) -> list[str]:
        """Categories with normal images: all of them."""
        return self.categories

    @property
    def has_masks(self) -> bool:
        """Whether every anomalous test image has a mask, so that pixel metrics are defined."""
        anomalous = [sample for sample in self.test if sample.label]
        return bool(anomalous) and all(sample.mask is not None for sample in anomalous)

    @property
    def has_saturation(self) -> bool:
        """Whether every anomalous test image has masks by region and areas of saturation, so that sPRO is defined."""
        return self.has_masks and all(sample.saturation is not None for sample in self.test if sample.label)

"""Describes how the images of a folder are laid out: reads them, and says which command stands for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_fedad.core.building import build
from lit_fedad.core.text import shell_word
from lit_fedad.core.typed_words import as_list, as_text, as_typed
from lit_fedad.data.image_files import folder_name
from lit_fedad.data.mixture import mixture
from lit_fedad.data.sample import ImageSet

_READERS = {
    "mvtec_mixture": "lit_fedad.data.mvtec.mvtec_mixture",
    "folders": "lit_fedad.data.folders.folders",
    "labelled_csv": "lit_fedad.data.labelled_csv.labelled_csv",
    "coco": "lit_fedad.data.vision.coco",
    "vision": "lit_fedad.data.vision.vision",
    **{
        name: f"lit_fedad.data.anomaly_sets.{name}"
        for name in ("visa", "kolektor_sdd2", "real_iad", "medianomaly")
    },
}


@dataclass(frozen=True)
class Layout:
    """How the images of a folder are laid out.

    Attributes:
        seen: What was seen, in one line.
        data: The data configuration that reads it; ``auto`` for several products, each of a layout of its own.
        root: The folder.
        settings: Other keys of this data configuration.
        parts: Layout of each product by the name of its folder; empty unless ``data`` is ``auto``.
    """

    seen: str
    data: str
    root: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The words of a command line that read the folder in the same way, such as ``data=folders data.root=...``."""
        words = [f"data={self.data}"]
        for key, value in {"root": self.root, **self.settings}.items():
            text = as_list(value) if isinstance(value, list) else as_text(str(value))
            words.append(f"data.{key}={text}")
        return " ".join(shell_word(as_typed(word)) for word in words)

    def read(self, name: str | None = None) -> ImageSet:
        """Reads the images."""
        named = {} if name is None else {"name": name}
        if self.parts:
            readers = {product: _product_reader(part) for product, part in self.parts.items()}
            return mixture(self.root, readers, name or folder_name(self.root))
        images: ImageSet = build(
            {"_target_": _READERS[self.data], "root": str(self.root), **self.settings, **named}
        )
        return images


def _product_reader(layout: Layout) -> Any:
    def read(folder: Path) -> ImageSet:
        images = layout.read()
        single = len(images.categories) == 1
        return replace(images.renamed(lambda _: folder.name), name=folder.name) if single else images

    return read

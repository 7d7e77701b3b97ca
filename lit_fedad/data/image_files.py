"""Search for images in folders: which files are images, and which are left out, and why."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import require
from lit_fedad.data.layout_names import MASKS, bare, masked_name
from lit_fedad.data.pictures import decoders, sniff, warn_once
from lit_fedad.data.sample import DICOM_SUFFIXES, grouped

_SYSTEM = frozenset(
    {
        "thumbs.db",
        "desktop.ini",
        "dicomdir",
        "__macosx",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "@eadir",
        "#recycle",
    }
)
_HEIC = (".heic", ".heif")
_UNFINISHED = (".bak", ".crdownload", ".orig", ".part", ".partial", ".tmp", "~")

HEATMAPS, SCORES = "heatmaps", "scores.csv"
"""What `predict` writes: a folder of images, and the table beside it."""

NO_IMAGE = "files that are no image"
"""Reason why files are left out."""

SOME = ".bmp, .gif, .jpg, .png, .tif, .webp and others, DICOM too"
"""Suffixes of images, for messages."""


@cache
def image_suffixes() -> tuple[str, ...]:
    """Lists the suffixes, in lower case, of the formats that the installed decoders know; DICOM is not among them."""
    formats = decoders()  # makes Pillow load its formats
    return tuple(
        sorted(
            suffix for suffix, format_name in Image.registered_extensions().items() if format_name in formats
        )
    )


@dataclass
class LeftOut:
    """Files and folders that were left out, by the reason."""

    by_reason: dict[str, list[Path]] = field(default_factory=dict)

    def add(self, reason: str, paths: Iterable[Path]) -> None:
        """Adds files or folders."""
        self.by_reason.setdefault(reason, []).extend(paths)

    def line(self, root: Path) -> str | None:
        """Returns one line that counts and names them; None where there are none.

        Args:
            root: The folder that was searched.
        """
        reasons = self.by_reason.items()
        phrases = [f"{reason} ({len(paths)}, first {paths[0]})" for reason, paths in reasons if paths]
        return f"{root}: skipped {'; '.join(phrases)}" if phrases else None

    def warn(self, root: Path) -> None:
        """Warns of them in one line, where there are some."""
        if line := self.line(root):
            warnings.warn(line, stacklevel=3)


def require_folder(root: Path, wanted: str) -> None:
    """Checks that a folder exists.

    Args:
        root: The folder.
        wanted: What to give instead, in the words of a message.

    Raises:
        UserError: There is none, or it is a file; its whole path is named, as it depends on where a command is started.
    """
    if not root.is_dir():
        raise UserError(
            f"{root.absolute()}: {'is a file' if root.is_file() else 'no such folder'}; give {wanted}"
        )


def folder_name(root: Path) -> str:
    """Returns the name of a folder as it was given: a link in the place of a moved folder has the folder's name.

    Args:
        root: The folder; ``.`` and ``..`` have the names of those that they lead to.
    """
    return Path(os.path.abspath(root)).name  # noqa: PTH100, for it removes `..` and keeps links


def find_images(folder: Path, left_out: LeftOut, masks: bool = False) -> list[Path]:
    """Lists the images in a folder and in all folders within it, of which there may be none.

    A file is an image by its suffix, or where that is unknown by its content. Hidden files and folders, those of
    operating systems and heatmaps of predictions are passed over. Links are followed, each file and folder is taken
    once. Beside an image of the same name a DICOM file is its original, and left out.

    Args:
        folder: The folder; or one file, which is taken whatever it is.
        left_out: Collects what is left out.
        masks: Whether masks are taken too. Otherwise a file ``<image>_mask``, ``_gt``, ``_seg`` or alike beside its
            image is left out, and a file in a folder of masks that has the name of an image.

    Returns:
        Their paths, in alphabetical order.

    Raises:
        UserError: There is no such folder or file.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; correct its name, or make a link of that name")
    images, dicom = [], []
    suffixes = frozenset(image_suffixes())
    for path in sorted(_files(folder, left_out), key=lambda path: path.parts):
        if (suffix := path.suffix.lower()) in suffixes:
            images.append(path)
        elif suffix in DICOM_SUFFIXES:
            dicom.append(path)
        else:
            form = None if path.name.lower().endswith(_UNFINISHED) else _sniffed(path)
            if form is None and suffix in _HEIC:
                left_out.add("HEIC photographs, to be saved as JPEG or PNG", [path])
            elif form is None:
                left_out.add(NO_IMAGE, [path])
            else:
                (dicom if form == "DICOM" else images).append(path)
    if not masks:
        mask_files = _masks_beside(images, folder)
        left_out.add("masks beside images, which need a folder of their own to be used", sorted(mask_files))
        if mask_files:
            images = [path for path in images if path not in mask_files]
        _tell_namesakes(images)
    if not dicom:
        return images
    names = {_without_suffix(path) for path in images}
    left_out.add(
        "originals in DICOM of other images", [path for path in dicom if _without_suffix(path) in names]
    )
    if originals := [path for path in dicom if _without_suffix(path) not in names]:
        require("dicom", f"{folder}: DICOM")
    return sorted([*images, *originals], key=lambda path: path.parts)


def _without_suffix(path: Path) -> str:
    """Returns a path up to its suffix; texts are compared in a fraction of the time of paths."""
    return str(path).removesuffix(path.suffix)


def _tell_namesakes(images: Sequence[Path]) -> None:
    """Warns of images in one folder that only their suffix tells apart: one may be the mask of the other."""
    named = grouped((_without_suffix(path), path) for path in images)
    if pairs := [paths for paths in named.values() if len(paths) > 1]:
        first, second, *_ = pairs[0]
        warn_once(
            f"{first.parent}: {first.name} and {second.name} count as two images ({len(pairs)} such names); keep masks"
            " and copies in other folders"
        )


def _masks_beside(images: Sequence[Path], folder: Path) -> set[Path]:
    """Returns those images in a folder that are masks of others."""
    by_folder = grouped((path.parts[len(folder.parts) : -1], path) for path in images)
    in_mask_folder = {
        path
        for parts, paths in by_folder.items()
        if any(bare(part) in (*MASKS, "label") for part in parts)
        for path in paths
    }
    without_suffix = {_without_suffix(path) for path in images}
    names = {path.stem for path in images if path not in in_mask_folder}
    masks = set()
    for path in images:
        name = masked_name(path.stem)
        if (name and str(path.parent / name) in without_suffix) or (
            path in in_mask_folder and (name or path.stem) in names
        ):
            masks.add(path)
    return masks


def images_in(folder: Path, left_out: LeftOut | None = None, masks: bool = False) -> list[Path]:
    """Lists the images in a folder, as `find_images`; there is at least one.

    Args:
        folder: The folder.
        left_out: Collects what is left out; None to warn of it here.
        masks: As for `find_images`.

    Raises:
        UserError: There is no such folder, or no image in it, or pydicom is missing for DICOM files.
    """
    skipped = LeftOut() if left_out is None else left_out
    images = find_images(folder, skipped, masks)
    if not images:
        left_out_line = skipped.line(folder)
        raise UserError(
            f"{folder}: holds no image ({SOME})" + (left_out_line or "").replace(f"{folder}:", ";", 1)
        )
    if left_out is None:
        skipped.warn(folder)
    return images


def snapshot(folder: Path) -> set[tuple[str, int, int]] | None:
    """Lists all that lies in a folder, without what is hidden: where it stays, `find_images` finds nothing new.

    Args:
        folder: The folder.

    Returns:
        Path, size in bytes and time of the last change in nanoseconds of files and folders within; None where these do
        not tell: it is no folder, there is a link, which may lead elsewhere, or something cannot be read.
    """
    found: set[tuple[str, int, int]] = set()
    waiting = [str(folder)]
    try:
        while waiting:
            for entry in os.scandir(waiting.pop()):
                if _hidden(entry.name):
                    continue
                if entry.is_symlink():
                    return None
                if entry.is_dir():
                    waiting.append(entry.path)
                state = entry.stat()
                found.add((entry.path, state.st_size, state.st_mtime_ns))
    except OSError:
        return None
    return found


def entries(folder: Path) -> list[Path]:
    """Lists what lies in a folder, by name, without what is hidden; nothing where there is no such folder."""
    return sorted(path for path in folder.iterdir() if not _hidden(path.name)) if folder.is_dir() else []


def _hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM


def _files(folder: Path, left_out: LeftOut) -> Iterator[Path]:
    """Yields all files, links last: of a file and a link to it, the link is left out."""
    root = os.path.realpath(folder)
    taken: set[str] = set()
    folders, linked_folders, links = [folder], list[Path](), list[Path]()
    while waiting := folders or linked_folders or links:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in taken or (taken and f"{root}{os.sep}".startswith(f"{real}{os.sep}")):
            left_out.add("links to what is taken already, or that lead back", [current])
        elif Path(real).is_file():
            taken.add(real)
            yield current
        elif not Path(real).is_dir():
            left_out.add("links to nothing, to a pipe or in a circle", [current])
        else:
            taken.add(real)
            for entry in _entries_of(current, left_out):
                path = current / entry.name
                if entry.is_symlink():
                    (linked_folders if path.is_dir() else links).append(path)
                elif entry.is_dir():
                    if entry.name == HEATMAPS and (current / SCORES).is_file():
                        left_out.add("heatmaps of predictions", [path])
                    else:
                        folders.append(path)
                elif entry.is_file():
                    taken.add(f"{real}{os.sep}{entry.name}")
                    yield path
                else:
                    left_out.add("pipes or devices", [path])


def _entries_of(folder: Path, left_out: LeftOut) -> list[os.DirEntry[str]]:
    """Lists what lies in a folder, without hidden entries."""
    try:
        return [entry for entry in os.scandir(folder) if not _hidden(entry.name)]
    except OSError:
        left_out.add("folders that cannot be opened", [folder])
        return []


def _sniffed(path: Path) -> str | None:
    """Returns the format of a file with an unknown suffix; None if it is no image."""
    try:
        form = sniff(path)
        if form is not None and form != "DICOM":
            with Image.open(path, formats=decoders()):  # the two letters of some formats prove little
                pass
    except Exception:  # Pillow raises many kinds: what cannot be opened is no image
        return None
    return form

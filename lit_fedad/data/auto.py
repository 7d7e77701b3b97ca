"""Recognises how the images of a folder are laid out, for ``data=auto``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.core.typed_words import as_list
from lit_fedad.data.image_files import (
    LeftOut,
    entries,
    find_images,
    image_suffixes,
    images_in,
    require_folder,
)
from lit_fedad.data.input_files import read_json, read_table
from lit_fedad.data.labelled_csv import file_names, label_column, matches
from lit_fedad.data.layout import Layout
from lit_fedad.data.layout_names import MASKS, NORMAL, TEST, TRAIN, bare, masked_name
from lit_fedad.data.marker_files import TABLES, published_set, refuse_foreign, refuse_tables, refuse_texts
from lit_fedad.data.mvtec import products_below
from lit_fedad.data.sample import ImageSet

_Rows = list[dict[str, str]]
_NEGATIONS = frozenset({"no", "not", "non"})
_NO_NORMAL_TEST = "no normal test images, so a share is kept"


def auto(root: str | Path, name: str | None = None, train_share: float = 0.8, seed: int = 0) -> ImageSet:
    """Reads a folder of images whose layout it recognises; a warning says which layout it saw.

    Args:
        root: The folder.
        name: Name of the set; by default that of its reader.
        train_share: Share of the normal images that is for training where there are no normal test images.
        seed: Seed of that split.

    Raises:
        UserError: No layout is recognised, or its reader refuses the files.
    """
    layout = recognise(expand_home(root), train_share, seed)
    warnings.warn(f"data=auto saw {layout.seen}; the same as {layout.command}", stacklevel=2)
    return layout.read(name)


def recognise(root: Path, train_share: float = 0.8, seed: int = 0) -> Layout:
    """Recognises how the images of a folder are laid out.

    Args:
        root: The folder.
        train_share: As for `auto`.
        seed: As for `auto`.

    Raises:
        UserError: No layout is recognised; the line says what was seen, and what to give.
    """
    require_folder(root, "the folder of your images")
    split = {"train_share": train_share, "seed": seed}
    refuse_foreign(root)
    for recogniser in (_published, _annotated, _table, _mvtec, _divided, _classes, _flat):
        if layout := recogniser(root, split):
            return layout
    reserved = {*MASKS, *TRAIN, *TEST} if len(_folders(root)) > 1 else MASKS
    folders = [path for path in _folders(root) if _has_image(path)]
    if odd := [path for path in folders if bare(path.name) in reserved]:
        raise UserError(
            f"{root}: holds {_joined(odd, root)}, and no folder there says which images are normal; call it train/good"
        )
    if len(folders) == 1:
        refuse_tables(root)
        layout = recognise(folders[0], train_share, seed)
        if layout.settings.get("test_anomalous") == []:
            refuse_texts(root)
        return layout
    try:
        images_in(root, LeftOut())
    except UserError as error:  # it names what lies there instead
        advice = "check data.root"
        if arrays := sorted(path.name for path in root.glob("*.npz")):
            advice = f"arrays of images and labels are read by data=packed data.train={arrays[0]}"
        raise UserError(f"{error}; {advice}") from error
    if layout := _products(root, folders, split):
        return layout
    raise UserError(
        f"{root}: has folders of images ({_joined(folders[:5], root)}), and none is called as normal images are (good,"
        " normal, ok); rename the normal one, or give it: data=folders"
        f" data.train_normal={as_list([folders[0].name])}, if it is that"
    )


def _published(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises a public set as downloaded."""
    seen_and_data = published_set(root)
    return Layout(*seen_and_data, root) if seen_and_data else None


def _annotated(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises COCO annotation files."""
    parts = [path for path in _folders(root) if path.name.lower() in (*TRAIN, *TEST)]
    folders = (root, root / "annotations", *parts)
    files = [
        file for folder in dict.fromkeys(folders) for file in sorted(folder.glob("*.json")) if _is_coco(file)
    ]
    if not files:
        return None
    names = _relative(files, root)
    seen = f"COCO annotations in {', '.join(names)}; images without are normal, and a share of them is kept for tests"
    return Layout(seen, "coco", root, {"annotations": names, **split})


def _is_coco(file: Path) -> bool:
    content = read_json(file)
    return isinstance(content, dict) and {"images", "annotations", "categories"} <= content.keys()


def _table(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises one table that names images and labels them."""
    files = [path for path in entries(root) if path.suffix.lower() in TABLES]
    layouts = [layout for file in files if (layout := _table_layout(root, file, split))]
    if len(layouts) > 1:
        raise UserError(
            f"{root}: has {len(layouts)} tables of labels, {files[0].name} and more; move all but one away"
        )
    return layouts[0] if layouts else None


def _table_layout(root: Path, file: Path, split: Mapping[str, Any]) -> Layout | None:
    columns, rows = read_table(file)
    columns = [column for column in columns if column and rows]
    image_folder = next((name for name in ("images", "image", "imgs", "img") if (root / name).is_dir()), ".")
    name_column = _image_column(root, image_folder, file, columns, rows)
    if name_column is None:
        warnings.warn(f"{file}: is not read: no column names images (nine of ten rows must)", stacklevel=2)
        return None
    label, normal = label_column(file, [column for column in columns if column != name_column], rows)
    settings = {"labels": file.name, "images": image_folder, "id_column": name_column, "label_column": label}
    seen = (
        f"labels in {file.name}: column {name_column} names images, {label}={' or '.join(normal)} is normal"
    )
    values = {column: {row[column].strip().lower() for row in rows} for column in columns}
    if split_columns := [column for column in columns if values[column] <= {*TRAIN, *TEST}]:
        seen += f", and column {split_columns[0]} is not read: images are split anew"
    return Layout(seen, "labelled_csv", root, {**settings, "normal": normal, **split})


def _image_column(root: Path, image_folder: str, file: Path, columns: list[str], rows: _Rows) -> str | None:
    """Finds the column that names images; None where no column does."""
    images = find_images(root / image_folder, LeftOut())
    names = file_names(images, root, root / image_folder)
    words = {column: [str(row[column]).strip() for row in rows[:50]] for column in columns}
    fewest = min(len(rows), len(images)) / 2  # a column of class numbers may name files too, but only a few
    ids = [
        column
        for column in columns
        if len({row[column] for row in rows}) >= fewest and matches(words[column], names, root)
    ]
    # Row numbers may name files too: the column of the longest names wins.
    total_length = {column: sum(map(len, words[column])) for column in ids}
    image = max(total_length, key=total_length.__getitem__, default=None)
    if image is not None and matches([image], names, root):
        raise UserError(f"{file}: its first line names an image; put a line of column names above it")
    return image


def _mvtec(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises the layout of MVTec AD: one product, several, or several in folders of collections."""

    def is_product(product: Path) -> bool:
        return (product / "train" / "good").is_dir() and _has_image(product / "test" / "good")

    if is_product(root):
        seen = "one product in the layout of MVTec AD"
        return None if _has_misnamed_folder(root) else Layout(seen, "mvtec_mixture", root)
    products = [path for path in products_below(root) if "/." not in f"/{path.relative_to(root).as_posix()}"]
    if not products or not all(is_product(path) and not _has_misnamed_folder(path) for path in products):
        return None
    others = [path for path in _folders(root) if not any(one.is_relative_to(path) for one in products)]
    if any(_has_image(path) for path in others):
        return None
    seen = f"{'one product' if len(products) == 1 else f'{len(products)} products'} in the layout of MVTec AD"
    if all(path.parent == root for path in products):
        return Layout(seen, "mvtec_mixture", root)
    return Layout(seen, "mvtec_mixture", root, {"products": _relative(products, root)})


def _has_misnamed_folder(product: Path) -> bool:
    names = NORMAL | MASKS
    return any(path.name != "good" and bare(path.name) in names for path in entries(product / "test"))


def _divided(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises folders for training and testing, where normal images have folders of their own or are alone."""
    train = _folder_called(root, TRAIN)
    if train is None:
        return None
    normal = [path for path in _folders(train) if bare(path.name) in NORMAL]
    others = [path for path in _folders(train) if path not in normal and _has_image(path)]
    if not normal and others:
        return None
    test = _folder_called(root, TEST)
    test_folders = [path for path in _folders(test) if _has_image(path)] if test else []
    if not normal and not test_folders:
        refuse_tables(root)
        refuse_texts(root)
    good = [path for path in test_folders if bare(path.name) in NORMAL]
    bad = [path for path in test_folders if path not in good and bare(path.name) not in MASKS]
    masks = _mask_folder(root, bad) or (_mask_folder(test, bad) if test else None)
    phrases = [f"training images in {_joined(normal or [train], root)}"]
    phrases += [f"normal test images in {_joined(good, root)}"] if good else [_NO_NORMAL_TEST]
    phrases += [f"anomalous ones in {_joined(bad, root)}"] if bad else ["no anomalous ones"]
    if others:
        phrases.append(f"and leaves out {_joined(others, root)}, for it trains on normal images alone")
    if test and not test_folders and _has_image(test):
        phrases.append(f"and leaves out {test.name}, whose images have no labels")
    ignored = [path for path in _folders(root) if path not in (train, test) and bare(path.name) not in MASKS]
    if ignored := [path for path in ignored if _has_image(path)]:
        phrases.append(f"and leaves out {_joined(ignored, root)}, for it is called neither train nor test")
    return _folder_layout(", ".join(phrases), root, (normal or [train], good, bad), masks, split)


def _classes(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises a folder for each class, of which some are called as normal images are."""
    base = _folder_called(root, ("images", "image", "imgs", "data")) or root
    folders = _folders(base)
    normal = [path for path in folders if bare(path.name) in NORMAL and _has_image(path)]
    if not normal:
        return None
    rest = [
        path for path in folders if path not in normal and bare(path.name) not in MASKS and _has_image(path)
    ]
    good = [path for path in rest if bare(path.name).removesuffix("test").removeprefix("test") in NORMAL]
    bad = [path for path in rest if path not in good]
    masks = _mask_folder(root, bad) or _mask_folder(base, bad)
    seen = f"normal images in {_joined(normal, root)}, anomalous ones in {_joined(bad, root) or 'no folder'}"
    if good:
        seen += f", normal test images in {_joined(good, root)}"
    return _folder_layout(seen, root, (normal, good, bad), masks, split)


def _flat(root: Path, split: Mapping[str, Any]) -> Layout | None:
    """Recognises images without folders: they all count as normal."""
    if not (direct := [path for path in find_images(root, LeftOut()) if path.parent == root]):
        return None
    refuse_tables(root)
    refuse_texts(root)
    if subfolders := [path for path in _folders(root) if _has_image(path)]:
        raise UserError(
            f"{root}: has images beside folders of images ({_joined(subfolders, root)}); which are normal? Give"
            " data=folders data.train_normal=[...] data.test_anomalous=[...]"
        )
    words = {path: set(re.split("[^a-z]+", path.stem.lower())) for path in direct}
    called = [path for path in direct if words[path] & NORMAL and not words[path] & _NEGATIONS]
    if 0 < len(called) < len(direct):
        other = next(path for path in direct if path not in called)
        raise UserError(
            f"{root}: {called[0].name} is called as normal images are, and {other.name} is not; sort them into folders"
            " good and bad, or give data=folders data.train_normal=[.], if all are normal"
        )
    seen = f"{len(direct)} images in one folder, all normal: scores of anomalous images cannot be judged"
    return _folder_layout(seen, root, ([root], [], []), None, split)


def _folder_layout(
    seen: str,
    root: Path,
    folders: tuple[list[Path], list[Path], list[Path]],
    masks: Path | None,
    split: Mapping[str, Any],
) -> Layout:
    if odd := [
        path
        for path in folders[2]
        if (masked_folder := masked_name(path.name)) and (path.parent / masked_folder).is_dir()
    ]:
        raise UserError(
            f"{odd[0]}: is called as masks of {masked_name(odd[0].name)} are; move it to {root / 'ground_truth'}, as"
            f" {masked_name(odd[0].name)}, or rename it"
        )
    train, good, bad = (_relative(group, root) for group in folders)
    settings: dict[str, Any] = {"train_normal": train, "test_normal": good, "test_anomalous": bad}
    if masks is not None:
        settings["masks"] = masks.relative_to(root).as_posix()
        seen += f", masks in {settings['masks']}"
    if not good:
        settings |= {"train_share": split["train_share"], "split_seed": split["seed"]}
    return Layout(seen, "folders", root, settings)


def _products(root: Path, folders: Sequence[Path], split: Mapping[str, Any]) -> Layout | None:
    """Recognises folders of products, each of a layout of its own."""
    recognisable = (
        _folders(path) or any(path.glob("*.[ct]sv")) or any(path.glob("*.json")) for path in folders
    )
    if not all(recognisable):
        return None
    parts = {path.name: recognise(path, split["train_share"], split["seed"]) for path in folders}
    if all(part.settings.get("train_normal") == ["."] for part in parts.values()):
        return None  # only folders of images, and none of them is called as normal images are
    seen = "; ".join(f"{product} has {part.seen}" for product, part in parts.items())
    return Layout(f"{len(parts)} products: {seen}", "auto", root, parts=parts)


def _mask_folder(parent: Path, defects: Sequence[Path]) -> Path | None:
    """Finds the folder of masks in a folder, which has a folder for each defect or holds all masks."""
    folder = next((path for path in _folders(parent) if bare(path.name) in MASKS and _has_image(path)), None)
    return folder if defects else None


def _folder_called(root: Path, names: Sequence[str]) -> Path | None:
    by_name = {path.name.lower(): path for path in _folders(root)}
    return next((by_name[name] for name in names if name in by_name), None)


def _folders(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.is_dir()]


def _has_image(folder: Path) -> bool:
    """Tells whether a folder holds an image; mostly its first file decides."""
    if not folder.is_dir():
        return False
    named = (path.suffix.lower() in image_suffixes() and path.is_file() for path in folder.rglob("[!.]*"))
    return any(named) or bool(find_images(folder, LeftOut()))


def _joined(paths: Sequence[Path], root: Path) -> str:
    return ", ".join(_relative(paths, root))


def _relative(paths: Sequence[Path], root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]

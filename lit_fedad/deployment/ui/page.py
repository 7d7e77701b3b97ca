"""The page itself, in Gradio: federation, site, gallery, and an image to try."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from lit_fedad.core.errors import UserError
from lit_fedad.core.text import printable, shell_word
from lit_fedad.data.pictures import read_picture
from lit_fedad.deployment.exported import onnx_exports
from lit_fedad.deployment.new_rate import choose_version, rate_of, save_threshold
from lit_fedad.deployment.reviews import Review, Reviews, add_review
from lit_fedad.deployment.ui.reading import (
    Row,
    RunView,
    ScoredFile,
    drift,
    histogram,
    histogram_svg,
    read_scored,
    slider_ends,
    slider_step,
)
from lit_fedad.metrics.conformal import rounded_up
from lit_fedad.report.html import escaped
from lit_fedad.report.naming import p_value_text

Try = Callable[[bytes, str], tuple[Any, Any, str]]
"""Maps content and name of a file to the image as it was scored, its heatmap, and a sentence about it."""

Saved = list[list[int]]
"""Versions that were saved in a browser, oldest first: the number of the version that each replaced, and its own."""

_MAX_PICTURES = 48
_ALL, _NONE = "any", "none"
_WORST, _NEAR = "most anomalous", "called normal, nearest to the threshold"
_CHOOSE = "Choose an image."
_HEATMAP = "heatmap (yellow: twice the threshold)"
_BUTTONS: tuple[tuple[Review, str], ...] = (
    ("correct", "Correct"),
    ("false alarm", "False alarm"),
    ("missed", "Missed"),
    ("withdrawn", "Undo"),
)


@dataclass(frozen=True)
class OperatorPage:
    """What the page shows, and what its buttons do.

    Attributes:
        view: The run.
        reviews: CSV file that the buttons write.
        attempt: Scores an uploaded image.
    """

    view: RunView
    reviews: Path
    attempt: Try

    def build(self) -> gr.Blocks:
        """Builds the page."""
        with gr.Blocks(title=f"lit_fedad: {self.view.title}", analytics_enabled=False) as page:
            gr.Markdown(f"# {_plain(self.view.title)}")
            health = gr.HTML(self._health, elem_id="health")
            with gr.Tab("Federation"):
                self._federation()
            with gr.Tab("Site"):
                self._site(health)
            with gr.Tab("Gallery"):
                self._gallery(health)
            with gr.Tab("Try"):
                self._try()
        for event in page.fns.values():
            event.fn = _telling_errors(event.fn)
        return page

    def _health(self) -> str:
        """Says in one line each whether images drift, sites failed and decisions were reviewed."""
        view = self.view
        view.check_default()
        troubles = len(view.troubles())
        failed = (
            ("#D55E00", "Failures", f"{troubles}, listed below")
            if troubles
            else ("#009E73", "No failures", "")
        )
        rules = view.rules()
        silent = [view.names.title(n) for n, rule in rules.items() if not math.isfinite(rule.threshold)]
        products = (None, *view.products())  # decisions about one product may promise another rate
        rates = sorted({view.shipped(client, product).alpha for client in rules for product in products})
        promised = "".join(f"{rate:g}" for rate in rates[:1])
        promised += "".join(f" to {rate:g}, by client and product" for rate in rates[1:][-1:])
        decides = (
            ("#D55E00", "Without decisions", f"{', '.join(silent)}: too few calibration images")
            if silent
            else ("#009E73", "Decides", f"false alarms: at most {promised}")
        )
        command = f"lit-fedad watch {shell_word(f'run={view.path}')} images=FOLDER"
        drifts = self._lamp(_NONE) or f"Drift is not watched; this does: <code>{escape(command)}</code>"
        lamps = [drifts, _light(*failed), *([_light(*decides)] if rules else [])]
        return "<br>".join([*lamps, escape(self._reviewed())])

    def _federation(self) -> None:
        view = self.view
        _table("Sites", view.sites())
        curves = view.curves()
        if len({row["round"] for row in curves}) > 2:  # fewer are no curve, and stand in the table
            gr.LinePlot(
                pd.DataFrame(curves),
                x="round",
                y="value",
                color="metric",
                title="Mean over clients",
                height=320,
            )
        _table("Exchanges", view.rounds())
        _table("Failures and refusals", view.troubles())

    def _site(self, health: gr.HTML) -> None:
        view = self.view
        if not view.clients():
            gr.Markdown("This run has no calibration scores: it detects no anomalies, or is not complete.")
            return
        tables = view.tables()
        with gr.Row():
            client = gr.Dropdown([(view.names.label(n), n) for n in view.clients()], label="client")
            product = gr.Dropdown([_ALL, *view.products()], value=_ALL, label="product")
            source = gr.Dropdown([_NONE, *tables], value=next(iter(tables), _NONE), label="new images")
            a_day = gr.Number(1000, label="images a day", minimum=0)
        first = slider_ends(view.shipped(view.clients()[0], None))
        threshold = gr.Slider(*first[:2], value=first[2], step=slider_step(*first[:2]), label="threshold")
        with gr.Row():
            save = gr.Button("Save this threshold", elem_id="save-threshold")
            back = gr.Button("Undo", elem_id="undo-threshold", interactive=False)
        saved, before = gr.Markdown(elem_id="saved"), gr.State([])
        lamp, words, drawn = gr.HTML(elem_id="drift"), gr.Markdown(elem_id="alarms"), gr.HTML()

        def show(number: int, name: str, table: str, at: float, images: float) -> tuple[str, str, str]:
            view.check_default()
            chosen = _named(name)
            rule, rate = view.shipped(number, chosen), rate_of(view, number, chosen, at)
            seen = [image.score for image in self._scored(table)]
            lines = [
                f"**{rate * (images or 0):.1f} false alarms a day**, at most, of {images or 0:g} normal images"
                f" ({rounded_up(100 * rate):g} %)."
            ]
            if seen:
                above = sum(score > at for score in seen)
                lines.append(f"{above} of {len(seen)} new images lie above.")
            limit = rule.threshold
            is_shipped = f"{limit:.6g}" if math.isfinite(limit) else "none: too few calibration images"
            command = f"lit-fedad predict {shell_word(f'run={view.path}')} client={number}"
            command += f" {shell_word(f'product={chosen}')}" if chosen else ""
            lines.append(
                f"Shipped for alpha {rule.alpha:g}: {is_shipped}; {rule.scores.total} calibration images. This"
                f" threshold: {_code(f'{command} alpha={rounded_up(rate, 4):g} images=FOLDER')}"
            )
            return self._lamp(table), "\n\n".join(lines), histogram_svg(histogram(rule.scores, seen, at), at)

        def move(number: int, name: str) -> Any:
            low, high, value = slider_ends(view.shipped(number, _named(name)))
            return gr.Slider(low, high, value=value, step=slider_step(low, high))

        def keep(number: int, name: str, at: float, versions: Saved) -> tuple[str, Saved, Any]:
            try:
                message, *saved = save_threshold(view, number, _named(name), at)
            except UserError as error:
                return _plain(str(error)), versions, gr.Button(interactive=bool(versions))
            return message, [*versions, saved], gr.Button(interactive=True)

        changes = (
            save.click(keep, [client, product, threshold, before], [saved, before, back]),
            back.click(self.undo, before, [saved, before, back]),
        )
        inputs, outputs = [client, product, source, threshold, a_day], [lamp, words, drawn]
        for change in changes:
            change.then(self._health, outputs=health).then(show, inputs, outputs)
        for changed in (client, product):
            changed.change(move, [client, product], threshold).then(show, inputs, outputs)
        for changed in (source, threshold, a_day):
            changed.change(show, inputs, outputs)
        lamp.value, words.value, drawn.value = show(
            view.clients()[0], _ALL, next(iter(tables), _NONE), first[2], 1000
        )

    def undo(self, versions: Saved) -> tuple[str, Saved, Any]:
        """Takes back the threshold that was saved last in a browser; returns what was done, and what is left."""
        if not versions:  # a second click, before the button is off
            return "Nothing is left to undo.", [], gr.Button(interactive=False)
        try:
            message = choose_version(self.view, *versions[-1])
        except UserError as error:
            return _plain(str(error)), versions, gr.Button(interactive=True)
        return message, versions[:-1], gr.Button(interactive=len(versions) > 1)

    def _gallery(self, health: gr.HTML) -> None:
        tables = [name for name in self.view.tables() if self._pictured(name, _WORST)]
        if not tables:
            gr.Markdown(
                f"No heatmaps yet: `lit-fedad predict {shell_word(f'run={self.view.path}')} images=FOLDER` writes them;"
                " then begin `lit-fedad ui` again."
            )
            return
        with gr.Row():
            source = gr.Dropdown(tables, value=tables[0], label="images")
            order = gr.Radio([_WORST, _NEAR], value=_WORST, label="shown first")
        # What is shown is what is reviewed, though `predict` may write other scores meanwhile.
        pictured = gr.State(self._pictured(tables[0], _WORST))
        gallery = gr.Gallery(
            _pictures(pictured.value),
            columns=4,
            object_fit="contain",
            height="auto",
            label="heatmaps",
            interactive=False,
            buttons=["download", "fullscreen"],  # Gradio's others would send pictures to its maker
        )
        chosen = gr.State(-1)
        said = gr.Markdown(_CHOOSE, elem_id="said")
        with gr.Row():
            buttons = {
                what: gr.Button(title, elem_id=title.lower().replace(" ", "-")) for what, title in _BUTTONS
            }
        with gr.Row():
            original, heatmap = _panel("image"), _panel(_HEATMAP)

        def choose(images: list[ScoredFile], event: gr.SelectData) -> tuple[Any, ...]:
            image = images[event.index]
            words = f"{_plain(image.path)}: {image.decision}, {p_value_text(image.p_value)}"
            drawn = str(image.heatmap) if image.heatmap and image.heatmap.is_file() else None
            if drawn is None:
                words += "; its heatmap is gone: reload the page"
            # What was called normal can only have been missed, and what was not only be a false alarm.
            wrong = {"false alarm": image.decision != "normal", "missed": image.decision == "normal"}
            usable = [gr.Button(interactive=wrong.get(what, True)) for what in buttons]
            pictures = _filled(_original(Path(image.path), self.view.page)), _filled(drawn)
            return event.index, words, *pictures, *usable

        def review(images: list[ScoredFile], index: int, what: Review) -> str:
            if index < 0:
                return "Choose an image first."
            image = images[index]
            add_review(self.reviews, image, what, str(self.view.path))
            return f"{_plain(image.path)}: {what}. {self._reviewed()} ({self.reviews})"

        def show(table: str, how: str) -> tuple[Any, ...]:
            images = self._pictured(table, how)
            return images, _pictures(images), -1, _CHOOSE, _filled(None), _filled(None)

        gallery.select(choose, pictured, [chosen, said, original, heatmap, *buttons.values()])
        for changed in (source, order):
            changed.change(show, [source, order], [pictured, gallery, chosen, said, original, heatmap])
        for what, button in buttons.items():
            click = button.click(partial(review, what=what), [pictured, chosen], said)
            click.then(self._health, outputs=health)

    def _reviewed(self) -> str:
        """Counts the reviews so far, in words."""
        counts = Reviews(self.reviews).counts() if self.reviews.exists() else {}
        parts = [f"{counts[kind]} {kind}" for kind in ("correct", "false alarm", "missed") if kind in counts]
        return f"Reviewed: {', '.join(parts)}." if parts else "Nothing is reviewed yet."

    def _try(self) -> None:
        gr.Markdown(self._exported)
        file = gr.File(label="an image", file_types=["image"], type="filepath", height=160)
        words = gr.Markdown(elem_id="verdict")
        with gr.Row():
            original, heatmap = _panel("image"), _panel(_HEATMAP)

        def score(path: str | None) -> tuple[Any, Any, str]:
            image, drawn, message = None, None, ""
            if path is not None:
                try:
                    image, drawn, message = self.attempt(Path(path).read_bytes(), Path(path).name)
                except UserError as error:
                    message = _plain(str(error))
            return _filled(image), _filled(drawn), message

        file.change(score, file, [original, heatmap, words])

    def _exported(self) -> str:
        """Says at each visit what is needed before an image can be tried; nothing if nothing is."""
        if onnx_exports(self.view.path):
            return ""
        run = shell_word(f"run={self.view.path}")
        return f"No detector is exported yet: `lit-fedad export {run} format=onnx` does."

    def _scored(self, table: str) -> list[ScoredFile]:
        path = self.view.tables().get(table)
        return read_scored(path) if path else []

    def _pictured(self, table: str, order: str) -> list[ScoredFile]:
        """Lists images with a heatmap: the most anomalous, or of those called normal the nearest to the threshold."""
        chosen = (image for image in self._scored(table) if order == _WORST or image.decision == "normal")
        return list(islice((image for image in chosen if image.heatmap), _MAX_PICTURES))

    def _lamp(self, table: str) -> str:
        """Says whether the images of a table, or else of another table, drift; empty where none are watched."""
        tables = self.view.tables()
        watched = [tables[table], *tables.values()] if table in tables else list(tables.values())
        summary = next((row for row in map(drift, watched) if row), None)
        if summary is None:
            return ""
        if alarms := summary["alarms"]:
            return _light("#D55E00", "Drift", f"alarms: {len(alarms)}, first at image {alarms[0]}.")
        if not summary["images"]:
            return _light("#E69F00", "No image watched yet", "")
        near = summary["psi"] > summary["psi_limit"]
        lamp = ("#E69F00", "Images may be changing") if near else ("#009E73", "No drift")
        psi = f"PSI {summary['psi']:.2f}, below {summary['psi_limit']:.2f} without drift"
        watched_images = f"{summary['images']:g} images watched"
        return _light(*lamp, f"{watched_images}; {psi}; KS p-value {summary['ks_p_value']:.2g}.")


def _telling_errors(action: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the page show what a `UserError` says; Gradio would only show that there was an error."""

    @wraps(action)
    def attempt(*given: Any) -> Any:
        try:
            return action(*given)
        except UserError as error:
            raise gr.Error(escape(printable(str(error)), quote=False), print_exception=False) from error

    return attempt


def _plain(text: str) -> str:
    """Escapes a text for Markdown, which could load pictures from anywhere: names in a run may be a stranger's."""
    return escaped(printable(text))


def _code(text: str) -> str:
    """Writes a text as Markdown's code, whatever it holds."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}"


def _named(product: str) -> str | None:
    return None if product == _ALL else product


def _panel(label: str) -> gr.Image:
    """Creates a place for a picture, which is visible once it holds one (`_filled`)."""
    return gr.Image(
        label=label,
        interactive=False,
        format="png",
        buttons=["fullscreen"],
        height=420,  # small images are enlarged to it
        visible=False,
        elem_classes="picture",
    )


def _filled(picture: Any) -> gr.Image:
    return gr.Image(picture, visible=picture is not None)


def _original(path: Path, page: int | None) -> Any:
    """Reads the picture that was scored; None where it no longer is where its table says."""
    try:
        return read_picture(path, page)
    except (UserError, OSError):
        return None


def _light(colour: str, state: str, text: str) -> str:
    """Writes a lamp as HTML; colours are those of Okabe and Ito (2008)."""
    return (
        f'<span style="color:{colour};font-size:1.4em">&#9679;</span> <b>{escape(state)}</b> {escape(text)}'
    )


def _table(title: str, rows: Sequence[Row]) -> None:
    if not rows:
        gr.Markdown(f"**{title}**: none.")
        return
    heads = list(rows[0])
    cells = [["-" if row[head] is None else printable(str(row[head])) for head in heads] for row in rows]
    gr.Dataframe(cells, headers=heads, label=title, interactive=False, wrap=True, max_height=360)


def _pictures(images: Sequence[ScoredFile]) -> list[tuple[str, str]]:
    """Lists heatmaps, which show their p-values, and the decision on each."""
    return [(str(image.heatmap), image.decision) for image in images]

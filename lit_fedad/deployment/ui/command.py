"""``lit-fedad ui``: opens the operator's page on an address of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from lit_fedad.core.bounds import within
from lit_fedad.core.errors import UserError
from lit_fedad.core.text import shell_word
from lit_fedad.deployment.exported import onnx_exports, read_sheet
from lit_fedad.deployment.ui.reading import RunView
from lit_fedad.deployment.uploads import Limits, RefusedError, read_upload
from lit_fedad.report.console import Display
from lit_fedad.report.html import escaped
from lit_fedad.report.naming import p_value_text

_LIMITS = Limits()

# A decision is written over the top of its heatmap, whose lowest line is the p-value. On a phone, wide tables scroll
# sideways; Gradio breaks words between any two letters, and its heatmaps get too small.
_STYLE = """
.thumbnail-item .caption-label { top: var(--spacing-sm) !important; bottom: auto !important }
.picture img { width: 100% !important; height: 100% !important; object-fit: contain !important }
.table-wrap :is(th, td, span) { overflow-wrap: normal !important; word-break: normal !important }
@media (max-width: 600px) {
  .table-wrap :is(th, td, span) { font-size: .7rem; padding: 0 1px !important }
  .table-wrap .cell-wrap { padding: var(--spacing-sm) 1px !important }
  .grid-container { grid-template-columns: repeat(2, 1fr) !important }
}
"""


def ui(
    run: str, display: Display, out: str = "reviews.csv", host: str = "127.0.0.1", port: int = 7860
) -> None:
    """Shows the operator's page until it is ended: thresholds and drift of a site, heatmaps, an image to try.

    Args:
        run: MLflow run id, or the run's folder.
        display: Shows the address.
        out: CSV file that the gallery's buttons write; the run's folder gets saved thresholds alone.
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        UserError: If there is no such run, or the address cannot be used.
    """
    within("ui", 0, 65535, port=port)
    view = RunView.open(run)
    # Gradio reads these when it is imported: it reports nothing, and copies of pictures are removed with this process.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with tempfile.TemporaryDirectory() as copies:
        os.environ["GRADIO_TEMP_DIR"] = copies
        import gradio as gr

        from lit_fedad.deployment.ui.page import OperatorPage

        page = OperatorPage(view, Path(out), trial(view.path)).build()
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port,
                prevent_thread_lock=True,
                quiet=True,
                share=False,
                inbrowser=False,
                ssr_mode=False,
                max_file_size=_LIMITS.max_bytes,
                allowed_paths=[str(view.path / name) for name in ("predictions", "watch")],
                footer_links=[],
                theme=gr.themes.Default(font="sans-serif", font_mono="monospace"),  # fonts of this machine
                css=_STYLE,
            )
        except OSError as error:
            raise UserError(f"host={host} port={port}: cannot be listened on; give another port") from error
        display.where_next([("page", address), ("reviews", out)])
        page.block_thread()


def trial(run: Path) -> Callable[[bytes, str], tuple[Any, Any, str]]:
    """Makes the function that scores an uploaded image by the first exported detector of a run.

    Args:
        run: The run's folder.

    Returns:
        A function from the content and name of a file to the image as it was scored, its heatmap, if there is one, and
        a line of text.
    """
    loaded: list[Any] = []

    def attempt(content: bytes, name: str) -> tuple[Any, Any, str]:
        from lit_fedad.deployment.served_detector import ServedDetector

        if not (folders := onnx_exports(run)):
            raise UserError(
                f"no exported detector; first: lit-fedad export {shell_word(f'run={run}')} format=onnx"
            )
        if not loaded or loaded[0].sheet != read_sheet(folders[0]):  # exported again since
            loaded[:] = [ServedDetector(folders[0])]
        (detector,) = loaded
        try:
            verdict = detector(read_upload(content, _LIMITS.max_pixels, detector.page))
        except RefusedError as error:
            raise UserError(f"{name}: {error.reason}") from error
        heatmap = Image.open(BytesIO(detector.heatmap(verdict))) if verdict.anomaly_map is not None else None
        answer = verdict.words
        caution = f"; it {answer['caution']}" if "caution" in answer else ""
        if "class" in answer:
            sentence = f"**{escaped(answer['class'])}** ({answer['probability']:.3f})"
        else:
            score = "that is no number" if answer["score"] is None else f"{answer['score']:.4g}"
            sentence = f"**{answer['decision']}**, score {score}, {p_value_text(answer['p_value'])}"
        return verdict.image, heatmap, f"{sentence}, by {escaped(detector.sheet.name)}{caution}"

    return attempt

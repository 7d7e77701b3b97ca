"""Pictures of the report and of MLflow's pages, from the runs that are tracked: ``python scripts/screenshots.py``.

Needs Chromium or Chrome; says so and does nothing where there is none. Options: ``out=docs/images``,
``experiment=NAME``, or ``ui=RUN`` for the operator's page of a run alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from urllib.parse import urlencode

from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind
from lit_fedad.papers.page import report_runs
from lit_fedad.report.console import Display
from lit_fedad.tracking.reading import TrackedRun, tracked_runs
from lit_fedad.tracking.server import destination, is_database

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE_S = 180
# MLflow's pages fill themselves after they are loaded.
_FILLED_MS = 20_000


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        out: Folder of the pictures.
        experiment: MLflow experiment of the pictured runs; None for all of them.
        ui: Folder of a run whose operator's page is pictured, and nothing else.
    """

    out: str = "docs/images"
    experiment: str | None = None
    ui: str | None = None


def main(options: Options, display: Display) -> None:
    """Writes ``report*.png`` and ``mlflow_*.png``, or ``ui.png``.

    Args:
        options: Which runs are pictured, and where the pictures go.
        display: Shows what was written.

    Raises:
        UserError: If no two complete runs of one experiment are tracked, or a page does not answer.
    """
    out = Path(options.out).resolve()
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        display.note(f"skipped: no browser found ({', '.join(_BROWSERS)})")
        return
    out.mkdir(parents=True, exist_ok=True)
    if options.ui:
        with served("lit_fedad", "ui", f"run={options.ui}", "port={port}") as page:
            shoot(browser, page, out / "ui.png", 1400, 980)
        display.note(f"written: {out / 'ui.png'}")
        return
    experiments = [options.experiment] if options.experiment else []
    first, second = two_runs(tracked_runs(experiments))
    uri = destination(None)
    store = ("--backend-store-uri", uri) if is_database(uri) else ()
    mlflow = served("mlflow", "ui", "--port", "{port}", "--workers", "1", *store, ready="health")
    with tempfile.TemporaryDirectory() as folder, mlflow as ui:
        page = report_runs(display, tuple(experiments), folder).resolve().as_uri()
        shots = {
            "report.png": (page, 1280, 1600),
            "report_phone.png": (_phone(page, Path(folder)), 500, 1100),
            "mlflow_compare.png": (metric_page(ui, first, second), 1800, 900),
            "mlflow_artifact.png": (
                f"{ui}/#/experiments/{first.experiment_id}/runs/{first.run_id}/artifacts/figures/heatmaps.png",
                1800,
                900,
            ),
        }
        for name, (url, width, height) in shots.items():
            shoot(browser, url, out / name, width, height)
            display.note(f"written: {out / name}")


def two_runs(runs: Sequence[TrackedRun]) -> tuple[TrackedRun, TrackedRun]:
    """The last two complete runs of one experiment: of two methods and with rounds of training, where there are such.

    Raises:
        UserError: If there are none.
    """
    complete = [
        run for run in reversed(runs) if run.status == "FINISHED" and "method" in run.tags and not run.parent
    ]
    pairs = [pair for pair in combinations(complete, 2) if pair[0].experiment == pair[1].experiment]
    if not pairs:
        raise UserError("no two complete runs of one experiment are tracked; train them first")

    def shows(pair: tuple[TrackedRun, TrackedRun]) -> tuple[bool, bool]:
        first, second = pair
        return first.tags["method"] != second.tags["method"], all(
            run.params.get("rounds") != "0" for run in pair
        )

    return max(pairs, key=shows)  # of equal ones the first, which is the last that began


def metric_page(ui: str, first: TrackedRun, second: TrackedRun) -> str:
    """MLflow's chart of one metric of two runs: the first mean over clients."""
    metric = next(name for name in ("i_auroc/mean", "accuracy/mean", *first.metrics) if name in first.metrics)
    values = {
        "runs": [first.run_id, second.run_id],
        "metric": metric,
        "experiments": [first.experiment_id],
        "plot_metric_keys": [metric],
    }
    query = {key: json.dumps(value, separators=(",", ":")) for key, value in values.items()}
    look = {"x_axis": "step", "y_axis_scale": "linear", "line_smoothness": 1, "show_point": "true"}
    empty = {"deselected_curves": "[]", "last_linear_y_axis_range": "[]"}
    return f"{ui}/#/metric?{urlencode({**query, **look, **empty})}"


def shoot(browser: str, url: str, file: Path, width: int, height: int) -> None:
    """A picture of a page.

    Raises:
        UserError: If the browser makes none.
    """
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"]
    command += [f"--virtual-time-budget={_FILLED_MS}", f"--window-size={width},{height}"]
    file.unlink(missing_ok=True)
    done = subprocess.run(  # noqa: S603 - the browser that the user names, without a shell
        [*command, f"--screenshot={file}", url],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    if not file.is_file():
        raise UserError(f"{browser}: no picture of {url}: {done.stderr.strip().splitlines()[-1:]}")


@contextmanager
def served(module: str, *command: str, ready: str = "") -> Iterator[str]:
    """A server on a free port of this machine, for as long as the block lasts.

    Args:
        module: Module that is run beside this Python.
        command: Its arguments; ``{port}`` stands for the port.
        ready: Path that answers once it is ready.

    Yields:
        Its address.

    Raises:
        UserError: If it does not answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    arguments = [argument.format(port=port) for argument in command]
    server = subprocess.Popen(  # noqa: S603 - a module beside this Python, without a shell
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait(f"{address}/{ready}", server)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(_PATIENCE_S)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)  # noqa: S310 - an address on this machine, made above
            return
        except OSError:
            time.sleep(0.5)
    raise UserError(f"nothing answers at {url}")


def _phone(page: str, folder: Path) -> str:
    """The page as wide as a phone; headless windows do not get that narrow."""
    frame = folder / "phone.html"
    style = "width:390px;height:1100px;border:0;display:block;margin:0 auto"
    frame.write_text(
        f'<body style="margin:0;background:#8a9099"><iframe src="{page}" style="{style}"></iframe>'
    )
    return frame.as_uri()


if __name__ == "__main__":
    console = Display()
    try:
        bind(main, sys.argv[1:], "screenshots", display=console)()
    except UserError as error:
        console.error(str(error))
        sys.exit(2)

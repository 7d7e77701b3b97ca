"""Reports tracked runs (``lit-fedad report``): one HTML page and the same in Markdown."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.text import without_user
from lit_fedad.experiment.run_files import MALFORMED, refused_if_malformed
from lit_fedad.papers.paper import FilledTable, fill
from lit_fedad.papers.plan import page_tables
from lit_fedad.papers.runs import CompleteRun, Links, complete_runs, groups_by_data
from lit_fedad.papers.sections import (
    accuracy_over_bytes,
    accuracy_over_rounds,
    attacks,
    complete_table,
    incomplete_table,
    partitions,
    product_tables,
    promises,
    run_sheets,
    site_tables,
)
from lit_fedad.report.console import Display
from lit_fedad.report.html import Block, Page, Section, render_html, render_markdown
from lit_fedad.report.naming import human_bytes
from lit_fedad.tracking.reading import TrackedRun, tracked_runs
from lit_fedad.tracking.server import destination

_PICTURES = ".written"  # name of the file that lists the pictures of a report


def report_runs(
    display: Display,
    experiment: tuple[str, ...] = (),
    out: str | None = None,
    ui: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Writes one page of all tracked runs, or of some experiments, as ``report.html`` and ``report.md``.

    Args:
        display: Prints progress, and where the files are.
        experiment: MLflow experiments to report; all by default.
        out: Folder of the page; ``reports/`` with the experiments' names by default.
        ui: Address of MLflow's pages; that of the tracking server by default, and of ``mlflow ui`` beside a database.
        overrides: Overrides of the configuration, of which only ``tracking.uri`` is taken.

    Returns:
        The page's file.

    Raises:
        UserError: For bad input, or if no complete run is tracked.
    """
    if ui is not None and not ui.startswith(("http://", "https://")):
        raise UserError(f"ui={ui}: must begin with http:// or https://")
    given = dict(overrides or {})
    uri = given.pop("tracking.uri", None)
    if given:
        raise UserError(
            f"report without table= has no key '{min(given)}', of the configuration only tracking.uri"
        )
    names = "-".join(experiment)
    tracking = destination(uri)
    server = tracking if tracking.startswith(("http://", "https://")) else None
    address = without_user(ui or server or "http://127.0.0.1:5000").rstrip("/")
    links = Links(address, Path(out or f"reports/{names or 'all'}"))
    tracked = tracked_runs(experiment, uri)
    with tempfile.TemporaryDirectory() as fetched:
        runs: Sequence[CompleteRun] = complete_runs(tracked, Path(fetched), uri, display)
        if not runs:
            raise UserError(
                f"experiment={','.join(experiment) or '(all)'}: no complete run is tracked;"
                " lit-fedad train makes one"
            )
        with display.progress("The report") as progress:
            page, runs = _readable_page(tracked, runs, links, uri, display, progress)
    file = write_page(page, links.out)
    display.note(f"complete runs: {len(runs)}; the page has {human_bytes(file.stat().st_size)}")
    display.where_next(
        [
            ("page", str(file)),
            ("text", str(links.out / "report.md")),
            ("runs", address if server else f"mlflow ui ({address})"),
        ]
    )
    return file


def _readable_page(
    tracked: Sequence[TrackedRun],
    runs: Sequence[CompleteRun],
    links: Links,
    uri: str | None,
    display: Display,
    progress: Callable[[int, int], None],
) -> tuple[Page, Sequence[CompleteRun]]:
    """Builds the page of the runs whose results hold what runs write, and returns these; others are left out.

    If a result does not, each run is tried alone, which takes about a second; `progress` is told of it.

    Raises:
        UserError: If there is none.
    """
    try:
        return build_page(tracked, runs, links, uri), runs
    except MALFORMED:
        whole = []
        for done, run in enumerate(runs):
            progress(done, len(runs))
            try:
                with refused_if_malformed(str(run.files / "result.json")):
                    build_page([run.tracked], [run], links, uri)
                whole.append(run)
            except UserError as error:
                display.warn(f"{run.tracked.name} is left out: {error}")
        if len(whole) == len(runs):
            raise
    if not whole:
        raise UserError("no result can be read: the warnings say why")
    return build_page(tracked, whole, links, uri), whole


def build_page(
    tracked: Sequence[TrackedRun], runs: Sequence[CompleteRun], links: Links, uri: str | None
) -> Page:
    """Builds the page, section by section."""
    data = groups_by_data(runs)
    grouped = [run for groups in data.values() for group in groups for run in group.runs]
    filled = [table for name in page_tables() if (table := fill(name, grouped))]
    parts: dict[str, Iterator[Block]] = {
        "Runs": chain(complete_table(data, links), incomplete_table(tracked, runs, links)),
        "Beside the papers": paper_tables(filled, links),
        "Over the rounds": accuracy_over_rounds(data, links, uri),
        "Accuracy and bytes": accuracy_over_bytes(data),
        "Sites": site_tables(data, links),
        "Products": product_tables(data, links),
        "Decisions": promises(data, links),
        "Partitions": partitions(data, links),
        "What detectors see": run_sheets(data, links),
        "Privacy": attacks(data, links),
    }
    sections = [Section(title, blocks) for title, part in parts.items() if (blocks := list(part))]
    experiments = list(dict.fromkeys(run.tracked.experiment for run in runs))
    older = len(runs) - len(grouped)
    repeated = f", and {older} that later ones repeat" if older else ""
    return Page(
        f"Runs: {', '.join(experiments)}",
        f"Complete runs: {len(grouped)}{repeated}. Numbers link to their runs in MLflow ({links.ui}): "
        "means over seeds to the comparison of their runs. ± is the sample standard deviation over seeds.",
        sections,
    )


def paper_tables(tables: Sequence[FilledTable], links: Links) -> Iterator[Block]:
    """Tabulates each paper's numbers beside those of our runs, and what our runs cost.

    Yields:
        For the rows of each paper, and for rows beyond it: a table of results and one of costs. A table without a
        number of the paper for our data is left out.
    """
    for filled in tables:
        if any(key in row.paper for row in filled.table.rows for key in filled.columns.values()):
            yield from filled.grids(links)


def write_page(page: Page, out: Path) -> Path:
    """Writes a page as HTML and as Markdown, and removes the pictures of an earlier one, but no others.

    Raises:
        UserError: If a file that no report wrote has the name of a picture.
    """
    text, pictures = render_markdown(page, "pictures")
    folder, listed = out / "pictures", _listed(out)
    for name in pictures:
        if (folder / name).exists() and name not in listed:
            raise UserError(f"{folder / name}: no report wrote it; move it, or give another out=DIR")
    # The list is written first: an interrupted report leaves no picture that the next report does not know.
    with atomic(folder / _PICTURES) as partial:
        partial.write_text("\n".join(sorted({*listed, *pictures})))
    for old in listed - pictures.keys():
        (folder / old).unlink(missing_ok=True)
    files = {f"pictures/{picture}": data for picture, data in pictures.items()}
    files |= {"report.html": render_html(page).encode(), "report.md": text.encode()}
    for name, content in files.items():
        with atomic(out / name) as partial:
            partial.write_bytes(content)
    return out / "report.html"


def _listed(out: Path) -> set[str]:
    """Names the pictures that earlier reports wrote."""
    try:
        names = (out / "pictures" / _PICTURES).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {name for name in names if Path(name).name == name}

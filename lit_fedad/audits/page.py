"""The page of a run's privacy: what leaves a site, what attacks have found, and which defences are on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lit_fedad.audits.statistics import WHO
from lit_fedad.contracts import TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.text import shell_word
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.report.html import Block, Grid, Line, Page, Prose, Section, render_html, render_markdown
from lit_fedad.report.naming import human_bytes, metric_title
from lit_fedad.tracking.tracker import amend

BUDGET = "differential_privacy"
"""Entry of ``result.json`` that states the privacy budget that a run has spent: ``epsilon`` and ``delta``."""

_STEM = "privacy"
_METRICS = ("i_auroc", "p_auroc", "auroc", "accuracy", "selection_accuracy", "global_accuracy")
_CORRELATED = {"shared": "shared densities", "noise": "Gaussian noise"}
_RATES = {"tpr_at_0.1_percent": "TPR at 0.1 % FPR", "tpr_at_1_percent": "TPR at 1 % FPR"}
_MINIMUM = {
    "min_images": "different images behind a slot of the shared memory; uploads hold slots of fewer",
    "prototype_images": "images of a class from which on its mean logits are sent",
}
_ALSO_SENT = (
    "Beside these, every client tells its number of images; losses, scores of test and calibration images and metrics"
    " reach the server client by client."
)


class Outcome(NamedTuple):
    """Result of an attack.

    Attributes:
        attack: Its name.
        content: What it has written to the file of its name in ``privacy``.
        metrics: Metrics for MLflow.
        files: What it has written.
    """

    attack: str
    content: Mapping[str, Any]
    metrics: Mapping[str, float]
    files: Sequence[Path]


def write_page(run: FinishedRun, outcome: Outcome | None = None) -> None:
    """Writes ``privacy/privacy.html`` and ``privacy/privacy.md`` of a run, prints them, and logs them to MLflow.

    Args:
        run: The run; results of attacks are read from its folder.
        outcome: What an attack has found just now, which is then printed in place of the page.
    """
    page, home = privacy_page(run), run.folder.path / "privacy"
    home.mkdir(exist_ok=True)
    files = [home / f"{_STEM}.html", home / f"{_STEM}.md"]
    for file, text in zip(files, (render_html(page), render_markdown(page, _STEM)[0]), strict=True):
        with atomic(file) as partial:
            partial.write_text(text)
    if outcome is None:
        run.display.note(page.summary)
        for section in page.sections:
            run.display.note(f"\n{section.title}")
            run.display.blocks(section.blocks)
    else:
        run.display.blocks([_TABLES[outcome.attack](outcome.content)])
    metrics = {
        "privacy/bytes_up": float(sum(sum(report.bytes_up.values()) for report in run.federation.history))
    }
    written = [] if outcome is None else outcome.files
    if outcome is not None:
        metrics |= outcome.metrics
    delivery = amend(run.folder.path, metrics, run.folder.config()["rounds"], [*written, *files], "privacy")
    run.display.unsent(delivery.kept, run.folder.path)
    written_lines = [("written", str(file)) for file in written]
    run.display.where_next([*written_lines, ("page", str(files[0]))])


def privacy_page(run: FinishedRun) -> Page:
    """Builds the page of a run.

    Args:
        run: The run; results of attacks are read from its folder.
    """
    findings = _findings(run)
    command = f"lit-fedad privacy {shell_word(f'run={run.folder.path}')} attack=lira"
    return Page(
        f"Privacy of {run.result['method']}, {run.folder.path.name}",
        f"{len(run.federation.clients)} clients with {sum(run.federation.data.sizes.values())} training images,"
        f" {run.federation.rounds} rounds; {_last_metrics(run.result)}",
        [
            Section("What leaves a site", [_exchanges_grid(run), Prose([_ALSO_SENT])]),
            Section("What attacks found", findings or [Prose([f"No attack was run: {command}"])]),
            Section("Defences", [_defences(run)]),
        ],
    )


def _last_metrics(result: Mapping[str, Any]) -> str:
    """Writes the mean metrics of the last round, which tell what the defences cost."""
    last = result.get("last") or {}
    metrics = {name: last[name]["mean"] for name in _METRICS if isinstance(last.get(name), dict)}
    measured = {name: value for name, value in metrics.items() if value is not None}
    return (
        ", ".join(f"{metric_title(name)} {value:.3f}" for name, value in measured.items()) or "not evaluated"
    )


def form(spec: TensorSpec) -> str:
    """Writes the form of a tensor: its type and sizes."""
    sizes = ", ".join(map(str, spec.shape))
    return f"{str(spec.dtype).removeprefix('torch.')} [{sizes}]"


def _exchanges_grid(run: FinishedRun) -> Grid:
    """Tabulates each exchange, the form of its tensors, and the bytes that a client has sent in a round of it."""
    federation, lines = run.federation, list[Line]()
    bytes_of = dict(_bytes_by_round(run))
    for number in (*range(federation.exchanges.first_round, 1), *([1] if federation.rounds else [])):
        exchanges = federation.exchanges.of_round(number)
        for index, exchange in enumerate(exchanges):
            spec = exchange.upload_spec(federation.client)
            summed = federation.summing is not None and exchange.sums is not None
            num_bytes = bytes_of.get("rounds" if number == 1 else str(number))
            cells = [
                exchange.name,
                "every round" if number == 1 else "once, before round 1",
                "; ".join(f"{name} {form(tensor)}" for name, tensor in spec.items()) or "nothing",
                "the sum of all" if summed else "each message" if spec else "-",
                human_bytes(num_bytes) if num_bytes is not None and index == 0 else "",
            ]
            lines.append(Line.of(cells))
    heads = ["exchange", "when", "tensors", "the server sees", "bytes, a client and round"]
    return Grid("", heads, lines, texts=4)


def _bytes_by_round(run: FinishedRun) -> Iterator[tuple[str, float]]:
    """Yields the mean bytes that a client sent in each set-up round, and in a round from 1 on."""
    rounds = []
    for report in run.federation.history:
        if report.bytes_up:
            mean = sum(report.bytes_up.values()) / len(report.bytes_up)
            if report.round < 1:
                yield str(report.round), mean
            else:
                rounds.append(mean)
    if rounds:
        yield "rounds", sum(rounds) / len(rounds)


def _findings(run: FinishedRun) -> list[Block]:
    """Tabulates what attacks have written to the run's folder.

    A file that cannot be read, or is of another form, such as that of an earlier version, is named in its place.
    """
    damaged, blocks = list[str](), list[Block]()
    for attack, table in _TABLES.items():
        try:
            if (content := run.folder.attack(attack)) is not None:
                blocks.append(table(content))
        except UserError as error:
            damaged.append(str(error))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            damaged.append(
                f"{run.folder.path / 'privacy' / attack}.json: of another form than this version's; remove it, and"
                " attack the run again"
            )
    for line in damaged:
        run.display.warn(line)
    return [*blocks, *([Prose(damaged)] if damaged else [])]


def _correlation(result: Mapping[str, Any]) -> Grid:
    heads = {"r_squared": "R^2", "r": "R", "corrected": "R^2, bias-corrected"}
    lines = [
        Line.of([name, *(f"{result[f'{key}_raw_{kind}']:.3f}" for kind in heads)])
        for key, name in _CORRELATED.items()
    ]
    return Grid("Distance correlation with images", ["of", *heads.values()], lines)


def _membership(result: Mapping[str, Any]) -> Grid:
    lines = []
    for finding in result["findings"]:
        report = finding["report"]
        mean, deviation = report["auc_of_models"]
        rates = [report["tpr"][name] for name in _RATES]
        texts = [WHO[finding["side"]], finding["statistic"], f"{mean:.3f} +- {deviation:.3f}"]
        lines.append(Line.of([*texts, *map(_interval, (report["auc"], *rates))]))
    notes = [
        f"{result['shadows']} shadow runs, each attacked in turn; uploads: {result['uploads']}; all examples are"
        " training images, of which shadow runs have fewer than the run",
        "In brackets the 95 % interval, and then what permuted membership gives, with its 97.5 % quantile."
        " 'all' decides; single statistics explain.",
    ]
    if unread := result.get("not_read"):  # earlier versions do not write it
        notes.append(
            f"No statistic reads, so that even 'all' says nothing of it: {'; '.join(map(_short, unread))}"
        )
    if result["pairs_left_out"]:
        notes.append(
            f"Pairs of shadow runs left out because noise hid the images of one: {result['pairs_left_out']}"
        )
    heads = ["attacked", "of", "AUC over shadows", "AUC", *_RATES.values()]
    return Grid("Membership (LiRA)", heads, lines, notes, texts=2)


def _inversion(result: Mapping[str, Any]) -> Grid:
    rows = [(name, entry, result["judged"][name]) for name, entry in result["identified"].items()]
    rows += [(f"positive control: {entry['control']}", entry, entry) for entry in result["positive_controls"]]
    lines = []
    for name, entry, judged in rows:
        texts = [
            name,
            _interval({"value": entry["top1"], **entry}),
            f"{median(entry['ranks']):g}, {len(entry['ranks'])}",
            f"{_decibel(judged['psnr'])}, {_decibel(judged['best_psnr'])}",
            f"{judged['ssim']:.2f}, {judged['best_ssim']:.2f}",
            _decibel(judged["psnr_to_mean_image"]),
        ]
        lines.append(Line.of(texts))
    heads = [
        "inverted",
        "top-1",
        "median rank, images",
        "PSNR in dB, best",
        "SSIM, best",
        "PSNR to the mean image",
    ]
    notes = [
        f"Exchange {result['exchange']} of client {result['client']}; the control is client {result['control']}."
        f" Judged without positions by {result['judge']}; candidates: {result['candidates']}. In brackets the 95 %"
        " interval, and then chance."
    ]
    return Grid(f"Inversion of {result['attacked']}", heads, lines, notes)


_TABLES: dict[str, Callable[[Mapping[str, Any]], Grid]] = {
    "lira": _membership,
    "inversion": _inversion,
    "dcor": _correlation,
}


def _short(names: str) -> str:
    """Shortens what an exchange sends to a line."""
    return names if len(names) <= 120 else f"{names[:120]}..."


def _decibel(value: float | None) -> str:
    """Writes a PSNR, which files leave out where it is infinite: of equal images."""
    return "infinite" if value is None else f"{value:.1f}"


def _interval(bounds: Mapping[str, float]) -> str:
    """Writes a value with its interval, and what chance gives."""
    chance = ", ".join(f"{bounds[name]:.3f}" for name in ("chance", "chance_high") if name in bounds)
    return f"{bounds['value']:.3f} [{bounds['low']:.3f}, {bounds['high']:.3f}] ({chance})"


def _defences(run: FinishedRun) -> Grid:
    """Tabulates defences, on or off."""
    client, budget = run.config["method"].get("client", {}), run.result.get(BUDGET)
    rows = [
        ("secure sums", "on" if run.federation.summing is not None else "off", "the server sees sums alone")
    ]
    for key, effect in _MINIMUM.items():
        if key in client:
            rows.append((f"method.client.{key}", str(client[key]), effect))
    if client.get("ranks") is not None:
        rows.append(
            ("method.client.ranks", str(client["ranks"]).lower(), "order of mean logits in place of them")
        )
    spent = "none" if budget is None else f"epsilon {budget['epsilon']:.3g}, delta {budget['delta']:.1g}"
    # With the seed, which lies in the run's files, the noise can be taken away.
    removable = budget is not None and not budget.get("secret", True)
    bound = "its seed is known: a measurement, no protection" if removable else "a bound for any attack"
    rows.append(("differential privacy", spent, f"noise: {bound}"))
    return Grid("", ["defence", "state", "what it does"], list(map(Line.of, rows)), texts=3)

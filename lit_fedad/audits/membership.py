"""Infers from the messages of a run which images its clients were trained on, by LiRA.

Shadow models are runs of the same experiment, in which every client is trained on a random half of its examples. Each
shadow run is attacked in turn, by comparison with all others but its pair: an attacked run is then drawn like those
that it is compared with, so that only membership tells them apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_fedad.audits.lira import exchangeable_scores
from lit_fedad.audits.membership_report import Attacked, MembershipReport, membership_report, pooled_roc
from lit_fedad.audits.page import Outcome
from lit_fedad.audits.shadow_runs import Seen, ShadowRuns, Side
from lit_fedad.audits.statistics import COLUMNS, WHO, evidence_of
from lit_fedad.core.bounds import above, within
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.experiment.run_files import save_json
from lit_fedad.privacy.image_privacy import Plan
from lit_fedad.report.audit_figures import roc_figure
from lit_fedad.report.figures import save_figure


@dataclass(frozen=True)
class LiraOptions:
    """Options of ``lit-fedad privacy attack=lira``.

    Attributes:
        shadows: Number of shadow runs, even and at least 6.
        share: Share of a client's images that are examples, of which each shadow run leaves half out.
        out: Folder that gets ``privacy`` and ``figures``; None for the run's.
        seed: Seed that draws the examples and those that each shadow run is trained on.

    Raises:
        UserError: If there are too few shadow runs, or an odd number, or the share is out of range.
    """

    shadows: int = 16
    share: float = 0.5
    out: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shadows < 6 or self.shadows % 2:
            raise UserError(f"shadows={self.shadows}: give an even number, at least 6")
        above("privacy", 0, share=self.share)
        within("privacy", 0, 1, share=self.share)


@dataclass(frozen=True)
class Finding:
    """What one way to attack has found.

    Attributes:
        side: Whether what clients send is attacked, or what the server sends to all.
        statistic: Name of the statistic of the messages that decides.
        report: How well the attack succeeds.
    """

    side: Side
    statistic: str
    report: MembershipReport


def infer(run: FinishedRun, options: LiraOptions) -> Outcome:
    """Infers membership from all messages of a run, against those of shadow runs; the same command continues.

    The attack is LiRA; it writes ``privacy/lira.json`` and ``figures/lira.png``. Shadow runs that are complete are not
    played again.

    Args:
        run: The run.
        options: Which images are attacked, and with how many shadow runs.

    Returns:
        What each statistic finds, as `Finding`; the last one of each side is of all its messages together.

    Raises:
        UserError: If nothing in the run can be attacked, or its folder holds other shadow runs.
    """
    evidence_of(run.federation)  # refuses a method that has none, before shadow runs are played
    folder, config = run.folder.path, run.folder.config()
    if str(config["fabric"]["devices"]) not in ("1", "auto") or config["fabric"]["num_nodes"] != 1:
        raise UserError(f"{folder}: a run of several processes; attack one with fabric.devices=1")
    home = Path(options.out) if options.out else folder
    shadows = ShadowRuns(run, home / "privacy" / "lira", options.share, options.seed)
    with run.display.progress("Shadow runs") as progress:
        observed = _observe(shadows, options.shadows, progress)
    findings, curves = [], {}
    for side in ("sent", "received"):
        for statistic, attacked in attack(shadows, {n: seen[side] for n, seen in observed.items()}).items():
            try:
                findings.append(Finding(side, statistic, membership_report(attacked, options.seed)))
            except ValueError as error:
                raise UserError(f"{error}; give more shadows") from error
            curves[side] = pooled_roc(attacked)
    if not findings:
        raise UserError(
            f"{folder}: no statistic of this attack reads what method {run.result['method']} sends"
            f" ({'; '.join(_not_read(run, observed))}); that is no sign that it tells nothing of single images"
        )
    last = {finding.side: finding.report for finding in findings}
    numbers = {
        f"{side}_{name}": value for side, report in last.items() for name, value in _numbers(report).items()
    }
    content = {
        "attack": "lira",
        **asdict(options),
        "rounds": config["rounds"],
        "pairs_left_out": (max(observed) + 1 - len(observed)) // 2,
        "uploads": _uploads(run),
        "not_read": _not_read(run, observed),
        **numbers,
        "findings": [asdict(finding) for finding in findings],
    }
    file = save_json(home / "privacy", "lira.json", content)
    named = {WHO[side]: curve for side, curve in curves.items()}
    areas = {WHO[side]: report.auc.value for side, report in last.items()}
    figure = save_figure(roc_figure(named, areas), home / "figures" / "lira.png")
    metrics = {f"lira/{name.replace('_', '/', 1)}": value for name, value in numbers.items()}
    return Outcome("lira", content, metrics, [file, figure])


def _observe(
    shadows: ShadowRuns, needed: int, progress: Callable[[int, int], None]
) -> dict[int, dict[Side, Seen]]:
    """Plays pairs of shadow runs until enough have shown their messages; leaves out pairs of which noise hides one."""
    observed: dict[int, dict[Side, Seen]] = {}
    for first in range(0, 2 * needed, 2):
        pair: dict[int, dict[Side, Seen]] = {}
        for number in (first, first + 1):
            seen = shadows.play(number, _scaled_progress(progress, len(observed) + len(pair), needed))
            if seen is None:
                break
            pair[number] = seen
        if len(pair) == 2:
            observed |= pair
        if len(observed) == needed:
            return observed
    raise UserError(
        f"{shadows.home}: the noise hides the images of too many shadow runs: {len(observed)} of {2 * needed} are left;"
        " attack a run of more images or of a larger epsilon"
    )


def attack(shadows: ShadowRuns, observed: Mapping[int, Seen]) -> dict[str, dict[int, Attacked]]:
    """Scores each client's examples under each shadow run by how likely they are members.

    Each statistic of the last exchange that shows it is attacked alone, then those of one kind together by a Gaussian
    of several dimensions, then with those of earlier exchanges and of other kinds: likelihood ratios are multiplied.

    Args:
        shadows: The shadow runs, which know the examples that each was trained on.
        observed: What each of them showed, on one side, by its number; those of a pair follow each other.

    Returns:
        The attacked examples by name of the statistic, then client; the last statistic is of all.
    """
    trained = {client: shadows.trained_on(client, observed) for client in shadows.clients}
    results: dict[str, dict[int, Attacked]] = {}
    total: dict[int, Tensor] = {}
    shown = [(exchange, by_client) for seen in observed.values() for exchange, by_client in seen.items()]
    for kind in COLUMNS:
        sums: dict[int, Tensor] = {}
        showing = {
            exchange
            for exchange, by_client in shown
            if any(kind in statistics for statistics in by_client.values())
        }
        exchanges = sorted(showing, key=_order)
        for exchange in exchanges:
            stacked = {c: _stacked([*observed.values()], exchange, c, kind) for c in shadows.clients}
            phi = {c: values for c, values in stacked.items() if values is not None}
            together = {c: exchangeable_scores(values, trained[c]) for c, values in phi.items()}
            if exchange == exchanges[-1]:
                for column, name in enumerate(COLUMNS[kind]):
                    alone = {
                        c: exchangeable_scores(values[..., column], trained[c]) for c, values in phi.items()
                    }
                    results[f"{kind}: {name}"] = _attacked(shadows, alone, trained)
                if len(COLUMNS[kind]) > 1:
                    results[f"{kind}: together"] = _attacked(shadows, together, trained)
            _add(sums, together)
        if len(exchanges) > 1:
            results[f"{kind}: {len(exchanges)} exchanges"] = _attacked(shadows, sums, trained)
        _add(total, sums)
    if total:
        results["all"] = _attacked(shadows, total, trained)
    return results


def _uploads(run: FinishedRun) -> str:
    """Says what of the clients' messages is attacked."""
    if isinstance(run.federation.plan, Plan):
        return "their noised sum"
    return "their sum" if run.federation.summing is not None else "each client's own"


def _not_read(run: FinishedRun, observed: Mapping[int, dict[Side, Seen]]) -> list[str]:
    """Names the parts of clients' messages that no statistic reads, by exchange: what they reveal stays open."""
    exchanges, client = run.federation.exchanges, run.federation.client
    weights = client.task.state_dict().keys()
    # Kinds of statistics by the name of the exchange, because a later exchange of this name may have sent nothing.
    read: dict[str, set[str]] = {}
    for seen in observed.values():
        for key, by_client in seen["sent"].items():
            round, number = _order(key)
            name = exchanges.of_round(round)[number].name
            read.setdefault(name, set()).update(*by_client.values())
    unread: dict[str, None] = {}
    for exchange in (*exchanges.setup, *exchanges.rounds):
        names, kinds = set(exchange.upload_spec(client)), read.get(exchange.name, set())
        if kinds and kinds <= {"update", "predictor"} and not names.isdisjoint(weights):
            names = names.difference(weights)  # a predictor made of the weights reads no other tensor
        elif kinds:
            continue
        if names:
            unread[f"{exchange.name}: {', '.join(sorted(names))}"] = None
    return list(unread)


def _numbers(report: MembershipReport) -> dict[str, float]:
    """Lists the numbers of a report that stand for it, by name."""
    numbers: dict[str, float] = {}
    for name, estimate in {"auc": report.auc, **report.tpr}.items():
        low_high = {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        numbers |= {name: estimate.value, **low_high, f"{name}_chance": estimate.chance}
    numbers["auc_deviation_over_shadows"] = report.auc_of_models[1]
    for name, (value, chance) in report.fedvck.items():
        numbers |= {name: value, f"{name}_chance": chance}
    return numbers


def _stacked(observed: Sequence[Seen], exchange: str, client: int, kind: str) -> Tensor | None:
    """Joins a client's statistics over shadow runs [J, n, d]; NaN where a run shows none, None where all do."""
    tensors = [entry.get(exchange, {}).get(client, {}).get(kind) for entry in observed]
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    return torch.stack(
        [torch.full_like(present[0], torch.nan) if entry is None else entry for entry in tensors]
    )


def _add(sums: dict[int, Tensor], scores: Mapping[int, Tensor]) -> None:
    """Adds log-likelihood ratios up; a missing one counts as 0, and the sum is missing where all are."""
    for client, ratios in scores.items():
        previous = sums.get(client)
        total = ratios if previous is None else previous.nan_to_num(0.0) + ratios.nan_to_num(0.0)
        missing = ratios.isnan() if previous is None else ratios.isnan() & previous.isnan()
        sums[client] = torch.where(missing, torch.nan, total)


def _attacked(
    shadows: ShadowRuns, scores: Mapping[int, Tensor], trained: Mapping[int, Tensor]
) -> dict[int, Attacked]:
    return {c: Attacked(ratios.clone(), trained[c], shadows.cells_of(c)) for c, ratios in scores.items()}


def _order(exchange: str) -> tuple[int, int]:
    """Orders ``"round.exchange"``, where rounds of set-up are below 1."""
    round, number = exchange.rsplit(".", 1)
    return int(round), int(number)


def _scaled_progress(
    progress: Callable[[int, int], None], number: int, runs: int
) -> Callable[[int, int], None]:
    """Scales the progress of one of several equally long runs to that of all."""
    return lambda done, total: progress(number * total + done, runs * total)

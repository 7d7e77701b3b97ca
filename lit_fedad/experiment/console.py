"""Console output of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lit_fedad.contracts import Client, Exchanges
from lit_fedad.contracts.exchange import disclosed_by
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.sizes import size_in_words
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.privacy.image_privacy import in_words
from lit_fedad.report.closing import constant_predictions
from lit_fedad.report.console import Display
from lit_fedad.report.naming import method_title

# Metrics in the line of a round, which has room for three; the others are in the final table.
_LINE_METRICS = (
    *("i_auroc", "p_auroc", "pro", "accuracy", "own_accuracy", "auroc", "aupr"),
    *("selection_accuracy", "global_accuracy", "local_accuracy"),
)


def _show_nothing(done: int, total: int) -> None: ...


class Progress(FederationCallback):
    """A callback that shows the number of finished visits to clients, between `start` and `stop`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._show: Callable[[int, int], None] = _show_nothing

    def start(self, display: Display, title: str) -> None:
        """Starts to show progress."""
        self._show = self._open.enter_context(display.progress(title))

    def stop(self) -> None:
        """Stops showing progress."""
        self._open.close()
        self._show = _show_nothing

    def on_client_end(self, done: int, total: int) -> None:
        """Shows the progress of this process."""
        self._show(done, total)


class Console(Progress, RunCallback):
    """A callback that prints a description of the run, one line per round, and warnings."""

    def __init__(self) -> None:
        super().__init__()
        self._durations: list[float] = []
        self._later_lines: Callable[[], list[str]] = list  # lines added to a report after its round

    def on_run_start(self, run: Run) -> None:
        """Prints a description of the run and where it continues, and starts to show progress."""
        run.display.header(describe(run))
        latest = run.federation.checkpoints.latest_round()
        if latest is not None and latest < run.federation.rounds:
            run.display.note(f"continues after {f'round {latest}' if latest > 0 else 'the set-up'}")
        self._display, self._last = run.display, time.perf_counter()
        self.start(run.display, "Clients trained or scored")

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Prints the round's line and its warnings."""
        now = time.perf_counter()
        if report.round > 0:
            self._durations.append(now - self._last)
        self._last = now
        rounds_left = federation.rounds - max(report.round, 0)
        self._display.round_line(
            round=report.round,
            rounds=federation.rounds,
            loss=report.scalars.get("loss"),
            metrics={name: v["mean"] for name, v in (report.metrics or {}).items() if name in _LINE_METRICS},
            bytes_up=sum(report.bytes_up.values()),
            bytes_down=sum(report.bytes_down.values()),
            seconds=report.seconds,
            eta_s=rounds_left * statistics.mean(self._durations) if self._durations else None,
            name=report.exchange,
        )
        lines = report.lines(federation.names)
        for line in lines:
            # People read the names of set-up exchanges; files hold their round numbers, which are at most 0.
            setup = f"round {report.round}: "
            named = line.replace(setup, f"set-up {report.exchange}: ", 1) if report.round <= 0 else line
            self._display.warn(named)
        self._later_lines = lambda: report.lines(federation.names)[len(lines) :]
        if constant := constant_predictions(report.metrics or {}, federation.names):
            self._display.warn(f"round {report.round}: {constant}")

    def on_rounds_end(self, run: Run) -> None:
        """Stops showing progress, and warns of personal models that never trained."""
        self.stop()
        if warning := never_trained(run.federation):
            self._display.warn(warning)

    def on_run_end(self, run: Run, result: dict[str, Any]) -> None:
        """Prints warnings from after the last round, such as those of decisions, and the privacy budget spent."""
        for line in self._later_lines():
            self._display.warn(line)
        if (spent := result.get("differential_privacy")) is not None:
            self._display.note(f"spent: {in_words(spent)}")

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Stops showing progress."""
        self.stop()


def never_trained(federation: Federation) -> str:
    """Returns a warning that names clients that predict with personal weights but never trained; empty if none do."""
    client = federation.client
    training = [exchange for exchange in federation.exchanges.rounds if exchange.trains]
    trained = {number for report in federation.history if report.round > 0 for number in report.participants}
    untrained = [federation.names.title(number) for number in federation.clients if number not in trained]
    if not (training and trained and untrained and client.predictors.own):
        return ""
    received = {name for exchange in training for name in exchange.broadcast_spec(client)}
    personal = {*learned_state(client.task)} - received - {*client.task.local_buffers}
    if not personal and not client.own_model:
        return ""
    return (
        f"{', '.join(untrained)} trained in no round: weights that are personal are as they began there; give"
        " more rounds, or a larger federation.sampler.fraction"
    )


def describe(run: Run) -> dict[str, str]:
    """Describes a run in short lines, by subject."""
    config, backbone = run.config, run.model.provenance
    plan = run.federation.plan
    private = {} if plan is None else {"privacy": in_words(plan.summary(plan.releases))}
    return {
        "method": method_title(config["method"]),
        **({"settings": config["method"]["under"]} if config["method"].get("under") else {}),
        **run.data.lines(),
        "images": size_in_words(config),
        "backbone": f"{backbone['name']}, weights {backbone['taken']}",
        "rounds": f"{config['rounds']} (seed {config['seed']})",
        **private,
        "files": str(run.folder.path),
        **sent_in_words(run.federation.exchanges, run.model.client),
    }


def sent_in_words(exchanges: Exchanges, client: Client) -> dict[str, str]:
    """Describes what clients send in each exchange before round 1, and in every round."""
    sent = {f"set-up {one.name}": disclosed_by(one, client) for one in exchanges.setup}
    sent["each round"] = tuple(part for one in exchanges.rounds for part in disclosed_by(one, client))
    described = {title: "; ".join(part.what for part in disclosed) for title, disclosed in sent.items()}
    return {title: f"clients send {words}" for title, words in described.items() if words}

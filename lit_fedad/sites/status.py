"""The operator's view of a federation of sites: which sites take part, what they send, and what went wrong."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.files import atomic, stored_text
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_files import plain, there
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.naming import human_bytes, human_seconds


@dataclass
class Contact:
    """When and how fast one site has answered, including answers before the coordinator was restarted.

    Attributes:
        last_seen: Time of its last answer in seconds since 1970; None before the first.
        seconds: Time from request to answer, summed over all answers.
    """

    last_seen: float | None = None
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """Adds an answer that has come just now, so many seconds after its request."""
        self.last_seen = time.time()
        self.seconds += seconds


STATUS = "status.json"


class Status(RunCallback):
    """A callback that writes ``status.json`` to a run's folder after every round, and adds it to the run's result.

    Args:
        names: Names of the sites, by client.
        contacts: When the sites have answered, by client.

    Attributes:
        absent: Why sites take no part, by client.
    """

    _folder: Path

    def __init__(self, names: Mapping[int, str], contacts: Mapping[int, Contact]) -> None:
        self.names, self.contacts = names, contacts
        self.absent: Mapping[int, str] = {}

    def on_run_start(self, run: Run) -> None:
        """Takes note of the run's folder."""
        self._folder = run.folder.path

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Writes the status after a round."""
        self._write(federation, self.sites(federation.history, {}))

    def on_rounds_end(self, run: Run) -> None:
        """Writes the status after the last round, with the rates of false alarms."""
        run.extras["status"] = self.sites(run.federation.history, run.rates)
        self._write(run.federation, run.extras["status"])

    def sites(self, history: Sequence[RoundReport], rates: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Describes all sites by name.

        Args:
            history: The reports of all rounds so far.
            rates: Rates of decisions (`summarise_rates`); empty before they are judged.
        """
        alarms = rates.get("false_alarm_rate", {}).get("per_client", {})
        sites = {}
        for client, name in self.names.items():
            contact = self.contacts[client]
            seen = {"last_seen": contact.last_seen, "seconds": contact.seconds}
            sites[name] = {**_site(client, history), **seen, "false_alarm_rate": alarms.get(client)}
            if client in self.absent:
                sites[name]["troubles"].append(f"takes no part: {self.absent[client]}")
        return sites

    def _write(self, federation: Federation, sites: Mapping[str, Any]) -> None:
        content = {
            "round": federation.history[-1].round,
            "rounds": federation.rounds,
            "written": time.time(),
            "sites": sites,
        }
        # A round is complete without its status. If the disk is full, the next checkpoint ends the run in one line.
        with contextlib.suppress(OSError), atomic(self._folder / STATUS, durable=True) as partial:
            partial.write_text(json.dumps(plain(content), indent=1))


def read_status(folder: Path) -> dict[str, Any]:
    """Reads the file that `Status` wrote to a run's folder.

    Raises:
        UserError: If there is no such file, or it cannot be read.
    """
    advice = "the next round writes it anew"
    if not there(folder / STATUS):
        raise UserError(f"{folder / STATUS}: no round is complete yet")
    try:
        content: dict[str, Any] = json.loads(stored_text(folder / STATUS))  # older files hold NaN
        rows = status_rows(content["sites"])
        lists = all(isinstance(site["troubles"], list) for site in content["sites"].values())
        if not rows or not lists or not {"round", "rounds"} <= set(content):
            raise ValueError("it is no status of sites")
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{folder / STATUS}: cannot be read ({first_line(error)}); {advice}") from error
    return content


def status_rows(sites: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Turns the description of sites (`Status.sites`) into rows of a table, as texts by heading."""

    def cell(value: Any, write: Callable[[Any], str] = str) -> str:
        return "-" if value is None or value != value else write(value)  # a rate over no images is NaN

    def clock(seconds: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

    return [
        {
            "site": name,
            "last seen": cell(site.get("last_seen"), clock),
            "rounds": str(site["rounds"]),
            "last round": cell(site["last_round"]),
            "up": human_bytes(site["bytes_up"]),
            "down": human_bytes(site["bytes_down"]),
            "time": human_seconds(site.get("seconds", 0.0)),
            "false alarms": cell(site["false_alarm_rate"], "{:.3f}".format),
            "troubles": str(len(site["troubles"])),
        }
        for name, site in sites.items()
    ]


def _site(client: int, history: Sequence[RoundReport]) -> dict[str, Any]:
    """Describes one site by the reports; set-up exchanges do not count as rounds, and troubles give their names."""
    rounds = [report.round for report in history if report.round > 0 and client in report.participants]
    troubles = [
        f"{f'round {report.round}' if report.round > 0 else f'set-up {report.exchange}'}: {causes[client]}"
        for report in history
        for causes in (report.failures, report.refused, report.unscored)
        if client in causes
    ]
    return {
        "rounds": len(rounds),
        "last_round": rounds[-1] if rounds else None,
        "bytes_up": sum(report.bytes_up.get(client, 0) for report in history),
        "bytes_down": sum(report.bytes_down.get(client, 0) for report in history),
        "troubles": list(dict.fromkeys(troubles)),  # a site that fails is unscored for the same cause
    }


def flat_status(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Flattens the description of sites (`Status.sites`) into numbers for the tracker.

    Example:
        >>> flat_status({"north": {"rounds": 2, "last_seen": None, "troubles": ["round 1: late"]}})
        {'site/north/rounds': 2.0, 'site/north/troubles': 1.0}
    """
    flat: dict[str, float] = {}
    for name, site in sites.items():
        counted = {**site, "troubles": len(site["troubles"])}
        flat |= {f"site/{name}/{key}": float(value) for key, value in counted.items() if value is not None}
    return flat

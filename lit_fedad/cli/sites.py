"""The command ``site``: a site, which answers a federation's coordinator as far as its operator's policy allows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.options import section_of
from lit_fedad.core.typed_words import needs_no_quotes
from lit_fedad.report.console import Display


def renew(site: str, sums: bool = False) -> None:
    """Makes a new key, in place.

    Args:
        site: The site's folder.
        sums: Whether the keys for secure sums are renewed, instead of the one that the coordinator knows.
    """
    from lit_fedad.flower.site_folder import SiteFolder

    folder = SiteFolder.open(Path(site))
    new_key = folder.renew(sums)
    rows = [("fingerprint", new_key), ("send", f"{folder.path / 'key.pub'} to the coordinator's operator")]
    if sums:
        rows = [("line", new_key), ("send", f"{folder.path / 'sum.pub'} to the other sites' operators")]
        rows += [("change", f"{folder.path / 'key_registry'}, and those of all other sites, to this line")]
    Display().where_next(rows)


def init(
    out: str,
    name: str,
    address: str,
    ca: str,
    overrides: Sequence[str],
    apart: bool = False,
    epsilon: float | None = None,
    stages: tuple[str, ...] = (),
) -> None:
    """Makes the folder of a real site: its settings and its key.

    Args:
        out: The new folder.
        name: Name of the site.
        address: The coordinator's host and port.
        ca: The coordinator's ``ca.crt``.
        overrides: Overrides of the sections that a site sets.
        apart: Whether its products are its own, even where another site's have the same name.
        epsilon: Largest budget of differential privacy of all runs that it takes part in, whose sites draw the noise.
        stages: Products of each stage in which images come, joined by ``+``; none: all are there from the start.

    Raises:
        UserError: If an override is of another section.
    """
    from lit_fedad.flower.site_folder import SiteFolder

    words = [_with_absolute_folder(word) for word in overrides]
    folder, fingerprint = SiteFolder.create(
        Path(out),
        Path(ca),
        name=name,
        address=address,
        data=[word for word in words if section_of(word) == "data"],
        own=[word for word in words if section_of(word) != "data"],
        apart=apart,
        epsilon=epsilon,
        stages=list(stages),
    )
    Display().where_next(
        [
            ("settings", str(folder.path / "site.yaml")),
            ("send", f"{folder.path / 'key.pub'} to the coordinator's operator"),
            ("tell by telephone", f"{fingerprint}, the fingerprint of this key"),
            ("what it would send", f"lit-fedad site review site={out} offer=offer.json"),
            ("then", f"lit-fedad site start site={out}"),
        ]
    )


def _with_absolute_folder(word: str) -> str:
    """Makes a relative folder in an override absolute, since the site's process may be started in another folder."""
    key, _, value = word.partition("=")
    if key not in ("data.root", "cache.folder") or needs_no_quotes(value):
        return word
    return f"{key}={Path(value).expanduser().absolute()}"


def review(site: str, offer: str | None = None) -> None:
    """Prints what the offered federation would take of the site, exchange by exchange.

    Args:
        site: The site's folder.
        offer: The coordinator's ``offer.json``; none: the federation that the site has refused last.
    """
    from lit_fedad.flower.site_folder import SiteFolder
    from lit_fedad.sites.review import review as reviewed

    folder, display = SiteFolder.open(Path(site)), Display()
    federation = reviewed(folder.settings, folder.offer(offer))
    for line in federation.lines:
        display.note(line)
    same = f" offer={offer}" if offer else ""
    display.where_next([("approve", f"lit-fedad site approve site={site} hash={federation.digest}{same}")])


def approve(site: str, hash: str, offer: str | None = None) -> None:
    """Lets the offered federation take what its review shows, and nothing else.

    Args:
        site: The site's folder.
        hash: What ``site review`` printed.
        offer: As for ``site review``.
    """
    from lit_fedad.flower.site_folder import SiteFolder
    from lit_fedad.sites.offer import APPROVED, Approvals
    from lit_fedad.sites.review import review as reviewed

    folder = SiteFolder.open(Path(site))
    federation = reviewed(folder.settings, folder.offer(offer))
    if federation.digest != hash:
        raise UserError(
            f"hash={hash}: the federation that is offered has {federation.digest}; review it again"
        )
    federation.check(folder.settings.policy)
    Approvals(folder.path / APPROVED).add(federation.digest, federation.method, federation.taken)
    Display().where_next(
        [("approved", f"{federation.method} ({federation.digest}); others need an approval of their own")]
    )


def log(site: str, last: int = 40) -> None:
    """Prints what the coordinator has asked of a site, and what the site has answered.

    Args:
        site: The site's folder.
        last: Number of entries that are shown.
    """
    from lit_fedad.flower.site_folder import SiteFolder

    display = Display()
    entries = SiteFolder.open(Path(site)).log.entries()
    for line in entries[-last:] if last > 0 else []:
        display.note(_entry(line))
    end = f"; the last is {entries[-1]['hash'][:16]}" if entries else ""
    display.note(f"{len(entries)} entries, each with the hash of the one before{end}")


def _entry(line: Mapping[str, object]) -> str:
    """Writes an entry of a site's log as one line."""
    from lit_fedad.sites.messages import moment_in_words

    outcome = line.get("told") or "nothing of images"
    if line.get("verdict") != "answered":
        outcome = f"REFUSED: {line.get('why')}"
    place = moment_in_words(line.get("round"), line.get("asked"))
    return (
        f"{line.get('entry')}  {line.get('time')}  {line.get('by')}  run {line.get('run', '-')}"
        f"  {place}: {line.get('asked')}, {line.get('bytes_in')} bytes in,"
        f" {line.get('bytes_out')} out: {outcome}"
    )


def clean(site: str, runs: tuple[str, ...] = ()) -> None:
    """Lists or removes the states of old runs.

    Args:
        site: The site's folder.
        runs: Runs whose states are removed, or ``all``; of none they are listed.
    """
    from lit_fedad.flower.site_folder import SiteFolder

    folder, display = SiteFolder.open(Path(site)), Display()
    steps = folder.runs()
    if unknown := set(runs) - {*steps, "all"}:
        names = ", ".join(steps) or "none"
        raise UserError(f"runs={min(unknown)}: the site has no states of it; it has those of {names}")
    for run, step in steps.items():
        if "all" in runs or run in runs:
            folder.clean(run)
            display.note(f"removed the states of run {run}")
        else:
            display.note(f"run {run}: {_state(step)}")


def _state(step: int) -> str:
    return f"state after step {step} (of the coordinator's requests in this run)"


def start(site: str) -> None:
    """Answers the coordinator's requests until the process is ended.

    Args:
        site: The site's folder.
    """
    from lit_fedad.flower import site_folder

    folder = site_folder.SiteFolder.open(Path(site))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # so that the site signs off at the coordinator
    site_folder.start(folder, Display())


def status(site: str) -> None:
    """Prints the site's fingerprint, and the runs that it takes part in.

    Args:
        site: The site's folder.
    """
    from lit_fedad.flower.keys import fingerprint
    from lit_fedad.flower.site_folder import SiteFolder

    folder = SiteFolder.open(Path(site))
    rows = [("site", folder.name), ("coordinator", folder.address)]
    rows += [("fingerprint", fingerprint(folder.path / "key.pub"))]
    rows += [("run", f"{run}, {_state(step)}") for run, step in folder.runs().items()]
    if spent := folder.ledger.spent:
        epsilon, delta = folder.ledger.total
        budget = "" if folder.epsilon is None else f" of {folder.epsilon:g}"
        runs = len({run for run, _ in spent})
        rows += [
            ("spent", f"epsilon {epsilon:.4g}{budget} at delta {delta:g}, in {runs} run{'s' * (runs != 1)}")
        ]
    rows += [("report", str(page)) for page in folder.reports()]
    rows += [("detector", str(detector)) for detector in folder.detectors()]
    Display().where_next(rows)

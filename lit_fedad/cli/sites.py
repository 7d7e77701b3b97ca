"""The command ``site``: a machine that answers a federation's coordinator with what its policy lets out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fedad.cli.federation import dispatch, section_of
from lit_fedad.core.errors import UserError
from lit_fedad.core.options import read, separate
from lit_fedad.report.console import Display


@dataclass(frozen=True)
class SiteInit:
    """Options of ``lit-fedad site init``.

    Attributes:
        out: The new folder.
        name: Name of the site.
        address: The coordinator's host and port.
        ca: The coordinator's ``ca.crt``.
        apart: Whether its products are its own, even where another site's have the same name.
        epsilon: Largest budget of differential privacy of all runs that it takes part in, whose sites draw the noise.
        stages: Products of each stage in which images come, joined by ``+``; none: all are there from the start.
    """

    out: str
    name: str
    address: str
    ca: str
    apart: bool = False
    epsilon: float | None = None
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteOptions:
    """Options of ``lit-fedad site start`` and ``status``.

    Attributes:
        site: The site's folder.
    """

    site: str


@dataclass(frozen=True)
class SiteRenew:
    """Options of ``lit-fedad site renew``.

    Attributes:
        site: The site's folder.
        sums: Whether the keys for secure sums are renewed, instead of the one that the coordinator knows.
    """

    site: str
    sums: bool = False


@dataclass(frozen=True)
class SiteReview:
    """Options of ``lit-fedad site review``.

    Attributes:
        site: The site's folder.
        offer: The coordinator's ``offer.json``; none: the federation that was offered to the site last.
    """

    site: str
    offer: str | None = None


@dataclass(frozen=True)
class SiteApprove:
    """Options of ``lit-fedad site approve``.

    Attributes:
        site: The site's folder.
        hash: What ``site review`` printed.
        offer: As for ``site review``.
    """

    site: str
    hash: str
    offer: str | None = None


@dataclass(frozen=True)
class SiteLog:
    """Options of ``lit-fedad site log``.

    Attributes:
        site: The site's folder.
        last: Number of entries that are shown.
    """

    site: str
    last: int = 40


@dataclass(frozen=True)
class SiteClean:
    """Options of ``lit-fedad site clean``.

    Attributes:
        site: The site's folder.
        runs: Runs whose states are removed, or ``all``; of none they are listed.
    """

    site: str
    runs: tuple[str, ...] = ()


def site(options: Sequence[str]) -> None:
    """Makes, runs or shows a site.

    Args:
        options: ``init``, ``start``, ``status``, ``review``, ``approve``, ``log``, ``clean`` or ``renew``, and
            its options.

    Raises:
        UserError: For bad input, or if the coordinator refuses the site.
    """
    actions = {"init": _init_site, "start": _start_site, "status": _site_status, "review": _review}
    actions |= {"approve": _approve, "log": _log, "clean": _clean, "renew": _renew_site}
    dispatch("site", options, actions)


def _renew_site(options: Sequence[str]) -> None:
    chosen, _ = read(SiteRenew, options, "site renew", overrides=False)
    from lit_fedad.flower.site_folder import SiteFolder

    folder = SiteFolder.open(Path(chosen.site))
    made = folder.renew(chosen.sums)
    rows = [("fingerprint", made), ("send", f"{folder.path / 'key.pub'} to the coordinator's operator")]
    if chosen.sums:
        rows = [("line", made), ("send", f"{folder.path / 'sum.pub'} to the other sites' operators")]
        rows += [("change", f"{folder.path / 'key_registry'}, and those of all other sites, to this line")]
    Display().where_next(rows)


def _init_site(options: Sequence[str]) -> None:
    declared, others = separate(SiteInit, options, "site init")
    chosen, _ = read(SiteInit, declared, "site init")
    from lit_fedad.flower.site_folder import SiteFolder
    from lit_fedad.sites.overrides import OPERATORS

    for word in others:
        if section_of(word) not in ("data", "cache", "fabric") and word.split("=")[0] not in OPERATORS:
            raise UserError(
                f"site init has no key '{word}': a site sets data, cache, fabric, {' and '.join(OPERATORS)}; all else"
                " the coordinator"
            )
    folder, fingerprint = SiteFolder.create(
        Path(chosen.out),
        Path(chosen.ca),
        name=chosen.name,
        address=chosen.address,
        data=[word for word in others if section_of(word) == "data"],
        own=[word for word in others if section_of(word) != "data"],
        apart=chosen.apart,
        epsilon=chosen.epsilon,
        stages=list(chosen.stages),
    )
    Display().where_next(
        [
            ("settings", str(folder.path / "site.yaml")),
            ("send", f"{folder.path / 'key.pub'} to the coordinator's operator; tell it by telephone"),
            ("fingerprint", fingerprint),
            ("what it would send", f"lit-fedad site review site={chosen.out} offer=offer.json"),
            ("then", f"lit-fedad site start site={chosen.out}"),
        ]
    )


def _review(options: Sequence[str]) -> None:
    chosen, _ = read(SiteReview, options, "site review", overrides=False)
    from lit_fedad.flower.site_folder import SiteFolder
    from lit_fedad.sites.review import review

    folder, display = SiteFolder.open(Path(chosen.site)), Display()
    found = review(folder.settings, folder.offer(chosen.offer))
    for line in found.lines:
        display.note(line)
    offer = f" offer={chosen.offer}" if chosen.offer else ""
    display.where_next([("approve", f"lit-fedad site approve site={chosen.site} hash={found.digest}{offer}")])


def _approve(options: Sequence[str]) -> None:
    chosen, _ = read(SiteApprove, options, "site approve", overrides=False)
    from lit_fedad.flower.site_folder import SiteFolder
    from lit_fedad.sites.offer import APPROVED, Approvals
    from lit_fedad.sites.review import review

    folder = SiteFolder.open(Path(chosen.site))
    found = review(folder.settings, folder.offer(chosen.offer))
    if found.digest != chosen.hash:
        raise UserError(
            f"hash={chosen.hash}: the federation that is offered has {found.digest}; review it again"
        )
    found.check(folder.settings.policy)
    Approvals(folder.path / APPROVED).add(found.digest, found.method, found.taken)
    Display().where_next(
        [("approved", f"{found.method} ({found.digest}); others need an approval of their own")]
    )


def _log(options: Sequence[str]) -> None:
    chosen, _ = read(SiteLog, options, "site log", overrides=False)
    from lit_fedad.flower.site_folder import SiteFolder

    display = Display()
    entries = SiteFolder.open(Path(chosen.site)).log.entries()
    for line in entries[-chosen.last :] if chosen.last > 0 else []:
        display.note(_entry(line))
    end = f"; the last is {entries[-1]['hash'][:16]}" if entries else ""
    display.note(f"{len(entries)} entries, each with the hash of the one before{end}")


def _entry(line: Mapping[str, object]) -> str:
    """Writes an entry of a site's log as one line."""
    said = line.get("told") or "nothing of images"
    if line.get("verdict") != "answered":
        said = f"REFUSED: {line.get('why')}"
    return (
        f"{line.get('entry')}  {line.get('time')}  {line.get('by')}  run {line.get('run', '-')}"
        f"  round {line.get('round', '-')}: {line.get('asked')}, {line.get('bytes_in')} bytes in,"
        f" {line.get('bytes_out')} out: {said}"
    )


def _clean(options: Sequence[str]) -> None:
    chosen, _ = read(SiteClean, options, "site clean", overrides=False)
    from lit_fedad.flower.site_folder import SiteFolder

    folder, display = SiteFolder.open(Path(chosen.site)), Display()
    known = folder.runs()
    if unknown := set(chosen.runs) - {*known, "all"}:
        names = ", ".join(known) or "none"
        raise UserError(f"runs={min(unknown)}: the site has no states of it; it has those of {names}")
    for run, step in known.items():
        if "all" in chosen.runs or run in chosen.runs:
            folder.clean(run)
            display.note(f"removed the states of run {run}")
        else:
            display.note(f"run {run}: state after step {step}")


def _start_site(options: Sequence[str]) -> None:
    chosen, _ = read(SiteOptions, options, "site start", overrides=False)
    from lit_fedad.flower import site_folder

    folder = site_folder.SiteFolder.open(Path(chosen.site))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the coordinator hears of a clean stop
    site_folder.start(folder, Display())


def _site_status(options: Sequence[str]) -> None:
    chosen, _ = read(SiteOptions, options, "site status", overrides=False)
    from lit_fedad.flower.keys import fingerprint
    from lit_fedad.flower.site_folder import SiteFolder

    folder = SiteFolder.open(Path(chosen.site))
    rows = [("site", folder.name), ("coordinator", folder.address)]
    rows += [("fingerprint", fingerprint(folder.path / "key.pub"))]
    rows += [("run", f"{run}, state after step {step}") for run, step in folder.runs().items()]
    if spent := folder.ledger.spent:
        epsilon, delta = folder.ledger.total
        most = "" if folder.epsilon is None else f" of {folder.epsilon:g}"
        runs = len({run for run, _ in spent})
        rows += [("spent", f"epsilon {epsilon:.4g}{most} at delta {delta:g}, in {runs} runs")]
    rows += [("report", str(page)) for page in folder.reports()]
    rows += [("detector", str(own)) for own in folder.detectors()]
    Display().where_next(rows)

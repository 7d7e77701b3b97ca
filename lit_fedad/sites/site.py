"""A site: a process that holds its own images, and answers a coordinator's requests as far as its policy allows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.federation.chained_log import ChainedLog
from lit_fedad.federation.local_transport import cause_of
from lit_fedad.privacy.ledger import BudgetError
from lit_fedad.report.console import Display
from lit_fedad.sites.messages import LONGEST_START, Reply, Request, when
from lit_fedad.sites.offer import APPROVED, OFFERED, Offer
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.session import Session
from lit_fedad.sites.settings import SiteSettings

AUDIT = "log.jsonl"
"""File of a site's audit trail, in its folder."""

_TO_REVIEW = (Code.NOT_ALLOWED, Code.NOT_APPROVED, Code.FLOOR, Code.CEILING, Code.FEW)
"""Refusals that an approval or the policy ends: ``site review`` shows what was offered."""


class Site:
    """One site.

    It keeps the model of the run that it last took part in: building it takes longer than most requests.
    """

    def __init__(self, settings: SiteSettings, display: Display) -> None:
        self.settings, self.display = settings, display
        self.log, self.approvals = ChainedLog(settings.folder / AUDIT), ChainedLog(settings.folder / APPROVED)
        self._session: tuple[tuple[object, ...], Session] | None = None

    def tidy(self) -> None:
        """Removes what a killed process of this site left of files that it was writing; no other may be at work."""
        for pattern in (f".{OFFERED}.*.partial", "reports/*/.*.partial", "states/*/.*.partial"):
            for left in self.settings.folder.glob(pattern):
                with suppress(OSError):
                    left.unlink()

    @property
    def largest(self) -> int:
        """Most bytes of a request: of the run that the site is in, or else as the policy says."""
        most = self.settings.policy.megabytes << 20
        return most if self._session is None else min(most, LONGEST_START + self._session[1].largest)

    def answer(self, blob: bytes) -> bytes:
        """Carries out a request; why it fails is a code, and nothing leaves before the site's log says so.

        Args:
            blob: A request; not trusted.
        """
        began = time.monotonic()
        request: Request | None = None
        told, why = "", ""
        try:
            request = Request.from_bytes(blob)
            reply, told = self._take(request).answer(request)
        except Exception as error:
            why, reply = cause_of(error), self._refused(error, request)
        reply = replace(reply, step=request.step if request else 0)
        answer, seconds = reply.to_bytes(), time.monotonic() - began
        asked: Mapping[str, Any] = {"asked": "bytes that are no request"}
        if request is not None:
            what = request.question or request.kind
            asked = {
                "run": request.run, "round": request.round, "exchange": request.exchange, "asked": what,
            }  # fmt: skip
        try:
            line = self.log.append(
                by=self.settings.coordinator,
                **asked,
                bytes_in=len(blob),
                verdict="refused" if reply.code else "answered",
                code=int(reply.code),
                told=told,
                bytes_out=len(answer),
                answer=hashlib.sha256(answer).hexdigest()[:16],
                seconds=round(seconds, 3),
                why=why,
            )
        except UserError as error:
            self.display.warn(str(error))
            return Reply(step=reply.step, code=Code.LOG).to_bytes()
        place = "" if request is None else f"{when(request.round, asked['asked'])}: "
        head = f"{line['time']} entry {line['entry']}: {place}{asked['asked']}"
        if reply.code:
            self.display.warn(f"{head}, refused: {why}")
        else:
            self.display.note(
                f"{head}, {len(blob)} bytes in, {len(answer)} bytes out ({told or 'nothing of images'}),"
                f" {seconds:.1f} s"
            )
        return answer

    def _take(self, request: Request) -> Session:
        """Returns the session of a request's run, with the products that it names; one that refuses is not kept."""
        approvals = len(self.approvals.entries())
        key = (request.run, tuple(request.overrides), request.client, tuple(request.classes), approvals)
        before, self._session = self._session, None
        if before is None or before[0] != key:
            before = None  # its memory is free before the next model is built
            before = key, Session(request, self.settings, self.display)
        before[1].settle(request.products)
        self._session = before
        return before[1]

    def _refused(self, error: Exception, request: Request | None) -> Reply:
        """Returns the code of an error; what the operator has to decide about is kept for ``site review``."""
        if request is None:
            return Reply(code=Code.REQUEST)
        if isinstance(error, BudgetError):
            return Reply(code=Code.BUDGET, numbers=[error.left, error.asked])
        if not isinstance(error, RefusalError):
            numbers = [1.0]
            with suppress(UserError):  # as it is written to, that is told
                numbers = [float(len(self.log.entries()) + 1)]
            return Reply(code=Code.FAILED, numbers=numbers)
        if error.code in _TO_REVIEW:
            try:
                Offer(request.overrides, request.classes).write(self.settings.folder / OFFERED)
            except OSError as failure:
                self.display.warn(f"{self.settings.folder / OFFERED}: cannot be written ({failure.strerror})")
        return Reply(code=error.code, numbers=list(map(float, error.numbers)))

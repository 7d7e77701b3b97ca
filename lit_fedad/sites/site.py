"""A site: a process that holds its own images, and answers a coordinator's requests as far as its policy allows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import disk_full_in_one_line
from lit_fedad.federation.chained_log import ChainedLog
from lit_fedad.federation.local_transport import cause_of
from lit_fedad.privacy.ledger import LEDGER, BudgetError
from lit_fedad.report.console import Display
from lit_fedad.sites.claims import CLAIMS
from lit_fedad.sites.messages import LONGEST_START, Reply, Request, moment_in_words
from lit_fedad.sites.offer import APPROVED, OFFERED, Offer
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.session import Session
from lit_fedad.sites.settings import SiteSettings

AUDIT = "log.jsonl"
"""File of a site's audit trail, in its folder."""

_TO_REVIEW = (Code.NOT_ALLOWED, Code.NOT_APPROVED, Code.FLOOR, Code.CEILING, Code.FEW)
"""Refusals that the operator can end by an approval or in the policy: ``site review`` then shows the refused offer."""


class Site:
    """One site, which answers a coordinator's requests.

    It keeps the session of the last run in memory: building its model takes longer than most requests.

    Args:
        settings: The settings of the site's operator.
        display: Shows the operator each request, and what is wrong.
    """

    def __init__(self, settings: SiteSettings, display: Display) -> None:
        self.settings, self.display = settings, display
        self.log, self.approvals = ChainedLog(settings.folder / AUDIT), ChainedLog(settings.folder / APPROVED)
        self.claims, self.ledger = ChainedLog(settings.folder / CLAIMS), ChainedLog(settings.folder / LEDGER)
        self._session: tuple[tuple[object, ...], Session] | None = None  # with the key of `_session_of`

    def tidy(self) -> None:
        """Removes half-written files that a killed process of this site left; no other process may be running."""
        for pattern in (f".{OFFERED}.*.partial", "reports/*/.*.partial", "states/*/.*.partial"):
            for partial in self.settings.folder.glob(pattern):
                with suppress(OSError):
                    partial.unlink()

    @property
    def largest(self) -> int:
        """Most bytes of a request: what the policy allows, or less if the current run's messages are shorter."""
        allowed = self.settings.policy.megabytes << 20
        return allowed if self._session is None else min(allowed, LONGEST_START + self._session[1].largest)

    def answer(self, blob: bytes) -> bytes:
        """Carries out a request.

        If it fails, the reply gives the cause as a code alone. The site's log has a line about each reply before the
        reply leaves.

        Args:
            blob: A request in bytes; not trusted.

        Returns:
            The reply in bytes.
        """
        began = time.monotonic()
        request: Request | None = None
        disclosed, cause = "", ""
        try:
            request = Request.from_bytes(blob)
            with disk_full_in_one_line(self.settings.folder):
                reply, disclosed = self._session_of(request).answer(request)
        except Exception as error:
            cause, reply = cause_of(error), self._refused(error, request)
        reply = replace(reply, step=request.step if request else 0)
        answer, seconds = reply.to_bytes(), time.monotonic() - began
        fields: Mapping[str, Any] = {"asked": "bytes that are no request"}
        if request is not None:
            kind = request.question or request.kind
            fields = {
                "run": request.run, "round": request.round, "exchange": request.exchange, "asked": kind,
            }  # fmt: skip
        try:
            line = self.log.append(
                by=self.settings.coordinator,
                **fields,
                bytes_in=len(blob),
                verdict="refused" if reply.code else "answered",
                code=int(reply.code),
                told=disclosed,
                bytes_out=len(answer),
                answer=hashlib.sha256(answer).hexdigest()[:16],
                seconds=round(seconds, 3),
                why=cause,
                **self._lengths(),
            )
        except UserError as error:
            self.display.warn(str(error))
            return Reply(step=reply.step, code=Code.LOG).to_bytes()
        place = "" if request is None else f"{moment_in_words(request.round, fields['asked'])}: "
        head = f"{line['time']} entry {line['entry']}: {place}{fields['asked']}"
        if reply.code:
            self.display.warn(f"{head}, refused: {cause}")
        else:
            self.display.note(
                f"{head}, {len(blob)} bytes in, {len(answer)} bytes out ({disclosed or 'nothing of images'}),"
                f" {seconds:.1f} s"
            )
        return answer

    def _session_of(self, request: Request) -> Session:
        """Returns the session of a request's run, with the products that the request names.

        A session that refuses the products is not kept.
        """
        self._check_whole()
        approvals = len(self.approvals.entries())
        key = (request.run, tuple(request.overrides), request.client, tuple(request.classes), approvals)
        keyed, self._session = self._session, None
        if keyed is None or keyed[0] != key:
            keyed = None  # frees the memory of the old model before the new one is built
            keyed = key, Session(request, self.settings, self.display)
        keyed[1].settle(request.products)
        self._session = keyed
        return keyed[1]

    def _lengths(self) -> dict[str, int]:
        """Returns how many lines claims and ledger have, or have had: the log holds it with each reply."""
        if self._session is not None:
            self.claims = self._session[1].claims.log  # which has read the file already
        last = (self.log.entries() or [{}])[-1]
        logs = {"claims": self.claims, "ledger": self.ledger}
        lengths = {name: int(last.get(name, 0)) for name in logs}
        for name, log in logs.items():
            with suppress(UserError):  # damaged: the site has refused for this cause
                lengths[name] = max(lengths[name], len(log.entries()))
        return lengths

    def _check_whole(self) -> None:
        """Refuses claims and a ledger that have lost lines: what they held would be told, or spent, again.

        Raises:
            UserError: If a file has fewer lines than the log says.
        """
        lengths = self._lengths()
        for name, log in (("claims", self.claims), ("ledger", self.ledger)):
            if (found := len(log.entries())) < lengths[name]:
                raise UserError(
                    f"{log.file}: has {found} lines of {lengths[name]} that were written; restore it from a copy"
                )

    def _refused(self, error: Exception, request: Request | None) -> Reply:
        """Returns the reply with an error's code; keeps the offer for ``site review`` if the operator can decide it."""
        if request is None:
            return Reply(code=Code.REQUEST)
        if isinstance(error, BudgetError):
            return Reply(code=Code.BUDGET, numbers=[error.left, error.asked])
        if not isinstance(error, RefusalError):
            numbers = [1.0]
            with suppress(UserError):  # `answer` reports a damaged log when it writes to it
                numbers = [float(len(self.log.entries()) + 1)]
            return Reply(code=Code.FAILED, numbers=numbers)
        if error.code in _TO_REVIEW:
            try:
                Offer(request.overrides, request.classes).write(self.settings.folder / OFFERED)
            except OSError as failure:
                self.display.warn(f"{self.settings.folder / OFFERED}: cannot be written ({failure.strerror})")
        return Reply(code=error.code, numbers=list(map(float, error.numbers)))

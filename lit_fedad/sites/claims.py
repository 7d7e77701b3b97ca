"""What a site has answered over all runs: under which configuration, and in which sums."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from lit_fedad.federation.chained_log import ChainedLog
from lit_fedad.sites.refusals import Code, RefusalError

CLAIMS = "runs.jsonl"
"""File of a site's claims, in its folder."""


MOST_MESSAGES = 3
"""Most messages that a site answers in one place of a run: a coordinator that was killed may send another one."""


class Claims:
    """The runs that a site has answered in, and the secure sums that its parts were given to.

    The difference of two sums over the same images is what the sites send that are in one of them alone. So sums
    without noise go to one set of sites, over all runs; a run may lose sites from one round to the next.

    Args:
        file: The file, which only grows.
    """

    def __init__(self, file: Path) -> None:
        self.log = ChainedLog(file)

    def check_run(self, run: str, configuration: str) -> None:
        """Refuses a run that is known under another configuration.

        Raises:
            RefusalError: If it is.
        """
        for line in self.log.entries():
            if line.get("run") == run and line.get("configuration", configuration) != configuration:
                raise RefusalError(Code.REUSED)

    def begin(
        self,
        run: str,
        configuration: str,
        images: str,
        noised: bool,
        most: int,
        training: Collection[int] = (),
        least: int = 1,
    ) -> None:
        """Notes a run before its first answer.

        Runs that hold other images out for calibration sum others: two such sums differ by at least so many images, or
        by none.

        Args:
            run: Number of the run.
            configuration: Hash of its configuration.
            images: Hash of the site's images.
            noised: Whether the site draws noise.
            most: Most runs without noise.
            training: Indices of the images that it trains with.
            least: Fewest images behind a sum.

        Raises:
            RefusalError: If it is known under another configuration, there were so many, or the difference to an
                earlier run's sums would be of too few images.
        """
        self.check_run(run, configuration)
        begun = [line for line in self.log.entries() if "configuration" in line]
        if any(line.get("run") == run for line in begun):
            return
        plain = sum(not line.get("noised") for line in begun)
        if not noised and plain >= most:
            raise RefusalError(Code.RUNS, plain)
        own = sum(1 << index for index in set(training))
        for line in begun:
            if noised or line.get("noised") or line.get("images") != images or "training" not in line:
                continue
            before = int(line["training"], 16)
            apart = [found for found in ((own & ~before).bit_count(), (before & ~own).bit_count()) if found]
            if apart and min(apart) < least:
                raise RefusalError(Code.SUBSET, min(apart), least)
        self.log.append(
            run=run, configuration=configuration, images=images, noised=noised, training=f"{own:x}"
        )

    def answer(self, run: str, place: tuple[int, int, str], message: str) -> None:
        """Notes what is asked before it is answered: each answer to something else tells more of the images.

        Args:
            run: Number of the run.
            place: Round, index of the exchange, and what is asked.
            message: Hash of the message and of all else that the answer follows from.

        Raises:
            RefusalError: If so many others were answered in its place.
        """
        lines = [
            line for line in self.log.entries() if (line.get("run"), line.get("asked")) == (run, [*place])
        ]
        found = {line.get("message") for line in lines}
        if message in found:
            return
        if len(found) >= MOST_MESSAGES:
            raise RefusalError(Code.REPEATED, place[0], len(found))
        self.log.append(run=run, asked=[*place], message=message)

    def fix(self, run: str, sites: Sequence[str]) -> None:
        """Notes the sites that a run of secure sums has, in the order of their numbers: it keeps them.

        Raises:
            RefusalError: If it had others.
        """
        for line in self.log.entries():
            if line.get("run") == run and "members" in line:
                if line["members"] != list(sites):
                    raise RefusalError(Code.NAMES)
                return
        self.log.append(run=run, members=list(sites))

    def claim(
        self, run: str, images: str, place: tuple[int, int, str], sites: Sequence[str], noised: bool = False
    ) -> None:
        """Notes the sites that a part is summed with.

        Args:
            run: Number of the run.
            images: Hash of the site's images.
            place: Round, index and name of the exchange.
            sites: Names of the sites in the sum.
            noised: Whether the sum holds noise that the sites draw: then other runs may have other sites.

        Raises:
            RefusalError: If the part, or that of another run, was given to a sum of other sites.
        """
        value, names = list(place), sorted(sites)
        earlier = [line for line in self.log.entries() if "sites" in line and line.get("images") == images]
        own = [line for line in earlier if line["run"] == run and line["place"] == value]
        others = [line for line in earlier if line["run"] != run and not line.get("noised")]
        differs = any(line["sites"] != names for line in own)
        if not noised:
            first = others[0]["sites"] if others else names
            same = [line for line in others if line["place"][0] == place[0] and line["place"][2] == place[2]]
            differs = differs or names != first or any(line["sites"] != names for line in same)
        if differs:
            raise RefusalError(Code.CLAIMED, place[0])
        if not own:
            self.log.append(run=run, images=images, place=value, sites=names, noised=noised)

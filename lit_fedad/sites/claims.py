"""What a site has answered over all runs: under which configuration, and in which sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

from lit_fedad.federation.chained_log import ChainedLog
from lit_fedad.sites.refusals import Code, RefusalError

CLAIMS = "runs.jsonl"
"""File of a site's claims, in its folder."""


MOST_MESSAGES = 3
"""Most messages that a site answers in one place of a run: a coordinator that was killed may send another one."""


@dataclass(frozen=True)
class TrainingImages:
    """The images that a run trains with.

    Attributes:
        images: Hashes of the contents of images that are summed together, by stage and, where sums are of each
            product's, by product. A copy of an image is listed again: sums count it twice.
        groups: Hash of what decides which of them a mean image is of; empty where none leaves the site.
    """

    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: str = ""

    def fewest_apart(self, before: Sequence[Mapping[str, Sequence[str]]], least: int) -> int:
        """Returns of how few images sums over these and over earlier runs' tell, if of fewer than `least`; else that.

        Whatever sums are added and subtracted, images that all sums count in the same ratio stay together. So sums
        tell of each set of such images, and of none smaller. A set that is summed by itself is told by that already.
        """
        sums = [Counter(images) for run in (*before, self.images) for images in run.values()]
        together = defaultdict[tuple[int, ...], dict[str, int]](dict)
        for image in set[str]().union(*sums):
            counts = [counted[image] for counted in sums]
            times = gcd(*counts)
            together[tuple(count // times for count in counts)][image] = times
        return min([least, *(len(images) for images in together.values() if images not in sums)])


class Claims:
    """The runs that a site has answered in, and the secure sums that its parts were given to.

    The difference of two sums over the same images is what the sites send that are in one of them alone. So sums
    without noise go to one set of sites, over all runs; a run may lose sites from one round to the next. Images are
    known by their content, whatever they are called and wherever they lie.

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
        noised: bool,
        most: int,
        training: TrainingImages = TrainingImages(),
        least: int = 1,
    ) -> None:
        """Notes a run before its first answer.

        Runs with other images sum others, and mean images of other groups can be solved for single ones.

        Args:
            run: Number of the run.
            configuration: Hash of its configuration.
            noised: Whether the site draws noise.
            most: Most runs without noise.
            training: The images that it trains with.
            least: Fewest images behind a sum.

        Raises:
            RefusalError: If it is known under another configuration or with other images, there were so many, sums of
                all runs together would tell of too few images, or mean images would be of other groups than an earlier
                run's.
        """
        self.check_run(run, configuration)
        begun = [line for line in self.log.entries() if "configuration" in line]
        plain = [line for line in begun if not line.get("noised")]
        summed = {name: sorted(images) for name, images in training.images.items()}
        # Noise that hid nothing more when the run went on is none: it is counted from then on.
        if known := [line for line in (begun if noised else plain) if line.get("run") == run]:
            if any(line.get("trained", summed) != summed for line in known):
                raise RefusalError(Code.IMAGES)
            return
        if not noised:
            if len(plain) >= most:
                raise RefusalError(Code.RUNS, len(plain))
            fewest = training.fewest_apart([line.get("trained", {}) for line in plain], least)
            if fewest < least:
                raise RefusalError(Code.SUBSET, fewest, least)
        trained = {"trained": summed, "groups": training.groups}
        grouped = [line for line in plain if line.get("groups") and _images(line) & _images(trained)]
        if training.groups and least > 1 and any(not trained.items() <= line.items() for line in grouped):
            raise RefusalError(Code.GROUPS)
        self.log.append(run=run, configuration=configuration, noised=noised, **({} if noised else trained))

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

    def invite(self, run: str, invitation: str) -> None:
        """Notes the invitation to a secure sum before it is accepted: the keys of its envelopes seal one message each.

        Args:
            run: Number of the run.
            invitation: Hash of the invitation.

        Raises:
            RefusalError: If it was accepted before, in whatever run.
        """
        if any(line.get("invitation") == invitation for line in self.log.entries()):
            raise RefusalError(Code.INVITED)
        self.log.append(run=run, invitation=invitation)

    def claim(
        self, run: str, place: tuple[int, int, str], sites: Sequence[str], noised: bool = False
    ) -> None:
        """Notes the sites that a part is summed with.

        Args:
            run: Number of the run, which has begun.
            place: Round, index and name of the exchange.
            sites: Names of the sites in the sum.
            noised: Whether the sum holds noise that the sites draw: then other runs may have other sites.

        Raises:
            RefusalError: If the part, or that of another run on some of the same images, was given to a sum of other
                sites.
        """
        value, names, lines = list(place), sorted(sites), self.log.entries()
        trained = {line["run"]: _images(line) for line in lines if "trained" in line}
        earlier = [line for line in lines if "sites" in line]
        own = [line for line in earlier if line["run"] == run and line["place"] == value]
        differs = any(line["sites"] != names for line in own)
        if not noised:
            # Of runs that an older version began the images are not known.
            apart = {other for other in trained if run in trained and not trained[run] & trained[other]}
            others = [line for line in earlier if line["run"] not in {run, *apart} and not line.get("noised")]
            same = [line for line in others if line["place"][0] == place[0] and line["place"][2] == place[2]]
            differs = differs or any(line["sites"] != names for line in [*others[:1], *same])
        if differs:
            raise RefusalError(Code.CLAIMED, place[0])
        if not own:
            self.log.append(run=run, place=value, sites=names, noised=noised)


def _images(line: Mapping[str, Any]) -> set[str]:
    return {image for own in line.get("trained", {}).values() for image in own}

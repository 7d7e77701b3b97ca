"""A site's record of its answers over all runs: with which configuration and images, and in which secure sums."""

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
"""Most different messages that a site answers at one place of a run: a restarted coordinator may send another one."""


@dataclass(frozen=True)
class TrainingImages:
    """The images that a run trains with.

    Attributes:
        images: Hashes of the contents of the images that are summed together: a list for each stage, or for each
            product of a stage if there are sums of products. A copy of an image is listed again: sums count it twice.
        groups: Hash of what decides which images are averaged into one mean image; empty if no mean image leaves the
            site.
    """

    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: str = ""

    def fewest_apart(self, before: Sequence[Mapping[str, Sequence[str]]], least: int) -> int:
        """Returns the size of the smallest set of images whose sum can be computed from this run and earlier runs.

        Whatever sums are added and subtracted, images that all sums count in the same ratio stay together. So the sums
        reveal the sum over each set of such images, and over none smaller. A set that is a sum of its own does not
        count: that sum reveals it already.

        Args:
            before: The images of earlier runs, as in `images`.
            least: Returned if there is no set of fewer images.
        """
        sums = [Counter(images) for run in (*before, self.images) for images in run.values()]
        together = defaultdict[tuple[int, ...], dict[str, int]](dict)  # images by the ratio of their counts
        for image in set[str]().union(*sums):
            counts = [counted[image] for counted in sums]
            divisor = gcd(*counts)
            together[tuple(count // divisor for count in counts)][image] = divisor
        return min([least, *(len(images) for images in together.values() if images not in sums)])


class Claims:
    """The runs in which a site has answered, and the secure sums to which it has contributed.

    If two sums of different sites are over the same images, their difference is what those sites sent that are in one
    sum alone. So the site contributes to sums without noise only together with one set of sites, over all runs; a run
    may lose sites from one round to the next. Images are identified by their content, not by name or place.

    Args:
        file: The file of the record, to which lines are only added.
    """

    def __init__(self, file: Path) -> None:
        self.log = ChainedLog(file)

    def check_run(self, run: str, configuration: str) -> None:
        """Refuses a run that has begun with another configuration.

        Raises:
            RefusalError: If it has.
        """
        for line in self.log.entries():
            if line.get("run") == run and line.get("configuration", configuration) != configuration:
                raise RefusalError(Code.REUSED)

    def begin(
        self,
        run: str,
        configuration: str,
        noised: bool,
        max_runs: int,
        training: TrainingImages = TrainingImages(),
        least: int = 1,
    ) -> None:
        """Notes a run before its first answer.

        Differences between the sums of runs with different images can reveal few images, and mean images of different
        groups can be solved for single images.

        Args:
            run: Number of the run.
            configuration: Hash of its configuration.
            noised: Whether the site draws noise that hides single images.
            max_runs: Most runs without noise.
            training: The images with which the run trains.
            least: Fewest images over which a sum may be known.

        Raises:
            RefusalError: If the run has begun with another configuration or other images, if there are too many runs
                without noise, if the sums of all runs together would reveal a sum of too few images, or if mean images
                would be of other groups than in an earlier run.
        """
        self.check_run(run, configuration)
        begun = [line for line in self.log.entries() if "configuration" in line]
        plain = [line for line in begun if not line.get("noised")]
        summed = {name: sorted(images) for name, images in training.images.items()}
        # If a run's noise does not hide single images any more, the run counts as one without noise from then on.
        if known := [line for line in (begun if noised else plain) if line.get("run") == run]:
            if any(line.get("trained", summed) != summed for line in known):
                raise RefusalError(Code.IMAGES)
            return
        if not noised:
            if len(plain) >= max_runs:
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
        """Notes a request before it is answered: each answer to a different message tells more of the images.

        Args:
            run: Number of the run.
            place: Round, index of the exchange, and kind of the request or its question.
            message: Hash of the message and of all else that determines the answer.

        Raises:
            RefusalError: If `MOST_MESSAGES` other messages were answered at this place.
        """
        lines = [
            line for line in self.log.entries() if (line.get("run"), line.get("asked")) == (run, [*place])
        ]
        answered = {line.get("message") for line in lines}
        if message in answered:
            return
        if len(answered) >= MOST_MESSAGES:
            raise RefusalError(Code.REPEATED, place[0], len(answered))
        self.log.append(run=run, asked=[*place], message=message)

    def fix(self, run: str, sites: Sequence[str]) -> None:
        """Notes the sites of a run of secure sums, in the order of their numbers; they must stay the same.

        Raises:
            RefusalError: If the run had other sites before.
        """
        for line in self.log.entries():
            if line.get("run") == run and "members" in line:
                if line["members"] != list(sites):
                    raise RefusalError(Code.NAMES)
                return
        self.log.append(run=run, members=list(sites))

    def invite(self, run: str, invitation: str) -> None:
        """Notes the invitation to a secure sum before the site accepts it: its envelopes' keys seal one message each.

        Args:
            run: Number of the run.
            invitation: Hash of the invitation.

        Raises:
            RefusalError: If the invitation was accepted before, in any run.
        """
        if any(line.get("invitation") == invitation for line in self.log.entries()):
            raise RefusalError(Code.INVITED)
        self.log.append(run=run, invitation=invitation)

    def claim(
        self,
        run: str,
        place: tuple[int, int, str],
        sites: Sequence[str],
        noised: bool = False,
        message: str = "",
    ) -> None:
        """Notes with which sites the site's message of an exchange is summed.

        Args:
            run: Number of the run, which has begun.
            place: Round, index and name of the exchange.
            sites: Names of the sites in the sum.
            noised: Whether the sum holds noise that the sites draw: then other runs may have other sites.
            message: Hash of the message; empty if it tells nothing. A coordinator that has a site start from an older
                state may get the same message in another round.

        Raises:
            RefusalError: If the message went to a sum of other sites before, or that of another run with some of the
                same images did.
        """
        position, names, lines = list(place), sorted(sites), self.log.entries()
        trained = {line["run"]: _images(line) for line in lines if "trained" in line}
        earlier = [line for line in lines if "sites" in line]
        repeated = [line for line in earlier if line["run"] == run and line["place"] == position]
        differs = any(line["sites"] != names for line in repeated)
        if not noised:
            # Runs that share no image with this one; an older version did not note the images of its runs.
            apart = {other for other in trained if run in trained and not trained[run] & trained[other]}
            others = [line for line in earlier if line["run"] not in {run, *apart} and not line.get("noised")]
            same = [line for line in others if line["place"][0] == place[0] and line["place"][2] == place[2]]
            same += [line for line in earlier if message and line.get("summed") == message]
            differs = differs or any(line["sites"] != names for line in [*others[:1], *same])
        if differs:
            raise RefusalError(Code.CLAIMED, place[0])
        if not repeated:
            self.log.append(run=run, place=position, sites=names, noised=noised, summed=message)


def _images(line: Mapping[str, Any]) -> set[str]:
    """Returns the hashes of all images in a line of the record."""
    return {image for hashes in line.get("trained", {}).values() for image in hashes}

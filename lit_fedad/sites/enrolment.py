"""The first exchange with sites: who they are, how many images they hold, and whether all work with the same things."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lit_fedad
from lit_fedad.contracts.state import state_of
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import locate, takes
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.data.public import synthetic
from lit_fedad.data.stream import Timetable
from lit_fedad.experiment.build import Model
from lit_fedad.sites.messages import Facts
from lit_fedad.sites.overrides import agreed
from lit_fedad.sites.remote import Sites
from lit_fedad.sites.states import digest_of


@dataclass(frozen=True)
class SiteSizes:
    """What the server knows of the sites' training data (`ClientData`): their sizes.

    Attributes:
        by_stage: Training images by client and stage.
        timetable: When stages come; None where all images of all sites are there from the start.
        round: The round in which sites hold these images; None for those of all stages.
    """

    by_stage: Mapping[int, Sequence[int]]
    timetable: Timetable | None = None
    round: int | None = None

    @classmethod
    def of(cls, facts: Mapping[int, Facts], rounds: int) -> SiteSizes:
        """Counts the images of sites, in a federation of so many rounds."""
        by_stage = {client: own.stage_sizes for client, own in sorted(facts.items())}
        lengths = list(map(len, by_stage.values()))
        return cls(by_stage, Timetable(lengths, rounds) if max(lengths) > 1 else None)

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which sites go on to other stages."""
        return frozenset() if self.timetable is None else self.timetable.milestones

    @property
    def stages(self) -> Mapping[int, int]:
        """Stage of each client."""
        if self.timetable is None or self.round is None:
            return dict.fromkeys(self.by_stage, 0)
        return dict(enumerate(self.timetable.stages(self.round)))

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""
        if self.timetable is None or self.round is None:
            return {client: sum(own) for client, own in self.by_stage.items()}
        return {client: self.by_stage[client][stage] for client, stage in self.stages.items()}

    def at(self, round: int) -> SiteSizes:
        """Returns what the sites hold in a round."""
        return replace(self, round=round)

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Refuses: a server holds no images.

        Raises:
            UserError: Always.
        """
        raise UserError("the coordinator holds no images: this needs those of its sites")


def check_crosses(config: Config, classes: Sequence[str] = ()) -> None:
    """Checks that a federation's configuration works with sites.

    Args:
        config: The coordinator's configuration.
        classes: Names of the classes that it learns.

    Raises:
        UserError: If its method or task needs what no site shares, or what is learnt has no names.
    """
    name, server = config["method"]["name"], config["method"]["server"]
    if takes(server, "server_labelled"):
        raise UserError(
            f"method={name}: its server needs labelled images of its own, and a coordinator of sites has none; train it"
            " in one process: lit-fedad train"
        )
    public = config.get("public")
    if takes(server, "public") and public is not None and not _drawn(public):
        raise UserError(
            "public: nobody can see whether images of the coordinator are also a site's; give public=synthetic, which"
            " draws them"
        )
    learns = takes(config["task"], "classes")
    if learns and len(set(classes)) < 2:
        raise UserError(f"method={name}: its task learns classes; name all that sites hold: classes=cat,dog")
    if classes and not learns:
        raise UserError(f"classes: the task of method={name} learns none; leave them out")


def _drawn(public: Config) -> bool:
    """Tells whether public images are drawn, and so in no site's folder."""
    return locate(public["_target_"]) is synthetic or ("root" in public and public["root"] is None)


def check_agreement(
    config: Config, model: Model, facts: Mapping[int, Facts], names: Mapping[int, str]
) -> list[str]:
    """Checks that every site works with the same configuration, version and weights as the server.

    Args:
        config: The server's configuration.
        model: The server's model.
        facts: What sites said of themselves, by client.
        names: Names of the sites.

    Returns:
        Warnings about differences that only change last digits.

    Raises:
        UserError: If a site differs, or has no image to train with.
    """
    here = Facts(
        version=lit_fedad.__version__,
        torch=torch.__version__,
        configuration=agreed(config),
        backbone=model.fingerprint[:16],
        initial=digest_of([state_of(model.client), learned_state(model.task)]),
    )
    advice: dict[str, tuple[str, Any]] = {
        "version": ("version of lit_fedad", "install the same everywhere"),
        "configuration": (
            "composed configuration",
            "give its cache and fabric sections the values that others have",
        ),
        "backbone": ("backbone", "give it the same file of weights"),
        "initial": ("initial weights", "install the same torch and the same backbone"),
    }
    for client, own in sorted(facts.items()):
        for field, (what, mend) in advice.items():
            theirs, ours = getattr(own, field), getattr(here, field)
            if theirs != ours:
                raise UserError(f"site {names[client]} has another {what} ({theirs}, here {ours}); {mend}")
        if not own.size or not all(own.stage_sizes):
            raise UserError(f"site {names[client]} has no image to train with; give it some, or leave it out")
        if len(own.stages) > 1 and len(own.stages) > config["rounds"]:
            raise UserError(
                f"rounds={config['rounds']}, but the images of site {names[client]} come in {len(own.stages)} stages:"
                " give at least as many rounds"
            )
        first = min(facts)
        for field, what in (("anomalies", "sets of anomalies"), ("form", "list of classes")):
            theirs, others = getattr(own, field), getattr(facts[first], field)
            if theirs != others:
                raise UserError(
                    f"site {names[client]} has another {what} ({theirs}) than site {names[first]} ({others})"
                )
    return [
        f"site {names[client]} has torch {own.torch}, here is {here.torch}: last digits may differ"
        for client, own in sorted(facts.items())
        if own.torch != here.torch
    ]


def enrol(
    sites: Sites, config: Config, model: Model, names: Mapping[int, str], enrolled: Path
) -> tuple[dict[int, Facts], list[str]]:
    """Asks every site who it is.

    What sites say is kept. Where a run goes on and its policy skips who fails, a site that is away is the one that it
    was at the start: it takes part again once it answers.

    Args:
        sites: The transport.
        config: The server's configuration.
        model: The server's model.
        names: Names of the sites by client.
        enrolled: File of what they said when the run began; written here.

    Returns:
        What they say, by client; and warnings.

    Raises:
        UserError: If a site does not answer and the run does not go on without it, or works with other things than the
            server; or if the file cannot be read.
    """
    outcome = sites.hello()
    answered = {client: reply.facts for client, reply in outcome.values.items()}
    known = (
        _read(enrolled, names)
        if outcome.failures and config["federation"]["sampler"]["on_failure"] == "skip"
        else {}
    )
    for client, cause in outcome.failures.items():
        if client not in known or not answered:
            raise UserError(f"site {names[client]}: {cause}")
    warnings = check_agreement(config, model, answered, names)
    warnings += [
        f"site {names[client]}: {cause}; the run goes on, and it takes part again when it answers"
        for client, cause in outcome.failures.items()
    ]
    facts = dict(sorted((known | answered).items()))
    if not outcome.failures:
        _write(enrolled, facts, names)
    sites.products = list(sites.classes) or list(
        dict.fromkeys(product for own in facts.values() for product in own.held)
    )
    return facts, warnings


def _write(enrolled: Path, facts: Mapping[int, Facts], names: Mapping[int, str]) -> None:
    said = {names[client]: asdict(own) for client, own in facts.items()}
    try:
        with atomic(enrolled) as part:
            part.write_text(json.dumps(said, indent=1))
    except OSError as error:
        raise UserError(f"{enrolled}: cannot be written ({error.strerror})") from error


def _read(enrolled: Path, names: Mapping[int, str]) -> dict[int, Facts]:
    """Returns what sites said before; of nobody, if the run has not begun."""
    if not enrolled.exists():
        return {}
    try:
        said = json.loads(enrolled.read_text())
        return {client: Facts(**said[name]) for client, name in names.items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{enrolled}: cannot be read; remove it, and begin again once all sites answer"
        ) from error

"""One run whose clients are sites: how the coordinator builds and plays it, and what it knows of the sites."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric import Fabric

from lit_fedad.contracts import Exchange
from lit_fedad.core.building import build, takes
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity
from lit_fedad.evaluation.calibration import CalibrationQuery, calibrate
from lit_fedad.evaluation.decisions import decide_apart
from lit_fedad.experiment.build import Model, build_model
from lit_fedad.experiment.decisions import ship
from lit_fedad.experiment.federations import TestsElsewhere, build_evaluator_of_answers, build_federation
from lit_fedad.experiment.local_clients import Participants
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Record
from lit_fedad.experiment.run_files import there
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.track import RunStoppedError
from lit_fedad.experiment.train import train
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.privacy.image_privacy import noise_key
from lit_fedad.privacy.protection import is_protected, promised
from lit_fedad.report.console import Display
from lit_fedad.sites.enrolment import ABSENT, SiteSizes, check_crosses, enrol, write_facts
from lit_fedad.sites.messages import Facts, Request
from lit_fedad.sites.overrides import compose_overrides, of_one_client
from lit_fedad.sites.remote import Carrier, Sites
from lit_fedad.sites.site_noise import is_central, planned
from lit_fedad.sites.status import Contact, Status, flat_status

ENROLLED = "sites.json"
"""File in a run's folder with the facts that the sites of the run gave of themselves."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run that a coordinator's operator gives.

    Attributes:
        overrides: The federation's configuration, as choices and scalar values.
        names: Names of the sites, in the order of their client numbers.
        out: Folder of the run.
        own: Overrides of ``cache``, ``fabric``, ``public`` and ``tracking`` for the coordinator alone. Nothing is
            tracked unless they say so.
        classes: Names of the classes that the federation learns; none if it looks for anomalies.
    """

    overrides: Sequence[str]
    names: Sequence[str]
    out: str
    own: Sequence[str] = ()
    classes: Sequence[str] = ()

    def config(self) -> Config:
        """Composes the run's configuration.

        Raises:
            UserError: If sites would refuse an override, or if there are several sites and the method is meant for one
                client that holds all images.
        """
        config = compose_overrides(self.overrides, self.own, coordinator=True)
        if len(self.names) > 1 and of_one_client(self.overrides):
            raise UserError(
                f"method={config['method']['name']}: is meant for one client that holds all images, and"
                f" {len(self.names)} sites hold their own; take another method"
            )
        data = {"name": "sites", **(config["data"] or {})}
        return config | {
            "out": self.out,
            "data": data | ({"classes": list(self.classes)} if self.classes else {}),
        }


_LONGEST_WAIT = 10
"""Most rounds until a site that did not join is asked again: for each attempt the run is built anew."""


class JoinError(RunStoppedError):
    """Interrupts a run's rounds because sites join: the run goes on with them at once.

    Attributes:
        names: Names of all sites that the run then has, in the order of their client numbers.
    """

    at_once = True

    def __init__(self, text: str, names: Sequence[str]) -> None:
        super().__init__(text)
        self.names = names


def coordinate(
    plan: Plan,
    carrier: Carrier,
    quiet: bool = False,
    present: Callable[[], Mapping[int, str]] = dict,
) -> dict[str, Any]:
    """Runs a federation of sites, or its remaining rounds: `lit_fedad.experiment.train.train` with sites as clients.

    Args:
        plan: The run.
        carrier: Carries requests and replies; it knows sites by their client numbers.
        quiet: Whether only warnings are printed.
        present: Returns the names of the sites that can be asked now, by client number. Those that take no part yet
            join after the round.

    Returns:
        The content of ``result.json``.

    Raises:
        UserError: If the configuration is invalid, if a site does not answer at the start or has another configuration,
            version or weights, or if the run's policy for failures ends the run.
    """
    config = plan.config()
    check_crosses(config, plan.classes)
    clients = SiteClients(plan, carrier, present)
    while True:
        try:
            return train(config, clients, quiet)
        except JoinError as joined:
            clients.plan = replace(clients.plan, names=joined.names)


class SiteClients(Participants, RunCallback):
    """The sites of a run as its participants; it interrupts the rounds when other sites join.

    See `coordinate` for the arguments.

    Attributes:
        known: Facts that sites have given of themselves, by client.
        refused: Clients whose sites differ from the coordinator or came too late.
        again: Round from which a site that did not join is asked again, by client.
        contacts: When sites have answered, by client.
    """

    fabric: Mapping[str, Any] = {"devices": 1, "num_nodes": 1}
    anew = "another out in federation.yaml begins another run"

    def __init__(self, plan: Plan, carrier: Carrier, present: Callable[[], Mapping[int, str]] = dict) -> None:
        self.plan, self.carrier, self.present = plan, carrier, present
        self.known: dict[int, Facts] = {}
        self.refused: set[int] = set()
        self.again: dict[int, int] = {}
        self.contacts = defaultdict[int, Contact](Contact)

    @property
    def callbacks(self) -> Sequence[RunCallback]:
        """The operator's view of the sites (`Status`), and this object."""
        self.status = Status(dict(enumerate(self.plan.names)), self.contacts)
        return [self.status, self]

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Looks after each round but the last for sites that can join; those that were refused cannot.

        A site's place in the list is its client number, so it joins with or after the sites before it.
        A site that does not join, for example because its operator has not approved the run, is asked again when twice
        as many rounds have passed, or after ten more rounds if that is sooner.

        Raises:
            JoinError: If there are such sites.
        """
        round, present = report.round, self.present()
        by_number = dict(enumerate(self.plan.names)) | dict(present)
        names = [by_number[client] for client in takewhile(by_number.__contains__, count())]
        joining = {
            client: name
            for client, name in enumerate(names)
            if client in present
            and client not in self.refused
            and not self.known.get(client, ABSENT).size
            and round >= self.again.get(client, 0)
        }
        if joining and 0 <= round < federation.rounds:
            self.again |= dict.fromkeys(joining, round + min(max(round, 1), _LONGEST_WAIT))
            raise JoinError(f"sites join after round {round}: {', '.join(joining.values())}", names)

    def build(self, fabric: Fabric, config: Config, display: Display) -> Run:
        """Asks every site who it is, and builds all parts of the run; see `Participants.build`."""
        plan, names, folder = self.plan, dict(enumerate(self.plan.names)), RunFolder.of(config)
        run_of = f"{identity(config)}/{folder.path.name}"
        drawn = build(config.get("public"), "public") if takes(config["method"]["server"], "public") else None
        model = build_model(config, plan.classes, drawn)
        planned(config, model, {})
        up = build(config["federation"]["channel"], "federation.channel").up

        def largest(exchange: Exchange) -> int:
            return up.largest(exchange.upload_spec(model.client))

        run_id = hashlib.sha256(f"{run_of}/{model.fingerprint}".encode()).hexdigest()[:16]
        asked = Request("hello", run_id, list(plan.overrides), 0, list(plan.classes))
        sites = Sites(self.carrier, asked, plan.names, fabric, self.contacts, largest)
        begun = any((folder.path / "checkpoints").glob("round_*"))
        open_to_all = joinable(config, model) or not begun
        known = {client: site for client, site in self.known.items() if site.size}
        enrolled = folder.path / ENROLLED
        facts, warnings = enrol(sites, config, model, enrolled, open_to_all, known)
        if sites.told_apart:
            model = build_model(config, sites.told_apart, drawn, backbone=model.backbone)
        self.known, self.refused = facts, self.refused | set(sites.left_out)
        self.status.absent = sites.absent
        for line in warnings:
            display.warn(line)
        sizes = SiteSizes.of(facts, config["rounds"])
        data = SitesData(facts, sites.products, sites.told_apart, self.status, sizes)
        central = is_central(promised(config))  # the sites draw all other noise
        held = {client: site.held for client, site in sorted(facts.items())}  # noise depends on the sites
        federation = build_federation(
            config,
            folder.path,
            model,
            data.module,
            build_evaluator_of_answers(config, data.tests(bool(plan.classes)), fabric),
            fabric,
            images=None,
            transport=lambda _: sites,
            names=ClientNames(names),
            key=noise_key(folder.path, None, f"{run_id} {held}") if central else b"",
        )
        return Run(config, folder, model, data, federation, fabric, display)

    def judge(self, run: Run) -> None:
        """Has each site judge its own test images; see `Participants.judge`."""
        assert isinstance(run.data, SitesData)
        federation, products, facts = run.federation, run.data.products, run.data.facts
        run.calibration = calibrate(federation, federation.rounds, CalibrationQuery(products, None))
        # For semantic anomalies nobody knows which class they would be taken for, so there is no threshold by class.
        semantic = any(site.anomalies for site in facts.values())
        by_product = run.config["calibration"]["by"] == "product" and not semantic
        held = {client: site.held for client, site in facts.items()}
        for alpha in run.alphas:
            shipped = alpha == run.alphas[0]
            run.decisions[alpha] = decide_apart(
                federation, run.calibration, products, held, alpha, by_product, shipped
            )
        ship(run)


def joinable(config: Config, model: Model) -> bool:
    """Tells whether sites can join a run that has begun.

    They cannot if the method needs all sites from the beginning (`Method.joinable`), if messages are summed over a
    fixed set of sites, or if the noise was planned for their number.
    """
    return not is_protected(config) and model.method.joinable


@dataclass(frozen=True)
class SitesData:
    """What the server knows of the sites' images (`RunData`): how many there are.

    Attributes:
        facts: The facts that sites gave of themselves, by client.
        products: Names of all sites' products or classes.
        told_apart: The products that the model tells apart.
        status: The operator's view of the sites.
        module: Numbers of training images by client.
    """

    facts: Mapping[int, Facts]
    products: Sequence[str]
    told_apart: Sequence[str]
    status: Status
    module: SiteSizes

    @property
    def _first(self) -> Facts:
        return next(site for site in self.facts.values() if site.size)

    def counts(self) -> np.ndarray:
        """Counts training images by client and product; int64 [clients, products]."""
        return np.array([[site.of_product(name) for name in self.products] for site in self.facts.values()])

    def tests(self, classes: bool) -> TestsElsewhere:
        """Describes the sites' test images; `classes` says whether the run learns classes."""
        sites = list(self.facts.values())
        tested = [[int(site.tested.get(name, 0)) for name in self.products] for site in sites]
        by_stage = [np.array([[size] for size in sizes]) for sizes in self.module.by_stage.values()]
        anomalies, timetable = self._first.anomalies, self.module.timetable
        return TestsElsewhere(classes, self.counts(), np.array(tested), anomalies, timetable, by_stage)

    def lines(self) -> dict[str, str]:
        """Describes the sites in a short line."""
        sites = self.facts.items()
        return {
            "sites": ", ".join(f"{self.status.names[client]} ({site.size} images)" for client, site in sites)
        }

    def section(self, config: Config) -> dict[str, Any]:
        """Returns what ``result.json`` says of the data."""
        names, sites = self.status.names, self.facts.items()
        return {
            "data": "sites",
            "sites": {names[client]: {"client": client, "products": site.held} for client, site in sites},
            "partition": {
                "strategy": "sites",
                "sizes": [site.size for _, site in sites],
                "counts": self.counts().tolist(),
                "products": list(self.products),
                "stage_sizes": [site.stage_sizes for _, site in sites],
            },
            "stage_rounds": [] if self.module.timetable is None else self.module.timetable.stage_rounds,
        }

    def record(self, config: Config) -> Record:
        """Returns what MLflow records; no images are here, so the sites' facts identify them."""
        digest = self._first.configuration
        products = {self.status.names[client]: site.held for client, site in self.facts.items()}
        # The folders of all federations' runs have the same name, so it cannot serve as the run's name.
        run_name = f"{config['method']['name']}-sites-s{config['seed']}"
        return Record("sites", "sites", digest, products, run_name)

    def measures(self, history: Sequence[RoundReport]) -> dict[str, float]:
        """Returns what is known of each site after a round, as numbers by name."""
        return flat_status(self.status.sites(history, {}))

    def save(self, folder: Path) -> None:
        """Writes the sites' facts, if the folder has none: only the sites know which client has which image."""
        if not there(folder / ENROLLED):
            known = {client: site for client, site in self.facts.items() if site.size}
            write_facts(folder / ENROLLED, known, self.status.names, self.told_apart)

"""One run over sites, from configuration to result: the server's side of `lit_fedad.experiment.train`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Exchange
from lit_fedad.contracts.state import state_of
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config, build, identity, takes
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.accuracy import AccuracyEvaluator
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator
from lit_fedad.evaluation.calibration import CalibrationQuery, calibrate
from lit_fedad.evaluation.decisions import decide_apart, summarise_rates
from lit_fedad.evaluation.semantic import SemanticEvaluator
from lit_fedad.experiment.build import Model, build_model, open_checkpoints
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.console import Console
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.summary import summarise_history
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.processes import make_fabric
from lit_fedad.privacy.image_privacy import KEY_FILE, ImagePrivacy, in_words, noise_key
from lit_fedad.privacy.protection import protect
from lit_fedad.report.console import Display
from lit_fedad.sites.enrolment import SiteSizes, check_crosses, enrol
from lit_fedad.sites.letters import Facts
from lit_fedad.sites.own_noise import promised
from lit_fedad.sites.remote import Carrier, Sites
from lit_fedad.sites.status import Status, Visits
from lit_fedad.sites.tracking import SitesTracking
from lit_fedad.sites.words import compose_words, of_one_client

ROLL = "sites.json"
"""File in a run's folder: what sites said of themselves when it began."""


@dataclass(frozen=True)
class Plan:
    """What a coordinator's operator says of a run.

    Attributes:
        words: The federation's configuration, as choices and scalar values.
        names: Names of the sites, in the order of their client numbers.
        out: Folder of the run.
        own: Words of ``cache``, ``fabric``, ``public`` and ``tracking``, of the coordinator alone; nothing is tracked
            without.
        classes: Names of the classes that the federation learns; of none where it looks for anomalies.
    """

    words: Sequence[str]
    names: Sequence[str]
    out: str
    own: Sequence[str] = ()
    classes: Sequence[str] = ()

    def config(self) -> Config:
        """Composes the run's configuration.

        Raises:
            UserError: If a word is none that sites take, or several sites are asked for what one client with all
                images does.
        """
        config = compose_words(self.words, self.own, coordinator=True)
        if len(self.names) > 1 and of_one_client(self.words):
            raise UserError(
                f"method={config['method']['name']}: is meant for one client that holds all images, and"
                f" {len(self.names)} sites hold their own; take another method"
            )
        data = {"name": "sites", "sites": list(self.names), **(config["data"] or {})}
        return config | {
            "out": self.out,
            "data": data | ({"classes": list(self.classes)} if self.classes else {}),
        }


def coordinate(plan: Plan, carrier: Carrier, display: Display) -> dict[str, Any]:
    """Runs a federation of sites, or its remaining rounds.

    Args:
        plan: The run.
        carrier: The way to the sites; numbers are places in ``plan.names``.
        display: Output of the coordinator.

    Returns:
        The content of ``result.json``.

    Raises:
        UserError: If the configuration is invalid, a site does not answer at the start or works with other things,
            or the run's policy for failures ends it.
    """
    config = plan.config()
    check_crosses(config, plan.classes)
    folder = RunFolder.of(config)
    with folder.locked():
        folder.claim(config)
        if (before := folder.result()) is not None:
            display.note(f"complete already: {folder.path}")
            return before
        _play(config, plan, folder, carrier, display)
        result = folder.result()
    assert result is not None
    return result


def _play(config: Config, plan: Plan, folder: RunFolder, carrier: Carrier, display: Display) -> None:
    console, names, visits = Console(), dict(enumerate(plan.names)), Visits()
    status = Status(folder.path, names, visits)
    tracking = SitesTracking(config, folder.path, status)
    settings = {**config["fabric"], "devices": 1, "num_nodes": 1}
    fabric = make_fabric(**settings, callbacks=[console, status, tracking])
    public = takes(config["method"]["server"], "public") and config.get("public")
    model = build_model(config, plan.classes, build(public) if public else None)
    run = hashlib.sha256(f"{identity(config)}/{model.fingerprint}".encode()).hexdigest()[:16]
    up = build(config["federation"]["channel"]).up

    def largest(exchange: Exchange) -> int:
        return up.largest(exchange.upload_spec(model.client))

    sites = Sites(
        carrier,
        run,
        plan.words,
        fabric,
        names,
        names=plan.names,
        visits=visits,
        largest=largest,
        classes=plan.classes,
    )
    facts, warnings = enrol(sites, config, model, names, folder.path / ROLL)
    for line in warnings:
        display.warn(line)
    federation = build_federation(config, folder, model, sites, facts)
    display.header(_describe(config, folder, federation, model, facts))
    console.begin(display)
    try:
        with tracking.open(model, facts, display):
            federation.run()
            rates: dict[str, Any] = {}
            extras: dict[str, Any] = {}
            if model.task.kind == "anomaly":
                rates, extras = _judge(federation, config, folder, sites.products, facts)
            result = _result(federation, config, model, sites, facts, rates) | extras
            result |= {"status": status.sites(federation.history, rates)}
            result |= {"tracking_run_id": tracking.judged(federation, rates)}
            status.write(federation, result["status"])
            folder.save_json("result.json", result)
            (folder.path / KEY_FILE).unlink(missing_ok=True)  # with it the noise could be taken away again
            tracking.files()
    finally:
        console.end()
    if (spent := result["differential_privacy"]) is not None:
        display.note(f"spent: {in_words(spent)}")


def _result(
    federation: Federation,
    config: Config,
    model: Model,
    sites: Sites,
    facts: Mapping[int, Facts],
    rates: Mapping[str, Any],
) -> dict[str, Any]:
    """Summarises a federation of sites as `summarise_run` does a run in one process."""
    products = sites.products
    return {
        **summarise_history(federation, rates),
        "method": config["method"]["name"],
        "task": type(model.task).__name__,
        "data": "sites",
        "sites": {
            sites.names[client]: {"client": client, "products": own.held} for client, own in facts.items()
        },
        "partition": {
            "strategy": "sites",
            "sizes": [own.size for own in facts.values()],
            "counts": [[own.of_product(name) for name in products] for own in facts.values()],
            "products": products,
            "stage_sizes": [own.stage_sizes for own in facts.values()],
        },
        "models_stay": not model.client.predictors.shared,
        "backbone": model.provenance,
        "seed": config["seed"],
        "rounds": config["rounds"],
        "config": config,
        "privacy": None,
        "differential_privacy": federation.privacy,
    }


def build_federation(
    config: Config, folder: RunFolder, model: Model, sites: Sites, facts: Mapping[int, Facts]
) -> Federation:
    """Builds the round loop of a server whose clients are sites."""
    privacy, sizes = promised(config), SiteSizes.of(facts, config["rounds"])
    central = isinstance(privacy, ImagePrivacy) and privacy.where == "central"  # all other noise sites draw
    federation = Federation(
        method=model.method,
        data=sizes,
        evaluator=_evaluator(config, sites.progress.fabric, sites.classes, facts, sizes),
        fabric=sites.progress.fabric,
        rounds=config["rounds"],
        seed=config["seed"],
        checkpoints=open_checkpoints(folder.path, config, model),
        pool=ClientPool(state_of(model.client), folder.path / "personal"),
        sampler=build(config["federation"]["sampler"]),
        channel=build(config["federation"]["channel"]),
        evaluate_every=config["evaluation"]["every"],
        robust=build(config["federation"].get("robust")),
        transport=sites,
        names=ClientNames(dict(enumerate(sites.names))),
    )
    key = noise_key(folder.path, None, sites.run) if central else b""
    return protect(federation, build(config["federation"].get("secure_sum")), privacy, key)


def _evaluator(
    config: Config, fabric: Fabric, classes: Sequence[str], facts: Mapping[int, Facts], sizes: SiteSizes
) -> Evaluator:
    """Builds the evaluator of all sites on their own test images."""
    if classes:
        ordered = [own for _, own in sorted(facts.items())]
        counts = torch.tensor([[own.of_product(name) for name in classes] for own in ordered])
        tested = torch.tensor([[int(own.tested.get(name, 0)) for name in classes] for own in ordered])
        return AccuracyEvaluator(None, counts, fabric, tested, common=False)
    if anomalies := facts[min(facts)].anomalies:
        return SemanticEvaluator(anomalies, common=False)
    pro_limit = config["evaluation"]["pro_limit"]
    if sizes.timetable is not None:
        by_stage = [np.array([[size] for size in own]) for own in sizes.by_stage.values()]
        return AnomalyStreamEvaluator({}, sizes.timetable, by_stage, pro_limit, common=False)
    return AnomalyEvaluator(None, (), True, fabric, pro_limit, common=False)


def _judge(
    federation: Federation,
    config: Config,
    folder: RunFolder,
    products: Sequence[str],
    facts: Mapping[int, Facts],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calibrates all sites after the last round, and has each judge its own test images."""
    calibration = calibrate(federation, federation.rounds, CalibrationQuery(products, None))
    folder.save_json("calibration.json", calibration.to_json())
    # Which class a semantic anomaly is taken for is not known.
    semantic = any(own.anomalies for own in facts.values())
    by_product = config["calibration"]["by"] == "product" and not semantic
    held = {client: own.held for client, own in facts.items()}
    promised = alphas(config)
    found = {
        alpha: decide_apart(
            federation, calibration, products, held, alpha, by_product, shipped=alpha == promised[0]
        )
        for alpha in promised
    }
    decided = {f"{alpha:g}": summarise_rates(judged) for alpha, judged in found.items()}
    return summarise_rates(found[promised[0]]), {"decisions": decided}


def _describe(
    config: Config,
    folder: RunFolder,
    federation: Federation,
    model: Model,
    facts: Mapping[int, Facts],
) -> dict[str, str]:
    plan = federation.plan
    private = {} if plan is None else {"privacy": in_words(plan.summary(plan.releases))}
    sites = ", ".join(
        f"{federation.names.label(client)} ({own.size} images)" for client, own in sorted(facts.items())
    )
    return {
        "method": f"{config['method']['name']} ({config['method']['paper']})",
        **({"settings": config["method"]["under"]} if config["method"].get("under") else {}),
        "task": type(model.task).__name__,
        "sites": sites,
        "backbone": f"{model.provenance['name']}, weights {model.provenance['taken']}",
        "rounds": f"{config['rounds']} (seed {config['seed']})",
        **private,
        "files": str(folder.path),
    }

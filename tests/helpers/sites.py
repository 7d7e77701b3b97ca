"""Three sites in folders of their own, and the same federation in one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Context
from lit_fedad.contracts.disclosure import Kind
from lit_fedad.core.building import build
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config, compose
from lit_fedad.data.textures import textures
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.calibration import CalibrationQuery, calibrate, calibration_scores
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.local_clients import Participants
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.train import train
from lit_fedad.federation.collecting import Sender
from lit_fedad.report.console import Display
from lit_fedad.sites import coordinator
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.remote import NoReply
from lit_fedad.sites.settings import FLOORS, KeyRegistry, Policy, SiteSettings, write_sum_key
from lit_fedad.sites.site import Site

NAMES = ("north", "east", "south")
DEBUG = ("debug=seconds", "evaluation.pictures=0")
HERE = ("fabric.accelerator=cpu",)

OPEN = Policy(allow=[kind.value for kind in Kind], images=1, floors=dict.fromkeys(FLOORS, 0), runs=10_000)
"""The policy of sites whose tests are of something else."""

OF_FILES = (
    "fedavg", "fedbn", "scaffold", "local",
    "federated_bank", "federated_subspace", "federated_padim", "feddymem", "feddymem_literal", "feddetect",
)  # fmt: skip
"""Methods that are played on anomalies in image files: of those that learn classes too, one of each kind."""


class Here:
    """A carrier to sites in this process."""

    def __init__(self, sites):
        self.sites = dict(enumerate(sites))
        self.requests, self.replies = [], []

    def carry(self, requests, most):
        self.requests.append(dict(requests))
        self.replies.append({})
        for client, blob in requests.items():
            if client in self.sites:
                assert len(blob) <= self.sites[client].largest, "a site reads no more of a request"
            found = self.sites[client].answer(blob) if client in self.sites else NoReply("gone")
            self.replies[-1][client] = found
            yield client, found


def paint(folder: Path, names: Sequence[str] = NAMES) -> list[str]:
    """Paints images of a product a site: all below ``all``, and each below a site's folder; returns the products."""
    images = textures(folder / "painted", size=64, train_per_product=8, test_per_product=4)
    products = images.categories[: len(names)]
    root = images.train[0].path.parents[3]
    for name, product in zip(names, products, strict=True):
        shutil.copytree(root / product, folder / name / "images" / product)
        shutil.copytree(root / product, folder / "all" / product)
    return products


def settings(folder: Path, name: str, *own: str) -> SiteSettings:
    """What the operator of a painted site says."""
    return SiteSettings(
        name,
        folder / name,
        ("data=mvtec_mixture", f"data.root={folder / name / 'images'}"),
        (*HERE, f"cache.folder={folder / name / 'cache'}", *own),
        policy=OPEN,
    )


def with_keys(folder: Path, name: str, *own: str) -> SiteSettings:
    """What the operator of a painted site says that has the keys for secure sums."""
    return replace(settings(folder, name, *own), key_registry=KeyRegistry.read(folder / name, name))


def enrol_in_sums(folder: Path, names: Sequence[str] = NAMES) -> None:
    """Writes the keys for secure sums of all sites, and to each site's folder the registry of them."""
    for name in names:
        write_sum_key(folder / name, name)
    registry = "".join((folder / name / "sum.pub").read_text() for name in names)
    for name in names:
        (folder / name / "key_registry").write_text(registry)


def message_of(config: Config, model: Model, round: int = 1) -> bytes:
    """Packs the message that a server sends to client 0 at the beginning of a round."""
    context, down = Context(0, round), build(config["federation"]["channel"]).down
    model.server.context = context
    sender = Sender(model.server, model.client, down, Fabric(accelerator="cpu", devices=1))
    return sender.pack(model.method.exchanges.at(context), [0], context)[0]


def quiet_site(given: SiteSettings, **changed: Any) -> Site:
    """A site whose operator says something else in some respects, and that prints nothing."""
    return Site(replace(given, **changed), Display(quiet=True))


def reply_of(site: Site, request: Request) -> Reply:
    """Asks a site as a coordinator does."""
    return Reply.from_bytes(site.answer(request.to_bytes()))


def three_sites(folder: Path) -> list[Site]:
    return [quiet_site(settings(folder, name)) for name in NAMES]


def coordinated(plan, carrier):
    """Plays a federation of sites; returns its result, and the federation itself."""
    played, build = [], coordinator.build_federation

    def build_and_keep(*given, **more):
        played.append(build(*given, **more))
        return played[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "build_federation", build_and_keep)
        result = coordinator.coordinate(plan, carrier, quiet=True)
    (federation,) = played
    return result, federation


def kept_states(folder: Path, federation) -> list[dict]:
    """Loads the state of each site's client at the end of its one run."""
    bases = torch.load(federation.checkpoints.latest() / "sites.pt")["bases"]
    of_runs = [next((folder / name / "states").glob("*")) for name in NAMES]
    return [torch.load(states / f"{bases[client]:012d}.pt") for client, states in enumerate(of_runs)]


def told(history):
    """What reports say apart from times; floats to the last bit, and NaN equal to itself."""
    return [json.dumps({**asdict(report), "seconds": 0}) for report in history]


class OwnHere(AnomalyEvaluator):
    """The evaluator of clients of one process on test images of their own; answers pass their message's form."""

    def __init__(self, run):
        module, images = run.local.module, run.local.images
        super().__init__(None, (), True, run.fabric, run.config["evaluation"]["pro_limit"], common=False)
        self.judges = {}
        for number, own in enumerate(run.local.partition.clients):
            product = images.train[own[0]].category
            chosen = [i for i, sample in enumerate(images.test) if sample.category == product]
            loader = module._loader(module.test, chosen, module.eval_batch_size, False, torch.Generator())
            products = [sample.category for sample in images.test]
            self.judges[number] = AnomalyEvaluator(
                loader, products, images.has_masks, run.fabric, self.pro_limit
            )

    def score(self, client, number):
        return self.unpack(self.pack(self.judges[number].score(client, number)))


class OwnTests(Participants):
    """Clients of one process that are called like sites, and scored on their own test images."""

    def __init__(self, evaluator):
        self.evaluator = evaluator

    def build(self, fabric, config, display):
        self.run = super().build(fabric, config, display)
        self.run.federation.evaluator = self.evaluator(self.run)
        self.run.federation.names = ClientNames(dict(enumerate(NAMES)))
        return self.run

    def judge(self, run):
        """Calibrates, and decides nothing: decisions here would be about all test images, at sites about their own."""
        data, federation = run.local, run.federation
        scores = calibration_scores(
            run.config, data.images, data.partition, data.module, run.fabric, federation.method
        )
        query = CalibrationQuery(data.images.categories, scores)
        run.calibration = calibrate(federation, federation.rounds, query)
        save_json(run.folder.path, "calibration.json", run.calibration.to_json())


def comparable(result):
    """What results say apart from times and places, and from the names of partition and data.

    Decisions are left out: in one process they are judged on all test images, at sites on their own.
    """
    apart = ("config", "data", "sites", "status", "models_stay", "decisions")
    apart += ("seconds_per_round", "peak_rss_bytes", "tracking_run_id")
    found = {key: value for key, value in json.loads(json.dumps(result)).items() if key not in apart}
    found["partition"].pop("strategy")
    found["last"] = {key: value for key, value in found["last"].items() if key not in RATES}
    return found


def in_one_process(folder: Path, words, products, images: Path | None = None, own=HERE):
    """The run of a federation whose clients hold a product each, scored on their own test images.

    Words of `own` come last: those of this machine, and others that sites do not take from a federation.
    """
    images = images or folder / "all"
    config = compose([
        *words, "data=mvtec_mixture", f"data.root={images}", f"data.products=[{','.join(products)}]",
        "data.train_per_product=null", "data.test_per_product=null", "partition=by_product",
        "partition.clients=null", "tracking=off", f"out={folder / 'one'}", f"cache.folder={folder / 'cache'}", *own,
    ])  # fmt: skip
    clients = OwnTests(OwnHere)
    train(config, clients, quiet=True)
    return clients.run

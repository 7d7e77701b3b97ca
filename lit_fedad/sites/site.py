"""A site: a process that holds its own images, and answers a coordinator's orders."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lit_fedad
from lit_fedad.contracts import Client, Context, Exchange
from lit_fedad.contracts.state import state_of
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import Sample
from lit_fedad.evaluation.calibration import CalibrationQuery
from lit_fedad.evaluation.decisions import DecisionsQuery, EvaluatedImages
from lit_fedad.evaluation.predictions import Predicted
from lit_fedad.experiment.build import build_data, build_model
from lit_fedad.experiment.calibration import calibration_scores, with_calibration
from lit_fedad.experiment.data_digest import data_digest
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.evaluators import build_evaluator
from lit_fedad.experiment.frozen_data import hashes_file
from lit_fedad.experiment.trained_client import TrainedClient
from lit_fedad.federation.channel import Link, Plain
from lit_fedad.federation.client_query import ClientQuery
from lit_fedad.federation.client_runner import ClientRunner, pose_client
from lit_fedad.federation.local_transport import cause_of
from lit_fedad.federation.processes import make_fabric
from lit_fedad.privacy.image_privacy import in_words
from lit_fedad.privacy.ledger import LEDGER, Ledger
from lit_fedad.privacy.messages import read_survivors
from lit_fedad.privacy.party import Party
from lit_fedad.privacy.secure_aggregation import Mask
from lit_fedad.report.console import Display
from lit_fedad.sites.letters import AGAIN, Facts, Order, Reply, digest
from lit_fedad.sites.own_files import OwnDetector, OwnReport
from lit_fedad.sites.own_images import (
    anomalies_of,
    form_of,
    own_images,
    products_of,
    training_indices,
    training_stages,
)
from lit_fedad.sites.own_noise import Asked, OwnNoise, check_promise
from lit_fedad.sites.roster import Given, Roster
from lit_fedad.sites.states import States, digest_of
from lit_fedad.sites.words import agreed, compose_words

_log = logging.getLogger(__name__)
_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s:;,'\")\]]+")


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator says of it.

    Attributes:
        name: Name of the site.
        folder: Folder of its states.
        data: Words that describe its images: ``data=folders``, ``data.root=...``.
        own: Words of ``cache`` and ``fabric``.
        apart: Whether its products are its own, even where those of another site have the same name.
        roster: The keys for secure sums; a site that has some answers in runs of secure sums alone. None for none.
        epsilon: Largest budget of differential privacy of all runs together, whose sites draw the noise; None for any,
            and for runs without noise.
        stages: Its products by the stages in which their images come; of none where all are there from the start.
    """

    name: str
    folder: Path
    data: Sequence[str]
    own: Sequence[str] = ()
    apart: bool = False
    roster: Roster | None = None
    epsilon: float | None = None
    stages: Sequence[Sequence[str]] = ()


class Site:
    """One site.

    It keeps the model of the run that it last took part in: building it takes longer than most orders.

    Args:
        settings: What its operator says of it.
        display: Output of warnings and progress, at the site.
    """

    def __init__(self, settings: SiteSettings, display: Display) -> None:
        self.settings, self.display = settings, display
        self._seat: tuple[tuple[object, ...], _Seat] | None = None

    def answer(self, blob: bytes) -> bytes:
        """Carries out an order; whatever fails is the answer, in one line without paths.

        Args:
            blob: An order; not trusted.
        """
        began, step = time.monotonic(), 0
        try:
            order = Order.from_bytes(blob)
            step = order.step
            reply = self._take(order).answer(order)
            self.display.note(
                f"round {order.round}: {order.question or order.kind}, {len(order.letter)} bytes in,"
                f" {len(reply.letter)} bytes out, {time.monotonic() - began:.1f} s"
            )
        except Exception as error:
            cause = cause_of(error)
            self.display.warn(cause)
            reply = Reply(cause=without_paths(cause)[:400])
        return replace(reply, step=step).to_bytes()

    def _take(self, order: Order) -> _Seat:
        key = (order.run, tuple(order.words), order.client, tuple(order.classes))
        if self._seat is None or self._seat[0] != key:
            self._seat = None  # its memory is free before the next model is built
            self._seat = key, _Seat(order, self.settings, self.display)
        return self._seat[1]


class _Seat:
    """A site's part in one run: its client, its images, its states."""

    def __init__(self, order: Order, settings: SiteSettings, display: Display) -> None:
        config = compose_words(order.words, settings.own)
        check_promise(config, settings.epsilon)
        form, config["data"] = config["data"], compose([*settings.data])["data"]
        fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
        images = own_images(config, form, order.classes, settings.name, settings.apart)
        model = build_model(config, order.classes)
        whole = _whole(config, images, settings, order.client)
        partition = with_calibration(config, images, whole, model.method)
        initial = state_of(model.client)
        begins = digest_of([initial, learned_state(model.task)])
        states = States(
            settings.folder / "states" / order.run,
            initial,
            images=data_digest(images, partition, hashes_file(config)),
            model=f"{model.fingerprint[:16]} {begins}",
        )
        data = build_data(config, images, partition, model, fabric, display)
        size = len(partition.clients[order.client])
        ledger = Ledger(settings.folder / LEDGER, settings.epsilon)
        self.noise = OwnNoise.of(config, model, states.folder, data.digest, order.client, size, ledger)
        if self.noise is not None:
            display.note(f"run {order.run}: {in_words(self.noise.plan.summary(self.noise.plan.releases))}")
        self.config, self.data, self.states = config, data, states
        self.settings, self.display = settings, display
        self.method = model.method
        self.client, self.module, self.fabric = model.client, data.module, fabric
        self.runner = ClientRunner(model.client, build(config["federation"]["channel"]), fabric)
        self.secure = build(config["federation"].get("secure_sum"))
        self.summed = self.secure is not None
        if self.summed != (settings.roster is not None):
            raise UserError(
                "the coordinator's run has secure sums, and this site no roster: docs/sites.md"
                if self.summed
                else "this site has a roster, and answers in runs of secure sums alone: give federation=secure"
            )
        self.roster = settings.roster
        self.party: Party | None = None
        self.message = b""
        self.given, self.place = Given(self.states.folder / "sums.json"), (0, 0)
        self.evaluator = build_evaluator(config, data, model.method, fabric, common=False)
        # Predictions of its test images, and the round and message after which they were made.
        self.predicted: tuple[tuple[int, str], Predicted | None] = (0, ""), None
        if self.evaluator.local:
            raise UserError(f"{type(self.evaluator).__name__}: no metric state of it can cross")
        products = products_of(images)
        stages = [_by_product(images.train, products, own) for own in partition.by_stage[order.client]]
        sizes = _by_product(images.train, products, partition.clients[order.client])
        self.detector: OwnDetector | None = (
            None
            if model.client.predictors.shared
            else OwnDetector(
                settings.folder / "detectors" / order.run,
                config,
                type(model.task).__name__,
                settings.name,
                order.client,
                {name: sizes.get(name, 0) for name in order.classes or sizes},
                model.provenance,
            )
        )
        self.facts = Facts(
            version=lit_fedad.__version__,
            torch=torch.__version__,
            configuration=agreed(config),
            backbone=model.fingerprint[:16],
            initial=begins,
            stages=stages,
            held=_by_product(images.train, products, whole.clients[order.client]),
            tested=_by_product(images.test, images.categories, range(len(images.test))),
            anomalies=anomalies_of(images),
            form=form_of(images),
        )

    def answer(self, order: Order) -> Reply:
        """Carries out an order."""
        if order.kind == "hello":
            return Reply(facts=self.facts)
        if order.kind == "offer":
            return Reply(letter=self._offer(order))
        if order.kind == "reveal":
            return Reply(letter=self._reveal(order.letter))
        # A question after a round comes with the message of the next.
        data = self.module.at(order.round - (order.kind == "ask"))
        stage = data.stages[order.client]
        context = Context(self.config["seed"], order.round, order.client, order.exchange, stage)
        envelopes, blob = order.letter[: order.sealed], self._message(order)
        state = self.states.get(order.base)
        known = digest_of(state) if self.noise else ""
        asked = Asked(self.facts.configuration, order.round, order.exchange, digest(blob), known)
        exchange = self._exchange(order, context, asked)
        self.states.settle(order.settled, order.base)
        self.runner.activate(exchange, context, state, blob)
        if order.kind == "play":
            if self.noise is not None:
                self.noise.pay(exchange, self.client, asked)
            mask = self._mask(exchange, envelopes)
            self.place = order.round, order.exchange
            result = self.runner.play(exchange, data, mask)
            self.states.put(order.step, state_of(self.client))
            return Reply(scalars=result.scalars, letter=result.blob)
        query = self._query(order)
        pose_client(self.client, "own", {}, data)
        if order.keep:
            state = state_of(self.client)
            self.states.put(order.step, state)
            trained = TrainedClient(order.round, order.exchange, blob, state)
            self._keep(lambda detector: detector.write(trained))
        found = query(self.client, order.client)
        if order.question == "scores":
            self.predicted = (order.round, digest(blob)), self.evaluator.predicted(found)
        if order.question == "calibration":
            self._keep(lambda detector: detector.calibrate(found))
        message = query.pack(found)
        return Reply(letter=Link(Plain()).pack(message, query.spec(), context, "the client"))

    def _message(self, order: Order) -> bytes:
        """Returns the server's message: that of the order, or of the one before where it is the same."""
        if not order.same:
            self.message = order.letter[order.sealed :]
        elif digest(self.message) != order.same:
            raise UserError(AGAIN)
        return self.message

    def _offer(self, order: Order) -> bytes:
        """Accepts the invitation to a secure sum."""
        if self.roster is None:
            raise UserError("the coordinator invites to a secure sum, and the run has none")
        keys = self.roster.numbered(order.names, order.client)
        names = ClientNames(dict(enumerate(order.names)))
        if self.noise is not None:
            self.noise.share(self.secure, len(order.names))
        self.party = Party(order.client, self.roster.pair, keys, names)
        offer = self.party.offer(order.letter)
        images = self.party.invitation.members[order.client]
        if images != self.facts.size:
            raise UserError(f"the coordinator counts {images} images of this site's {self.facts.size}")
        return offer

    def _mask(self, exchange: Exchange, envelopes: bytes) -> Mask | None:
        """Returns what the message is masked with; in a run of secure sums nothing leaves the site without."""
        if not self.summed or not exchange.upload_spec(self.client):
            return None
        if self.party is None:
            raise UserError("the coordinator asks for a message without the masks of a secure sum")
        return Mask(self.party, envelopes)

    def _reveal(self, letter: bytes) -> bytes:
        """Reveals shares of the sum that the site has last had a part in."""
        if self.party is None:
            raise UserError("the coordinator asks for shares of no sum")
        clients = read_survivors(letter)
        if self.noise is not None:
            self.noise.check_sum(clients)
        self.given.claim(self.place, clients)
        return self.party.reveal(letter)

    def _exchange(self, order: Order, context: Context, asked: Asked) -> Exchange:
        exchanges = self.noise.exchanges(self.method, asked) if self.noise else self.method.exchanges
        if order.sums:
            if exchanges.leave_out is None:
                raise UserError("the coordinator asked for a model made of sums, which this method has not")
            return exchanges.leave_out
        if order.round < exchanges.first_round or order.exchange >= len(exchanges.of_round(order.round)):
            raise UserError(f"the coordinator asked for exchange {order.exchange} of round {order.round}")
        return exchanges.at(context)

    def _query(self, order: Order) -> ClientQuery[Any]:
        if order.question not in ("scores", "calibration", "decisions", "further decisions"):
            raise UserError(f"the coordinator asked '{order.question}', which no site answers")
        if order.question == "scores":
            return self.evaluator
        data = self.data
        if data.images.kind == "classification":
            raise UserError(f"the coordinator asked '{order.question}' about classes")
        if unknown := sorted(set(self.facts.held) - set(order.names)):
            raise UserError(f"the coordinator does not know the site's product {unknown[0]}")
        if order.question == "calibration":
            scores = calibration_scores(
                self.config, data.images, data.partition, data.module, self.fabric, self.method
            )
            return CalibrationQuery(order.names, scores)
        images, shipped = evaluated_images(self.config, data), order.question == "decisions"

        def scored(client: Client) -> Tensor:
            predicted = self._predictions(client, order)
            if shipped:
                self._report(predicted, order, images)
            return predicted.scores

        return DecisionsQuery(order.names, order.numbers, images, scored, shipped)

    def _predictions(self, client: Client, order: Order) -> Predicted:
        """Returns the predictions of the test images: those that metrics were computed from, or else computes them."""
        after = order.round, digest(self.message)
        if self.predicted[0] != after:
            self.predicted = after, self.evaluator.predicted(self.evaluator(client, order.client))
        predicted = self.predicted[1]
        assert predicted is not None
        return predicted

    def _keep(self, part: Callable[[OwnDetector], None]) -> None:
        """Keeps a part of the site's own detector, where its model stays here; a failure ends no round."""
        if self.detector is None:
            return
        known = self.detector.complete
        try:
            part(self.detector)
        except (OSError, UserError) as error:
            self.display.warn(f"no detector was kept ({first_line(error)})")
        else:
            if self.detector.complete and not known:
                self.display.note(f"detector: lit-fedad predict run={self.detector.folder.path} images=DIR")

    def _report(self, predicted: Predicted, order: Order, images: EvaluatedImages) -> None:
        """Writes the site's own report; a failure ends no round."""
        report = OwnReport(self.settings.folder / "reports" / order.run, self.config, self.data, images)
        try:
            self.display.note(f"report: {report.write(predicted, order.numbers)}")
        except (OSError, ValueError, UserError) as error:
            self.display.warn(f"{report.folder}: no report was written ({first_line(error)})")


def without_paths(text: str) -> str:
    """Replaces the paths in a text.

    Example:
        >>> without_paths("image /data/north/1.png cannot be read: no such file")
        'image <path> cannot be read: no such file'
    """
    return _PATH.sub("<path>", text)


def _whole(config: Config, images: Images, settings: SiteSettings, client: int) -> Partition:
    """Gives all training images to the client of this number, at once or in the site's stages."""
    if not settings.stages:
        return Partition.of_clients([*([()] * client), training_indices(images)])
    if config["federation"].get("secure_sum") or config["federation"].get("privacy"):
        raise UserError("stages: sums are neither masked nor noised where a site's images come in stages")
    return Partition.in_stages([*([[()]] * client), training_stages(images, settings.stages, settings.name)])


def _by_product(
    samples: Sequence[Sample | LabelledImage], products: Sequence[str], indices: Sequence[int]
) -> dict[str, float]:
    sizes: dict[str, float] = dict.fromkeys(products, 0)
    for index in indices:
        sizes[samples[index].category] += 1
    return sizes

"""A site's part in one run: its client, its images, its states, and what may leave of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lit_fedad
from lit_fedad.contracts import Client, Context, Exchange, disclosed_by
from lit_fedad.contracts.disclosure import Disclosures, Kind, counted
from lit_fedad.contracts.state import state_of
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.evaluation.calibration import CalibrationQuery
from lit_fedad.evaluation.decisions import DecisionsQuery, EvaluatedImages
from lit_fedad.evaluation.predictions import Predicted
from lit_fedad.experiment.build import build_data, build_images, build_model, tells_products
from lit_fedad.experiment.calibration import calibration_scores, with_calibration
from lit_fedad.experiment.data_digest import data_digest
from lit_fedad.experiment.datasets import hashes_file
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.evaluators import build_evaluator
from lit_fedad.experiment.trained_client import TrainedClient
from lit_fedad.federation.channel import LARGEST_BLOB, Link, Plain
from lit_fedad.federation.client_runner import ClientRunner, pose_client
from lit_fedad.federation.evaluator import ClientQuery
from lit_fedad.federation.processes import make_fabric
from lit_fedad.privacy.image_privacy import in_words
from lit_fedad.privacy.ledger import LEDGER, Ledger
from lit_fedad.privacy.messages import read_survivors
from lit_fedad.privacy.party import Party
from lit_fedad.privacy.secure_aggregation import Mask
from lit_fedad.report.console import Display
from lit_fedad.sites.claims import CLAIMS, Claims
from lit_fedad.sites.messages import Facts, Reply, Request, digest
from lit_fedad.sites.offer import APPROVED, Approvals, check_approval, digest_of_offer, judge, taken_by
from lit_fedad.sites.overrides import agreed, compose_offered
from lit_fedad.sites.own_files import OwnDetector, OwnReport
from lit_fedad.sites.own_images import (
    anomalies_of,
    by_product,
    fewest_of_a_product,
    form_of,
    own_images,
    products_of,
    told_apart,
    training_indices,
    training_stages,
)
from lit_fedad.sites.own_noise import Asked, OwnNoise, check_promise
from lit_fedad.sites.policy import not_allowed
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.states import States, digest_of

ENROLMENT = counted("numbers of images by product or class, with their names")
"""What a site tells when it says who it is."""

_SHARES = 64 << 20
"""Most bytes of what other sites' parts of a secure sum add to a message."""


class Session:
    """A site's part in one run.

    Args:
        request: A request of the run; not trusted.
        settings: What the site's operator says.
        display: Output at the site.

    Raises:
        RefusalError: If the site takes no part in such a run.

    Attributes:
        largest: Most bytes of a message of the run's coordinator.
    """

    def __init__(self, request: Request, settings: SiteSettings, display: Display) -> None:
        policy, self.run = settings.policy, request.run
        config = compose_offered(request.overrides, settings.own)
        policy.check_floors(config)
        offered = digest_of_offer(config, request.classes, policy.vary)
        approved = check_approval(policy, Approvals(settings.folder / APPROVED), offered)
        check_promise(config, settings.epsilon)
        self.secure = build(config["federation"].get("secure_sum"))
        self.summed = self.secure is not None
        if self.summed != (settings.key_registry is not None):
            raise RefusalError(Code.REGISTRY if self.summed else Code.SECURE)
        known = bool(request.products) or not tells_products(config)
        if request.kind != "hello" and not known:
            raise RefusalError(Code.PRODUCT, detail="the request names none")
        self.configuration = _hash(
            [agreed(config), config["data"], request.classes, request.products, request.client]
        )
        self.claims = Claims(settings.folder / CLAIMS)
        if known:
            self.claims.check_run(request.run, self.configuration)
        form, config["data"] = config["data"], compose([*settings.data])["data"]
        fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
        read = build_images(config)
        # Whatever settings make of them: sums of other runs are of the same images.
        self.images = data_digest(read, Partition.of_clients([range(len(read.train))]))
        images = own_images(read, form, request.classes, settings)
        model = build_model(config, told_apart(request.classes, request.products, images))
        whole = _whole(config, read, settings, request.client)
        partition = with_calibration(config, images, whole, model.method)
        initial = state_of(model.client)
        begins = digest_of([initial, learned_state(model.task)])
        states = States(
            settings.folder / "states" / request.run,
            initial,
            images=data_digest(images, partition, hashes_file(config)),
            model=f"{model.fingerprint[:16]} {begins}",
        )
        data = build_data(config, images, partition, model, fabric, display)
        size = len(partition.clients[request.client])
        ledger = Ledger(settings.folder / LEDGER, settings.epsilon)
        self.noise = OwnNoise.of(config, model, states.folder, data.digest, request.client, size, ledger)
        exchanges = model.method.exchanges
        if self.noise is not None:
            display.note(f"run {request.run}: {in_words(self.noise.plan.summary(self.noise.plan.releases))}")
            exchanges = self.noise.plan.noised(model.method, b"declared")
        products = products_of(images)
        stages = [by_product(images.train, products, own) for own in partition.by_stage[request.client]]
        sizes = by_product(images.train, products, partition.clients[request.client])
        least = min((len(own) for own in partition.by_stage[request.client]), default=0)
        taken = taken_by(exchanges, model.client, config, fewest_of_a_product(stages))
        judge(policy, taken, least, approved)
        self.told_scalars = approved is not None or (
            Kind.SUMS.value in policy.allow and least >= policy.images
        )
        self.config, self.data, self.states = config, data, states
        self.settings, self.display = settings, display
        self.method = model.method
        self.client, self.module, self.fabric = model.client, data.module, fabric
        channel = build(config["federation"]["channel"])
        self.runner = ClientRunner(model.client, channel, fabric)
        asked = [*exchanges.setup, *exchanges.rounds, *([exchanges.leave_out] if exchanges.leave_out else [])]
        specs = [exchange.broadcast_spec(model.client) for exchange in asked]
        most = max(map(channel.down.largest, specs)) + (_SHARES if self.summed else 0)
        self.largest = min(LARGEST_BLOB, most) if known else LARGEST_BLOB
        self.key_registry = settings.key_registry
        self.party: Party | None = None
        self.message = b""
        self.place, self.sites = (0, 0, ""), list[str]()
        self.evaluator = build_evaluator(config, data, model.method, fabric, common=False)
        # Predictions of its test images, and the round and message after which they were made.
        self.predicted: tuple[tuple[int, str], Predicted | None] = (0, ""), None
        if self.evaluator.local:
            raise UserError(f"{type(self.evaluator).__name__}: no metric state of it can cross")
        self.detector: OwnDetector | None = (
            None
            if model.client.predictors.shared
            else OwnDetector(
                settings.folder / "detectors" / request.run,
                config,
                type(model.task).__name__,
                settings.name,
                request.client,
                {name: sizes.get(name, 0) for name in request.classes or request.products or sizes},
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
            held=by_product(images.train, products, whole.clients[request.client]),
            tested=by_product(images.test, images.categories, range(len(images.test))),
            anomalies=anomalies_of(images),
            form=form_of(images),
        )

    def answer(self, request: Request) -> tuple[Reply, str]:
        """Carries out a request.

        Returns:
            The reply, and what it tells of images, for the site's log.

        Raises:
            RefusalError: If the site does not.
        """
        if request.kind == "hello":
            self._check((ENROLMENT,), request)
            return Reply(facts=self.facts), _told((ENROLMENT,))
        self.claims.begin(self.run, self.configuration, self.images, self._noised, self.settings.policy.runs)
        self.states.begin()
        if request.kind == "offer":
            return Reply(payload=self._offer(request)), "keys"
        if request.kind == "reveal":
            return Reply(payload=self._reveal(request.payload)), "shares of keys"
        # A query after a round comes with the message of the next.
        data = self.module.at(request.round - (request.kind == "ask"))
        stage = data.stages[request.client]
        context = Context(self.config["seed"], request.round, request.client, request.exchange, stage)
        envelopes, blob = request.payload[: request.sealed], self._message(request)
        state = self.states.get(request.base)
        known = digest_of(state) if self.noise else ""
        asked = Asked(self.facts.configuration, request.round, request.exchange, digest(blob), known)
        exchange = self._exchange(request, context, asked)
        place = request.round, request.exchange, request.question or request.kind
        self.claims.answer(self.run, place, asked.message)
        self.states.settle(request.settled, request.base)
        try:
            self.runner.activate(exchange, context, state, blob)
        except UserError as error:
            raise RefusalError(Code.MESSAGE, detail=str(error)) from error
        if request.kind == "play":
            if self.noise is not None:
                self.noise.pay(exchange, self.client, asked)
            mask = self._mask(exchange, envelopes)
            self.place = request.round, request.exchange, exchange.name
            result = self.runner.play(exchange, data, mask)
            self.states.put(request.step, state_of(self.client))
            scalars = dict(result.scalars) if self.told_scalars else {}
            return Reply(scalars=scalars, payload=result.blob), _told(disclosed_by(exchange, self.client))
        query = self._query(request)
        self._check(query.discloses, request)
        pose_client(self.client, "own", {}, data)
        if request.keep:
            state = state_of(self.client)
            self.states.put(request.step, state)
            trained = TrainedClient(request.round, request.exchange, blob, state)
            self._keep(lambda detector: detector.write(trained))
        found = query(self.client, request.client)
        if request.question == "scores":
            self.predicted = (request.round, digest(blob)), self.evaluator.predicted(found)
        if request.question == "calibration":
            self._keep(lambda detector: detector.calibrate(found))
            self._check_calibration(sum(int(counts.counts.sum()) for counts in found.values()))
        message = query.pack(found)
        payload = Link(Plain()).pack(message, query.spec(), context, "the client")
        return Reply(payload=payload), _told(query.discloses)

    def _check(self, disclosed: Disclosures, request: Request) -> None:
        """Refuses what the policy does not let out."""
        for part in disclosed:
            if part.kind.value not in self.settings.policy.allow:
                raise not_allowed(part, request.round, request.exchange)

    @property
    def _noised(self) -> bool:
        """Whether all that leaves the site holds noise that the site draws."""
        return self.noise is not None and self.noise.drawn_here

    def _message(self, request: Request) -> bytes:
        """Returns the server's message: that of the request, or of the one before where it is the same."""
        if not request.same:
            self.message = request.payload[request.sealed :]
        elif digest(self.message) != request.same:
            raise RefusalError(Code.AGAIN)
        return self.message

    def _offer(self, request: Request) -> bytes:
        """Accepts the invitation to a secure sum."""
        if self.key_registry is None:
            raise RefusalError(Code.REGISTRY)
        keys = self.key_registry.numbered(request.names, request.client)
        self.claims.fix(self.run, request.names)
        names, self.sites = ClientNames(dict(enumerate(request.names))), request.names
        if self.noise is not None:
            self.noise.share(self.secure, len(request.names))
        self.party = Party(request.client, self.key_registry.pair, keys, names)
        offer = self.party.offer(request.payload)
        images = self.party.invitation.members[request.client]
        if images != self.facts.size:
            raise RefusalError(Code.COUNT, images, self.facts.size)
        return offer

    def _mask(self, exchange: Exchange, envelopes: bytes) -> Mask | None:
        """Returns what the message is masked with; in a run of secure sums nothing leaves the site without."""
        if not self.summed or not exchange.upload_spec(self.client):
            return None
        if self.party is None:
            raise RefusalError(Code.MASK)
        return Mask(self.party, envelopes)

    def _reveal(self, payload: bytes) -> bytes:
        """Reveals shares of the sum that the site has last had a part in."""
        if self.party is None:
            raise RefusalError(Code.PART)
        clients = read_survivors(payload)
        if self.noise is not None:
            self.noise.check_sum(clients)
        if not clients or not all(0 <= client < len(self.sites) for client in clients):
            raise RefusalError(Code.NAMES)
        names = [self.sites[client] for client in clients]
        self.claims.claim(self.run, self.images, self.place, names, self._noised)
        return self.party.reveal(payload)

    def _exchange(self, request: Request, context: Context, asked: Asked) -> Exchange:
        exchanges = self.noise.exchanges(self.method, asked) if self.noise else self.method.exchanges
        last = self.config["rounds"] + (request.kind == "ask")
        within = exchanges.first_round <= request.round <= last
        if not within or request.exchange >= len(exchanges.of_round(request.round)):
            raise RefusalError(Code.EXCHANGE, request.round, request.exchange)
        if not request.sums:
            return exchanges.at(context)
        if exchanges.leave_out is None:
            raise RefusalError(Code.LEAVE_OUT)
        return exchanges.leave_out

    def _query(self, request: Request) -> ClientQuery[Any]:
        if request.question not in ("scores", "calibration", "decisions", "further decisions"):
            raise RefusalError(Code.QUERY, detail=request.question)
        if request.question == "scores":
            return self.evaluator
        data = self.data
        if data.images.kind == "classification":
            raise RefusalError(Code.QUERY, detail=f"{request.question} about classes")
        if unknown := sorted(set(self.facts.held) - set(request.names)):
            raise RefusalError(Code.PRODUCT, detail=unknown[0])
        if request.question == "calibration":
            scores = calibration_scores(
                self.config, data.images, data.partition, data.module, self.fabric, self.method
            )
            return CalibrationQuery(request.names, scores)
        images, shipped = evaluated_images(self.config, data), request.question == "decisions"

        def scored(client: Client) -> Tensor:
            predicted = self._predictions(client, request)
            if shipped:
                self._report(predicted, request, images)
            return predicted.scores

        return DecisionsQuery(request.names, request.numbers, images, scored, shipped)

    def _predictions(self, client: Client, request: Request) -> Predicted:
        """Returns the predictions of the test images: those that metrics were computed from, or else computes them."""
        after = request.round, digest(self.message)
        if self.predicted[0] != after:
            self.predicted = after, self.evaluator.predicted(self.evaluator(client, request.client))
        predicted = self.predicted[1]
        assert predicted is not None
        return predicted

    def _check_calibration(self, images: int) -> None:
        """Refuses to count the scores of fewer images than the policy asks for."""
        if images < self.settings.policy.images and not self.told_scalars:
            raise RefusalError(Code.FEW, images, self.settings.policy.images)

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

    def _report(self, predicted: Predicted, request: Request, images: EvaluatedImages) -> None:
        """Writes the site's own report; a failure ends no round."""
        report = OwnReport(self.settings.folder / "reports" / request.run, self.config, self.data, images)
        try:
            self.display.note(f"report: {report.write(predicted, request.numbers)}")
        except (OSError, ValueError, UserError) as error:
            self.display.warn(f"{report.folder}: no report was written ({first_line(error)})")


def _told(disclosed: Disclosures) -> str:
    return ", ".join(f"{part.kind.words}: {part.what}" for part in disclosed)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _whole(config: Config, images: Images, settings: SiteSettings, client: int) -> Partition:
    """Gives all training images to the client of this number, at once or in the site's stages."""
    if not settings.stages:
        return Partition.of_clients([*([()] * client), training_indices(images)])
    if config["federation"].get("secure_sum") or config["federation"].get("privacy"):
        raise RefusalError(Code.STAGES, detail="sums of stages are neither masked nor noised")
    return Partition.in_stages([*([[()]] * client), training_stages(images, settings.stages)])

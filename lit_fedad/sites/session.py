"""A site's session in one run: it carries out requests with the site's client, images and states, as policy allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Context, Exchange, Message, disclosed_by
from lit_fedad.contracts.disclosure import Disclosures, Kind, counted
from lit_fedad.contracts.state import state_of
from lit_fedad.core.building import build
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.nested import hash_of
from lit_fedad.evaluation.calibration import CalibrationQuery, calibration_scores
from lit_fedad.evaluation.decisions import DecisionsQuery, EvaluatedImages
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.build import build_data, tells_products
from lit_fedad.experiment.datasets import data_digest, hashes_file
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.federations import build_evaluator
from lit_fedad.experiment.finished_run import TrainedClient
from lit_fedad.federation.channel import LARGEST_BLOB, Link, Plain
from lit_fedad.federation.client_runner import ClientRunner, pose_client
from lit_fedad.federation.evaluator import ClientQuery
from lit_fedad.federation.processes import make_fabric
from lit_fedad.privacy.messages import read_survivors
from lit_fedad.privacy.protocol import Party
from lit_fedad.privacy.secure_aggregation import Mask
from lit_fedad.report.console import Display
from lit_fedad.sites.claims import CLAIMS, Claims, TrainingImages
from lit_fedad.sites.enrolment import facts_to_agree
from lit_fedad.sites.messages import LONGEST_SHARES, Reply, Request, digest
from lit_fedad.sites.offer import APPROVED, Approvals, Offer, judge
from lit_fedad.sites.overrides import agreed_hash
from lit_fedad.sites.refusals import Code, RefusalError
from lit_fedad.sites.settings import LOSS, SiteSettings, not_allowed
from lit_fedad.sites.site_files import SiteDetector, SiteReport
from lit_fedad.sites.site_noise import Asked, check_promise
from lit_fedad.sites.site_part import SitePart
from lit_fedad.sites.states import States, digest_of

ENROLMENT = counted("numbers of images by product or class, with their names")
"""What a site discloses when it says who it is."""


class Session:
    """A site's session in one run.

    Args:
        request: Any request of the run.
        settings: The settings of the site.
        display: Shows the operator what happens.

    Raises:
        RefusalError: If the site takes no part in such a run.

    Attributes:
        largest: Most bytes of a message of the run's coordinator.
    """

    def __init__(self, request: Request, settings: SiteSettings, display: Display) -> None:
        policy, number = settings.policy, request.client
        self.settings, self.display = settings, display
        self._check((ENROLMENT,), request)  # a site that may not say who it is takes part in no run
        self.run, self.number, self.classes = request.run, number, request.classes
        config, offered = Offer(request.overrides, request.classes).composed(settings)
        self.approved = Approvals(settings.folder / APPROVED).check(offered)
        check_promise(config, settings.epsilon)
        self.secure = build(config["federation"].get("secure_sum"), "federation.secure_sum")
        if (self.secure is not None) != (settings.key_registry is not None):
            raise RefusalError(Code.SECURE if self.secure is None else Code.REGISTRY)
        self.claims = Claims(settings.folder / CLAIMS)
        self.fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
        self.part = part = SitePart(config, settings, number, request.classes, request.products)
        self.config, model = part.config, part.model
        self.facts = replace(part.facts, torch=torch.__version__, **facts_to_agree(config, model))
        self.digest = data_digest(part.images, part.partition, hashes_file(self.config), display)
        self.states = States(
            settings.folder / "states" / request.run,
            state_of(model.client),
            number=str(number),  # the hash of the images depends on it, and would name another cause
            images=self.digest,
            model=f"{self.facts.backbone} {self.facts.initial}",
        )
        self.party: Party | None = None
        self.message = b""
        self.summand: _Summand | None = None
        self.sites: list[str] = []  # of the last secure sum
        self.least = part.fewest()
        self.sends_scalars = self.approved is not None or policy.allows(LOSS, self.least)
        self.products: Sequence[str] | None = None

    def settle(self, products: Sequence[str]) -> None:
        """Builds what depends on the products that the model tells apart, and judges what would leave the site.

        Args:
            products: Names of all sites' products; none before sites have named theirs, or if none are told apart.

        Raises:
            RefusalError: If the site takes no part in such a run.
        """
        if products == self.products:
            return
        config, part, settings = self.config, self.part, self.settings
        self.products_known = bool(products) or not tells_products(config)
        self.configuration = hash_of([agreed_hash(config), part.form, self.classes, products, self.number])
        if self.products_known:
            self.claims.check_run(self.run, self.configuration)
        part.tell_apart(products)
        self.method, self.client = part.model.method, part.model.client
        client, channel = self.client, build(config["federation"]["channel"], "federation.channel")
        self.runner = ClientRunner(client, channel, self.fabric)
        if (noise := part.noise(self.states.folder, self.digest)) is not None:
            noise.check()
            self.display.note(f"run {self.run}: {noise.words}")
        self.noise, taken = noise, part.taken(noise)
        judge(settings.policy, taken, self.least, self.approved)
        kinds = {item.disclosed.kind for item in taken}
        self.trained = TrainingImages(
            part.summed(any(item.disclosed.by_product for item in taken)),
            hash_of([config["seed"], self.number, config["method"], part.summed(by_product=False)])
            if Kind.MEAN_IMAGES in kinds
            else "",
        )
        exchanges = part.declared(noise)
        every = [*exchanges.setup, *exchanges.rounds, *([exchanges.leave_out] if exchanges.leave_out else [])]
        specs = [exchange.broadcast_spec(client) for exchange in every]
        max_bytes = max(map(channel.down.largest, specs)) + (LONGEST_SHARES if self.secure else 0)
        self.largest = min(LARGEST_BLOB, max_bytes) if self.products_known else LARGEST_BLOB
        # Predictions on the test images, after the round and hash of the message with which they were made.
        self.predicted: tuple[tuple[int, str], Predicted | None] = (0, ""), None
        self.detector: SiteDetector | None = None
        if not client.predictors.shared:
            folder = settings.folder / "detectors" / self.run
            self.detector = SiteDetector(folder, part, self.classes or products or self.facts.held)
        self.products, self.prepared = products, False

    def prepare(self) -> None:
        """Builds the data and the evaluator once, when the coordinator first asks for more than who the site is.

        The features of all images take time and disk space: a site with another backbone is refused before that.
        """
        if self.prepared:
            return
        part = self.part
        self.data = build_data(
            self.config, part.images, part.partition, part.model, self.fabric, self.display
        )
        self.evaluator = build_evaluator(self.config, self.data, self.method, self.fabric, common=False)
        if self.evaluator.local:
            raise UserError(f"{type(self.evaluator).__name__}: no metric state of it can cross")
        self.prepared = True

    def answer(self, request: Request) -> tuple[Reply, str]:
        """Carries out a request.

        Returns:
            The reply, and what it discloses of images, for the site's log.

        Raises:
            RefusalError: If the site refuses the request.
        """
        if request.kind == "hello":
            return Reply(facts=self.facts), _in_words((ENROLMENT,))
        if not self.products_known:
            raise RefusalError(Code.PRODUCT, detail="the request names none")
        self.prepare()  # it may fail, and then nothing must have been noted
        policy = self.settings.policy
        self.claims.begin(
            self.run, self.configuration, self._noised, policy.runs, self.trained, policy.images
        )
        self.states.begin()
        if request.kind == "offer":
            return Reply(payload=self._offer(request)), "keys"
        if request.kind == "reveal":
            return Reply(payload=self._reveal(request.payload)), "shares of keys"
        # A query after a round comes with the server's message and the number of the next round.
        data = self.data.module.at(request.round - (request.kind == "ask"))
        stage = data.stages[request.client]
        context = Context(self.config["seed"], request.round, request.client, request.exchange, stage)
        envelopes, blob = request.payload[: request.sealed], self._message(request)
        state = self.states.get(request.base)
        start = digest_of(state)  # not its step's number: a step may be repeated, and then has another state
        asked = Asked(self.facts.configuration, request.round, request.exchange, digest(blob), start)
        exchange = self._exchange(request, context, asked)
        try:
            self.runner.activate(exchange, context, state, blob)
        except UserError as error:
            raise RefusalError(Code.MESSAGE, detail=str(error)) from error
        # Noted only now: a message of another form has not touched the images, and must not count as answered.
        place = request.round, request.exchange, request.question or request.kind
        depends_on = [asked.message, start, request.numbers, request.names, request.sums]
        self.claims.answer(self.run, place, hash_of(depends_on))
        self.states.settle(request.settled, request.base)
        if request.kind == "play":
            if self.noise is not None:
                self.noise.pay(exchange, self.client, asked)
            mask = self._mask(exchange, envelopes, (request.round, request.exchange, exchange.name))
            result = self.runner.play(exchange, data, mask)
            self.states.put(request.step, state_of(self.client))
            scalars = dict(result.scalars) if self.sends_scalars and not self._noised else {}
            return Reply(scalars=scalars, payload=result.blob), _in_words(disclosed_by(exchange, self.client))
        query = self._query(request)
        self._check(query.discloses, request)
        scored = self.part.fewest_scored(request.question)
        if 0 < scored < policy.images and self.approved is None:
            raise RefusalError(Code.FEW, scored, policy.images)
        pose_client(self.client, "own", {}, data)
        payload = Link(Plain()).pack(self._answer(query, request, blob), query.spec(), context, "the client")
        return Reply(payload=payload), _in_words(query.discloses)

    def _answer(self, query: ClientQuery[Any], request: Request, blob: bytes) -> Message:
        """Asks the client a query, and stores what stays at the site: detector, predictions, calibration scores."""
        if request.keep:
            state = state_of(self.client)
            self.states.put(request.step, state)
            trained = TrainedClient(request.round, request.exchange, blob, state)
            self._keep(lambda detector: detector.write(trained))
        answer = query(self.client, request.client)
        if request.question == "scores":
            self.predicted = (request.round, digest(blob)), self.evaluator.predicted(answer)
        if request.question == "calibration":
            self._keep(lambda detector: detector.calibrate(answer))
        return query.pack(answer)

    def _check(self, disclosed: Disclosures, request: Request) -> None:
        """Refuses disclosures of kinds that the policy does not let out."""
        for part in disclosed:
            if part.kind.value not in self.settings.policy.allow:
                raise not_allowed(part, request.round, request.exchange)

    @property
    def _noised(self) -> bool:
        """Whether all that leaves the site has noise that the site draws and that hides single images."""
        return self.noise is not None and self.noise.hides

    def _message(self, request: Request) -> bytes:
        """Returns the server's message: from this request, or from the one before if the message is the same."""
        if not request.same:
            self.message = request.payload[request.sealed :]
        elif digest(self.message) != request.same:
            raise RefusalError(Code.AGAIN)
        return self.message

    def _offer(self, request: Request) -> bytes:
        """Accepts the invitation to a secure sum; returns this site's offer."""
        registry = self.settings.key_registry
        if registry is None:
            raise RefusalError(Code.REGISTRY)
        keys = registry.numbered(request.names, request.client)
        self.claims.fix(self.run, request.names)
        names, self.sites = ClientNames(dict(enumerate(request.names))), request.names
        if self.noise is not None:
            self.noise.share(self.secure, len(request.names))
        party = Party(request.client, registry.pair, keys, names)
        offer, invitation = party.offer(request.payload), party.invitation
        images, least = invitation.members[request.client], self.secure.quorum_of(len(invitation.members))
        if images != self.facts.size:
            raise RefusalError(Code.COUNT, images, self.facts.size)
        if invitation.quorum < least:
            raise RefusalError(Code.QUORUM, invitation.quorum, least)
        self.claims.invite(self.run, invitation.digest.hex())
        self.party = party
        return offer

    def _mask(self, exchange: Exchange, envelopes: bytes, place: tuple[int, int, str]) -> _Summand | None:
        """Returns the mask of the message to send; in a run of secure sums no message leaves the site without."""
        if self.secure is None or not exchange.upload_spec(self.client):
            return None
        if self.party is None:
            raise RefusalError(Code.MASK)
        mask = Mask(self.party, self.party.invitation, envelopes)
        self.summand = _Summand(mask, place)  # kept, as the request for shares may follow other requests
        return self.summand

    def _reveal(self, payload: bytes) -> bytes:
        """Reveals this site's shares for the sum to which it has contributed last."""
        if self.party is None:
            raise RefusalError(Code.PART)
        clients = read_survivors(payload)
        if self.noise is not None:
            self.noise.check_sum(clients)
        if not clients or not all(0 <= client < len(self.sites) for client in clients):
            raise RefusalError(Code.NAMES)
        if self.summand is None:
            raise RefusalError(Code.PART)
        names = [self.sites[client] for client in clients]
        self.claims.claim(self.run, self.summand.place, names, self._noised, self.summand.digest)
        return self.party.reveal(payload)

    def _exchange(self, request: Request, context: Context, asked: Asked) -> Exchange:
        """Returns the exchange of a request, with this site's noise around it."""
        exchanges = self.noise.exchanges(self.method, asked) if self.noise else self.method.exchanges
        last = self.config["rounds"] + (request.kind == "ask")
        has_round = exchanges.first_round <= request.round <= last
        if not has_round or request.exchange >= len(exchanges.of_round(request.round)):
            raise RefusalError(Code.EXCHANGE, request.round, request.exchange)
        if not request.sums:
            return exchanges.at(context)
        if exchanges.leave_out is None:
            raise RefusalError(Code.LEAVE_OUT)
        return exchanges.leave_out

    def _query(self, request: Request) -> ClientQuery[Any]:
        """Returns the query of a request's question."""
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
            if scores.leave_out is not None and not request.sums:
                raise RefusalError(Code.QUERY, detail="calibration without the model's sums")
            return CalibrationQuery(request.names, scores)
        images, shipped = evaluated_images(self.config, data), request.question == "decisions"

        def scored(client: Client) -> Tensor:
            predicted = self._predictions(client, request)
            if shipped:
                self._report(predicted, request, images)
            return predicted.scores

        return DecisionsQuery(request.names, request.numbers, images, scored, shipped)

    def _predictions(self, client: Client, request: Request) -> Predicted:
        """Returns the predictions on the test images: those behind the metrics of this model, or else new ones."""
        after = request.round, digest(self.message)
        if self.predicted[0] != after:
            self.predicted = after, self.evaluator.predicted(self.evaluator(client, request.client))
        predicted = self.predicted[1]
        assert predicted is not None
        return predicted

    def _keep(self, write: Callable[[SiteDetector], None]) -> None:
        """Stores a part of the site's own detector if models stay at the sites; a failure does not end the round."""
        if self.detector is None:
            return
        complete_before = self.detector.complete
        try:
            write(self.detector)
        except (OSError, UserError) as error:
            self.display.warn(f"no detector was kept ({first_line(error)})")
        else:
            if self.detector.complete and not complete_before:
                self.display.note(f"detector: lit-fedad predict run={self.detector.folder.path} images=DIR")

    def _report(self, predicted: Predicted, request: Request, images: EvaluatedImages) -> None:
        """Writes the site's own report; a failure does not end the round."""
        report = SiteReport(self.settings.folder / "reports" / request.run, self.config, self.data, images)
        try:
            self.display.note(f"report: {report.write(predicted, request.numbers)}")
        except (OSError, ValueError, UserError) as error:
            self.display.warn(f"{report.folder}: no report was written ({first_line(error)})")


@dataclass
class _Summand:
    """The site's message in a secure sum, which its shares would help to unmask.

    Attributes:
        mask: The mask of the message.
        place: Round, index and name of its exchange.
        digest: Hash of the message; empty before it is masked, and if it holds zeros alone and so tells nothing.
    """

    mask: Mask
    place: tuple[int, int, str]
    digest: str = ""

    def pack(self, message: Message, exchange: Exchange, client: Client) -> bytes:
        """Masks a message and serialises it."""
        self.digest = digest_of(message) if any(bool(entry.any()) for entry in message.values()) else ""
        return self.mask.pack(message, exchange, client)


def _in_words(disclosed: Disclosures) -> str:
    return ", ".join(f"{part.kind.words}: {part.what}" for part in disclosed)

"""The only round loop: pick, broadcast, fit, send, aggregate, evaluate, report, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Message, Server, Update
from lit_fedad.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.channel import Channel, elements
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool, State, detached
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.participation import Participation
from lit_fedad.federation.processes import all_cores, collect, deal, share

T = TypeVar("T")


class ClientData(Protocol):
    """Training data by client; who inherits from this holds the same in every round."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients go on to other tasks: these are evaluated."""
        return frozenset()

    @property
    def stages(self) -> Mapping[int, int]:
        """Which of its tasks each client is at, where there are several."""
        return dict.fromkeys(self.sizes, 0)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Training batches of a client."""

    def at(self, round: int) -> ClientData:
        """What the clients hold in a round."""
        return self


@dataclass
class RoundReport:
    """What one round did: one exchange before round 1, or all exchanges of a round.

    Attributes:
        round: Number; set-up exchanges count up to 0.
        phase: ``"train"``, or the name of the set-up exchange.
        participants: Clients that finished.
        failures: Causes by client that failed.
        scalars: Loss and diagnostics: means over clients, weighted by their images.
        per_client: Loss and diagnostics by client.
        bytes_up: Bytes that each client sent.
        bytes_down: Bytes that each client was sent.
        elements_up: Numbers that each client sent.
        seconds: Wall-clock time without evaluation.
        trained: What the evaluator made of clients with the weights that they had just trained, where it asked.
        metrics: Evaluation after this round; None where none was due.
        warnings: Lines for the user.
    """

    round: int
    phase: str
    participants: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    per_client: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    elements_up: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    trained: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class Visit:
    """What a process brings back from one client: the bytes it sent, or the cause of its failure."""

    blob: bytes = b""
    elements: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    trained: Any = None
    error: str | None = None


class Federation:
    """Runs the rounds of any method.

    Args:
        server: The method's server side.
        client: The method's client side; one live object for all clients of this process.
        data: Training data by client.
        evaluator: Scores clients.
        fabric: Launched.
        rounds: Training rounds T.
        seed: The experiment's seed.
        checkpoints: Where the run's state is kept.
        pool: Personal states.
        participation: Who takes part, and what a failure means.
        channel: Carries the messages.
        evaluate_every: Evaluate after round 0, every so many rounds, and after the last.
        on_round: Called on the first process after each exchange, before its checkpoint.
        on_saved: The same, once the checkpoint is complete: what it raises ends a run that can be continued.
        on_updates: Called on the first process with what clients sent in an exchange, before the server takes it in;
            its state is still the one that it broadcast. `overhear` may be called there.
        on_visit: Called in every process after each visit to a client, to train or to score it, with the number
            of this process's visits done and of all in the run.

    Raises:
        UserError: If there is no exchange to play.
    """

    def __init__(
        self,
        server: Server,
        client: Client,
        data: ClientData,
        evaluator: Evaluator,
        fabric: Fabric,
        rounds: int,
        seed: int,
        checkpoints: Checkpoints,
        pool: ClientPool,
        participation: Participation,
        channel: Channel,
        evaluate_every: int = 1,
        on_round: Callable[[RoundReport], None] = lambda report: None,
        on_saved: Callable[[RoundReport], None] = lambda report: None,
        on_updates: Callable[[Context, Mapping[int, Update]], None] = lambda context, updates: None,
        on_visit: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.server, self.client, self.data, self.evaluator = server, client, data, evaluator
        self.fabric, self.rounds, self.seed = fabric, rounds, seed
        self.checkpoints, self.pool = checkpoints, pool
        self.participation, self.channel = participation, channel
        self.evaluate_every, self.on_round, self.on_visit = evaluate_every, on_round, on_visit
        self.on_updates, self.on_saved = on_updates, on_saved
        if rounds < 1 and not server.setup:
            raise UserError(f"rounds={rounds}: this method does nothing before round 1; give at least 1")
        self.clients = sorted(client for client, size in data.sizes.items() if size > 0)
        server.fabric = fabric
        server.enrol({client: data.sizes[client] for client in self.clients})
        hands = deal({c: data.sizes[c] for c in self.clients}, fabric.world_size)
        self.mine = set(hands[fabric.global_rank])
        self.history: list[RoundReport] = []
        self._visits = self._visits_done = 0

    @property
    def first_round(self) -> int:
        """Number of the first exchange: at most 1, lower by one for every set-up exchange."""
        return 1 - len(self.server.setup)

    def run(self) -> list[RoundReport]:
        """Plays all rounds that are not in the last checkpoint.

        Returns:
            One report an exchange, also of those before a resumption. Complete on the first process only.

        Raises:
            UserError: If a client fails and the policy is to stop, or too few clients remain.
        """
        rounds = range(self.resume(), self.rounds + 1)
        self._visits, self._visits_done = sum(self._visits_in(round) for round in rounds), 0
        for round in rounds:
            report = self.play(round)
            if self.fabric.is_global_zero:
                self.history.append(report)
            if self._evaluation_due(round):
                report.metrics = self.evaluate(round)
            if self.fabric.is_global_zero:
                self.on_round(report)
            self.save(round)
            if self.fabric.is_global_zero:
                self.on_saved(report)
        return self.history

    def play(self, round: int) -> RoundReport:
        """One round, of one or several exchanges between the server and the clients it picks."""
        began = time.perf_counter()
        context = Context(self.seed, round)
        self.server.begin(context)
        report = RoundReport(round, self.server.phase, self.participation.pick(self.clients, context))
        for exchange in range(self._exchanges(round)):
            self._exchange(replace(context, exchange=exchange), report)
        if self.fabric.is_global_zero:
            report.scalars.update(self.server.diagnostics())
            report.warnings += self.server.warnings()
        report.seconds = time.perf_counter() - began
        return report

    def evaluate(self, round: int) -> dict[str, Any] | None:
        """Scores the clients after a round, the last one played; metrics on the first process only."""
        asked = self.evaluator.asked(self.client, self.clients)
        self._visits = max(self._visits, self._visits_done + len(self.mine.intersection(asked)))
        return self.evaluator.evaluate(self, round)

    def ask(
        self,
        round: int,
        question: Callable[[Client, int], T],
        clients: list[int] | None = None,
        lent: Message | None = None,
    ) -> dict[int, T]:
        """Puts a question to clients, as they predict after a round with what the server would send them next.

        Args:
            round: The last round played.
            question: Called with the live client and its number.
            clients: Whom to ask; None for every client.
            lent: Given, clients predict as the server's model does, completed by this (`Client.deploy_shared`).

        Returns:
            Answers by client, on the first process only.
        """
        context = Context(self.seed, round + 1)
        self.server.begin(context)
        data = self.data.at(round)
        asked = self.clients if clients is None else clients
        letters = self._letters(asked, context)
        answers = {}
        for client in sorted(self.mine.intersection(asked)):
            self.enter(replace(context, client=client, stage=data.stages[client]), letters[client])
            if lent is None:
                self.client.deploy()
            else:
                self.client.deploy_shared(lent)
            self.client.adapt(_fixed_order(data, client))
            if round == self.rounds and lent is None:
                # No round follows: what predicts now, bank and all, is what the checkpoint keeps for new images.
                self.pool.put(client, self.client.personal_state())
            answers[client] = question(self.client, client)
            self._count_visit()
        return collect(self.fabric, answers)

    def lent(self, round: int) -> Message:
        """The mean over what clients lend to the server's model after a round, on every process."""
        if not self.client.lend():
            return {}
        sizes = self.data.at(round).sizes
        lent = self.ask(round, lambda client, _: client.lend())
        mean = weighted_mean({c: Update(own, sizes[c]) for c, own in lent.items()}) if lent else {}
        return share(self.fabric, mean)

    def over_processes(self, value: T) -> list[T]:
        """A value of every process, on the first one only."""
        return list(collect(self.fabric, {self.fabric.global_rank: value}).values())

    def enter(self, context: Context, letter: bytes) -> None:
        """Turns the live model into one client, as it is after the server's message."""
        assert context.client is not None
        self._take_place(context, self.pool.get(context.client), letter)

    def overhear(self, client: int, update: Update) -> Client:
        """Turns the live model into what an observer of an upload makes of it (`Server.observe`).

        Args:
            client: Who sent it in this exchange.
            update: What it sent.
        """
        context, data = self.server.context, self.data.at(self.server.context.round)
        message, payload = self.server.broadcast(client), self.server.download_payload()
        letter = self.channel.pack(message, payload, self.channel.down, context, "the server")
        context = replace(context, client=client, stage=data.stages[client])
        self._take_place(context, detached(self.pool.initial), letter)
        self.server.observe(update, self.client)
        self.client.eval()
        return self.client

    def resume(self) -> int:
        """Restores the last checkpoint, if there is one.

        Returns:
            The number of the next exchange.
        """
        latest = self.checkpoints.latest()
        if latest is None:
            return self.first_round
        round, state = self.checkpoints.load(latest)
        self.server.load_state_dict(state["server"])
        self.history = state["history"]
        self.pool.restore(latest, self.mine)
        return round + 1

    def save(self, round: int) -> None:
        """Writes a checkpoint: every process its clients, the first one the server."""
        previous = self.checkpoints.latest()
        if self.fabric.is_global_zero:
            self.checkpoints.begin(round)
        folder = share(self.fabric, self.checkpoints.partial(round))
        self.pool.save(folder, previous)
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            state = {"server": self.server.state_dict(), "history": self.history}
            self.checkpoints.commit(round, state)
        self.fabric.barrier()

    def _take_place(self, context: Context, state: State, letter: bytes) -> None:
        self.client.begin(context)
        self.client.load_personal_state(state)
        self.client.receive(self.channel.unpack(letter, self.channel.down))
        self.client.to(self.fabric.device)
        self.client.eval()

    def _exchanges(self, round: int) -> int:
        return len(self.server.exchanges) if round > 0 else 1

    def _visits_in(self, round: int) -> int:
        picked = self.mine.intersection(self.participation.pick(self.clients, Context(self.seed, round)))
        asked = self.mine.intersection(self.evaluator.asked(self.client, self.clients))
        return len(picked) * self._exchanges(round) + len(asked) * self._evaluation_due(round)

    def _count_visit(self) -> None:
        self._visits_done += 1
        self.on_visit(self._visits_done, max(self._visits, self._visits_done))

    def _evaluation_due(self, round: int) -> bool:
        return round >= 0 and (
            round % self.evaluate_every == 0 or round == self.rounds or round in self.data.milestones
        )

    def _last_before_evaluation(self, client: int, round: int) -> bool:
        """Whether a client is not visited again before the next evaluation."""
        while not self._evaluation_due(round):
            round += 1
            if client in self.participation.pick(self.clients, Context(self.seed, round)):
                return False
        return True

    def _letters(self, clients: list[int], context: Context) -> dict[int, bytes]:
        """The server's serialised messages by client, on every process; equal messages are packed once."""
        letters: dict[int, bytes] = {}
        if self.fabric.is_global_zero:
            packed: dict[tuple[Any, ...], bytes] = {}
            kept = []  # so that no two tensors have the same id
            payload = self.server.download_payload()
            for client in clients:
                message = self.server.broadcast(client)
                kept.append(message)
                key = tuple((name, id(tensor)) for name, tensor in message.items())
                if key not in packed:
                    packed[key] = self.channel.pack(
                        message, payload, self.channel.down, context, "the server"
                    )
                letters[client] = packed[key]
        return share(self.fabric, letters)

    def _exchange(self, context: Context, report: RoundReport) -> None:
        """Letters to the participants, a visit to each, and their answers taken in.

        Who fails in one exchange of a round is left out of those that follow.
        """
        self.server.begin(context)
        letters = self._letters(report.participants, context)
        _add(report.bytes_down, {client: len(letter) for client, letter in letters.items()})
        visits = {}
        for client in report.participants:
            if client in self.mine:
                visits[client] = self._visit(replace(context, client=client), letters[client])
                self._count_visit()
        visits = collect(self.fabric, visits)
        refusal = None
        if self.fabric.is_global_zero:
            try:
                self._take_in(report, visits)
            except UserError as error:
                refusal = str(error)
        # Only the first process knows the outcome: a refused round must end all of them.
        refusal = share(self.fabric, refusal)
        if refusal:
            raise UserError(refusal)
        report.participants = share(self.fabric, report.participants)

    def _visit(self, context: Context, letter: bytes) -> Visit:
        """One client's part of an exchange; a failure is brought back, not raised, so that the policy can decide."""
        visit = Visit()
        assert context.client is not None
        client, data = context.client, self.data.at(context.round)
        context = replace(context, stage=data.stages[client])
        try:
            self.enter(context, letter)
            trains = self.client.phase == "train"
            if trains:
                self.client.adapt(_fixed_order(data, client))
                loader = data.client_loader(client, context.generator("batches"))
                with context.seeded("fit"):
                    visit.scalars = self.client.fit(loader, self.fabric)
            with context.seeded("send"):
                message = self.client.send(_fixed_order(data, client))
            payload = self.server.upload_payload()
            visit.blob = self.channel.pack(message, payload, self.channel.up, context, "the client")
            visit.elements = elements(message)
            self.pool.put(client, self.client.personal_state())
            wanted = trains and self.evaluator.after_fit and self.client.own_model
            if wanted and self._last_before_evaluation(client, context.round):
                self.client.deploy()
                visit.trained = self.evaluator.score(self.client, client)
        except UserError as error:
            visit.error = str(error)
        except (RuntimeError, ValueError, OSError, ArithmeticError) as error:
            visit.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return visit

    def _take_in(self, report: RoundReport, visits: dict[int, Visit]) -> None:
        failures = {c: visit.error for c, visit in visits.items() if visit.error is not None}
        good = {c: visit for c, visit in visits.items() if visit.error is None}
        report.failures |= failures
        report.participants = list(good)
        _add(report.bytes_up, {c: len(visit.blob) for c, visit in good.items()})
        _add(report.elements_up, {c: visit.elements for c, visit in good.items()})
        report.warnings += [f"round {report.round}: client {c} left out: {e}" for c, e in failures.items()]
        self.participation.settle(len(good), report.failures, report.round)
        report.trained |= {c: visit.trained for c, visit in good.items() if visit.trained is not None}
        sizes = self.data.at(report.round).sizes
        updates = {c: Update(self.channel.unpack(v.blob, self.channel.up), sizes[c]) for c, v in good.items()}
        self.on_updates(self.server.context, updates)
        with all_cores(self.fabric):
            self.server.aggregate(updates)
        scalars = {c: visit.scalars for c, visit in good.items()}
        for name in dict.fromkeys(name for known in scalars.values() for name in known):
            known = {c: s[name] for c, s in scalars.items() if name in s}
            total = sum(sizes[c] for c in known)
            report.scalars[name] = sum(sizes[c] * value for c, value in known.items()) / total
        if self.server.phase == report.phase:
            report.per_client = scalars


def _fixed_order(data: ClientData, client: int) -> DataLoader:
    return data.client_loader(client, torch.Generator(), shuffle=False)


def _add(totals: dict[int, int], counts: Mapping[int, int]) -> None:
    for client, count in counts.items():
        totals[client] = totals.get(client, 0) + count

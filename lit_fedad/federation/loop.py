"""The only round loop: sample, broadcast, fit, send, aggregate, evaluate, report, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import (
    AttackableServer,
    Client,
    Context,
    Exchange,
    Message,
    Server,
    Update,
    nothing_to_attack,
)
from lit_fedad.contracts.kept_state import read_kept, write_kept
from lit_fedad.errors import UserError
from lit_fedad.federation.aggregation import mean_scalars, weighted_mean
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_data import ClientData
from lit_fedad.federation.client_pool import ClientPool, detached
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.processes import all_cores, gather, shard
from lit_fedad.federation.round_report import RoundReport, add_counts
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.federation.turn import ClientResult, Turn, ordered_loader

T = TypeVar("T")


class Federation:
    """A federation of all clients in the processes of one Fabric, which runs the rounds of any method.

    Args:
        server: The method's server side.
        client: The method's client side; one live object for all clients of this process.
        data: Training data by client.
        evaluator: Scores clients.
        fabric: A launched Fabric; its callbacks may implement the hooks of `FederationCallback`.
        rounds: Training rounds T.
        seed: The experiment's seed.
        checkpoints: Store of the run's state.
        pool: Store of the clients' personal states.
        sampler: Samples the clients of a round, and accepts or rejects a round with failures.
        channel: Encodes, checks and counts messages.
        evaluate_every: Rounds between evaluations; rounds 0 and T are always evaluated.

    Raises:
        UserError: If there is no exchange to run.
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
        sampler: ClientSampler,
        channel: Channel,
        evaluate_every: int = 1,
    ) -> None:
        self.server, self.client, self.data, self.evaluator = server, client, data, evaluator
        self.fabric, self.rounds, self.seed = fabric, rounds, seed
        self.checkpoints, self.pool = checkpoints, pool
        self.sampler, self.channel, self.evaluate_every = sampler, channel, evaluate_every
        self.exchanges = client.exchanges
        if rounds < 1 and not self.exchanges.setup:
            raise UserError(f"rounds={rounds}: this method does nothing before round 1; give at least 1")
        self.turn = Turn(client, channel, fabric)
        self.clients = sorted(client for client, size in data.sizes.items() if size > 0)
        server.fabric = fabric
        server.register_clients({client: data.sizes[client] for client in self.clients})
        shards = shard({c: data.sizes[c] for c in self.clients}, fabric.world_size)
        self.mine = set(shards[fabric.global_rank])
        self.history: list[RoundReport] = []
        self._turns = self._turns_done = 0

    def run(self) -> list[RoundReport]:
        """Runs all rounds after the last checkpoint.

        Returns:
            One report per round, including rounds before the run was resumed. Complete on the first process only.

        Raises:
            UserError: If a client fails and the policy is to stop, or too few clients remain.
        """
        rounds = range(self.resume(), self.rounds + 1)
        self._turns, self._turns_done = sum(self._turns_in(round) for round in rounds), 0
        for round in rounds:
            report = self.play(round)
            if self.fabric.is_global_zero:
                self.history.append(report)
            if self._evaluation_due(round):
                report.metrics = self.evaluate(round)
            self._call("on_round_end", report)
            self.save(round)
            self._call("on_checkpoint", report)
        return self.history

    def play(self, round: int) -> RoundReport:
        """Runs one round, that is all its exchanges with the sampled clients; returns its report without metrics."""
        began = time.perf_counter()
        context = Context(self.seed, round)
        self.server.begin(context)
        exchanges = self.exchanges.of_round(round)
        report = RoundReport(round, exchanges[0].name, self.sampler.sample(self.clients, context))
        for number, exchange in enumerate(exchanges):
            self._exchange(exchange, replace(context, exchange=number), report)
        if self.fabric.is_global_zero:
            report.scalars.update(self.server.diagnostics())
            report.warnings += self.server.warnings()
        report.seconds = time.perf_counter() - began
        return report

    def evaluate(self, round: int) -> dict[str, Any] | None:
        """Scores the clients after the last finished round; returns metrics on the first process, None elsewhere."""
        asked = self.evaluator.asked(self.client, self.clients)
        self._turns = max(self._turns, self._turns_done + len(self.mine.intersection(asked)))
        found = self.evaluator.evaluate(self, round)
        if found is None:
            return None
        if found.trained is not None and self.history:
            self.history[-1].trained = found.trained
        return found.metrics

    def ask(
        self,
        round: int,
        question: Callable[[Client, int], T],
        clients: list[int] | None = None,
        which: Literal["own", "server"] = "own",
    ) -> dict[int, T]:
        """Calls a function with clients as they predict after a round, with the server's next message to them.

        Args:
            round: The last finished round.
            question: The function, of the live client and its number.
            clients: Client numbers; None for all clients.
            which: Whether clients predict with their own model or with the server's.

        Returns:
            Values by client; empty on all processes but the first.
        """
        lent = self._lent(round) if which == "server" else {}

        def deploy_and_ask(client: Client, number: int) -> T:
            client.deploy(which)
            if lent:
                client.task.load_state_dict(lent, strict=False)
            client.refresh(ordered_loader(self.data.at(round), number))
            if round == self.rounds and which == "own":
                # No round follows: what predicts now, bank and all, is what the checkpoint keeps for new images.
                self.pool.put(number, read_kept(client))
            return question(client, number)

        return self._ask(round, deploy_and_ask, self.clients if clients is None else clients)

    def adversary_view(self, client: int, update: Update) -> Client:
        """Turns the live client into the predictor that an observer of an upload can build (`AttackableServer`).

        Args:
            client: Number of the client that sent the upload in this exchange.
            update: The upload.

        Returns:
            The live client.

        Raises:
            UserError: If uploads of this method cannot score images.
        """
        if not isinstance(self.server, AttackableServer):
            raise nothing_to_attack(self.client)
        context = self.server.context
        exchange = self.exchanges.at(context)
        blob = self._broadcast(exchange, [client], context)[client]
        context = replace(context, client=client, stage=self.data.at(context.round).stages[client])
        self.turn.activate(exchange, context, detached(self.pool.initial), blob)
        self.server.adversary_view(update, self.client)
        self.client.eval()
        return self.client

    def over_processes(self, value: T) -> list[T]:
        """Gathers the value of every process in a list on the first process; empty on the others."""
        return list(gather(self.fabric, {self.fabric.global_rank: value}).values())

    def resume(self) -> int:
        """Restores the last checkpoint, if there is one.

        Returns:
            The number of the next round.
        """
        latest = self.checkpoints.latest()
        if latest is None:
            return self.exchanges.first_round
        round, state = self.checkpoints.load(latest)
        write_kept(self.server, state["server"])
        self.history = state["history"]
        self.pool.restore(latest, self.mine)
        return round + 1

    def save(self, round: int) -> None:
        """Writes a checkpoint: every process writes its clients' states, the first also the server's."""
        previous = self.checkpoints.latest()
        if self.fabric.is_global_zero:
            self.checkpoints.begin(round)
        folder = self.fabric.broadcast(self.checkpoints.partial(round))
        self.pool.save(folder, previous)
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            state = {"server": read_kept(self.server), "history": self.history}
            self.checkpoints.commit(round, state)
        self.fabric.barrier()

    def _exchange(self, exchange: Exchange, context: Context, report: RoundReport) -> None:
        """Runs one exchange. Clients that fail in it are left out of the round's later exchanges."""
        self.server.begin(context)
        blobs = self._broadcast_everywhere(exchange, report.participants, context)
        add_counts(report.bytes_down, {client: len(blob) for client, blob in blobs.items()})
        results = {}
        for client in report.participants:
            if client in self.mine:
                results[client] = self._play_turn(exchange, replace(context, client=client), blobs[client])
                self._count_turn()
        results = gather(self.fabric, results)
        refusal = None
        if self.fabric.is_global_zero:
            try:
                self._collect(exchange, report, results)
            except UserError as error:
                refusal = str(error)
        # The error is raised on the first process only, but a refused round must end all processes.
        refusal = self.fabric.broadcast(refusal)
        if refusal:
            raise UserError(refusal)
        report.participants = self.fabric.broadcast(report.participants)

    def _broadcast_everywhere(
        self, exchange: Exchange, clients: list[int], context: Context
    ) -> dict[int, bytes]:
        """Serialises the server's messages on the first process, for every process.

        Raises:
            UserError: On every process, if a message differs from its declared form.
        """
        blobs, refusal = {}, None
        if self.fabric.is_global_zero:
            try:
                blobs = self._broadcast(exchange, clients, context)
            except UserError as error:
                refusal = str(error)
        blobs, refusal = self.fabric.broadcast((blobs, refusal))
        if refusal:
            raise UserError(refusal)
        return blobs

    def _broadcast(self, exchange: Exchange, clients: list[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client; equal messages are serialised once."""
        blobs: dict[int, bytes] = {}
        packed: dict[tuple[Any, ...], bytes] = {}
        kept = []  # so that no two tensors have the same id
        spec = exchange.broadcast_spec(self.client)
        for client in clients:
            message = exchange.broadcast(self.server, client)
            kept.append(message)
            key = tuple((name, id(tensor)) for name, tensor in message.items())
            if key not in packed:
                packed[key] = self.channel.down.pack(message, spec, context, "the server")
            blobs[client] = packed[key]
        return blobs

    def _play_turn(self, exchange: Exchange, context: Context, blob: bytes) -> ClientResult:
        """Runs one client's turn; a failure is returned, not raised, so that the sampler's policy applies."""
        assert context.client is not None
        client, data = context.client, self.data.at(context.round)
        context = replace(context, stage=data.stages[client])
        try:
            self.turn.activate(exchange, context, self.pool.get(client), blob)
            result = self.turn.play(exchange, data)
            self.pool.put(client, read_kept(self.client))
            scored = exchange.trains and self.evaluator.after_fit and self.client.predictors.own
            if scored and self._last_before_evaluation(client, context.round):
                self.client.deploy()
                result.trained = self.evaluator.score(self.client, client)
        except UserError as error:
            return ClientResult(error=str(error))
        except (RuntimeError, ValueError, OSError, ArithmeticError) as error:
            return ClientResult(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return result

    def _collect(self, exchange: Exchange, report: RoundReport, results: dict[int, ClientResult]) -> None:
        """Checks the clients' messages and merges them on the server."""
        sizes, spec = self.data.at(report.round).sizes, exchange.upload_spec(self.client)
        updates: dict[int, Update] = {}
        for client, result in results.items():
            try:
                if result.error is not None:
                    raise UserError(result.error)
                updates[client] = Update(
                    self.channel.up.unpack(result.blob, spec, "the client"), sizes[client]
                )
            except UserError as error:
                report.failures[client] = str(error)
                report.warnings.append(f"round {report.round}: client {client} left out: {error}")
        good = {client: results[client] for client in updates}
        report.participants = list(good)
        add_counts(report.bytes_up, {c: len(result.blob) for c, result in good.items()})
        add_counts(report.elements_up, {c: result.elements for c, result in good.items()})
        self.sampler.check_failures(len(good), report.failures, report.round)
        report.trained |= {c: result.trained for c, result in good.items() if result.trained is not None}
        self._call("on_updates", self.server.context, updates)
        with all_cores(self.fabric):
            exchange.aggregate(self.server, updates)
        scalars = {c: result.scalars for c, result in good.items()}
        report.scalars |= mean_scalars(scalars, sizes)
        if exchange.name == report.exchange:
            report.per_client = scalars

    def _lent(self, round: int) -> Message:
        """Returns the clients' mean of `Predictors.lent` after a round, on every process."""
        names = self.client.predictors.lent
        if not names:
            return {}

        def lend(client: Client, number: int) -> Message:
            client.deploy()
            client.refresh(ordered_loader(self.data.at(round), number))
            state = client.task.state_dict()
            return {name: state[name].detach().to("cpu", copy=True) for name in names}

        sizes = self.data.at(round).sizes
        lent = self._ask(round, lend, self.clients)
        mean = weighted_mean({c: Update(own, sizes[c]) for c, own in lent.items()}) if lent else {}
        return self.fabric.broadcast(mean)

    def _ask(self, round: int, question: Callable[[Client, int], T], clients: list[int]) -> dict[int, T]:
        """Calls a function with clients that have just received the server's next message to them."""
        context = Context(self.seed, round + 1)
        self.server.begin(context)
        exchange, data = self.exchanges.at(context), self.data.at(round)
        blobs = self._broadcast_everywhere(exchange, clients, context)
        values = {}
        for client in sorted(self.mine.intersection(clients)):
            own = replace(context, client=client, stage=data.stages[client])
            self.turn.activate(exchange, own, self.pool.get(client), blobs[client])
            values[client] = question(self.client, client)
            self._count_turn()
        return gather(self.fabric, values)

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of `FederationCallback` on the first process."""
        if self.fabric.is_global_zero:
            self.fabric.call(hook, self, *arguments)

    def _turns_in(self, round: int) -> int:
        sampled = self.mine.intersection(self.sampler.sample(self.clients, Context(self.seed, round)))
        asked = self.mine.intersection(self.evaluator.asked(self.client, self.clients))
        return len(sampled) * len(self.exchanges.of_round(round)) + len(asked) * self._evaluation_due(round)

    def _count_turn(self) -> None:
        self._turns_done += 1
        self.fabric.call("on_client_end", self._turns_done, max(self._turns, self._turns_done))

    def _evaluation_due(self, round: int) -> bool:
        return round >= 0 and (
            round % self.evaluate_every == 0 or round == self.rounds or round in self.data.milestones
        )

    def _last_before_evaluation(self, client: int, round: int) -> bool:
        """Returns whether a client is not sampled once more before the next evaluation."""
        while not self._evaluation_due(round):
            round += 1
            if client in self.sampler.sample(self.clients, Context(self.seed, round)):
                return False
        return True

"""The only round loop: sample, broadcast, fit, send, aggregate, evaluate, report, checkpoint."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import Client, Context, Exchange, Idle, Message, Method, Update, senders
from lit_fedad.contracts.server import numbers_of, warnings_of
from lit_fedad.contracts.state import load_state, state_of
from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import mean_scalars, weighted_mean
from lit_fedad.federation.channel import Channel, elements
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.client_runner import ClientData, ClientResult, ClientRunner
from lit_fedad.federation.collecting import Collecting, Sender, Turn, clients_behind
from lit_fedad.federation.evaluator import ClientQuery, Evaluator, LocalQuery
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.processes import all_cores, on_first, shard
from lit_fedad.federation.receiver import Receiver, Robust
from lit_fedad.federation.round_report import Budget, RoundReport, add_causes, add_counts
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.federation.transport import Pose, Transport

T = TypeVar("T")


class Federation:
    """A federation of clients, in the processes of one Fabric or elsewhere, which runs the rounds of any method.

    Args:
        method: The method; its client is one live object for all clients of this process.
        fabric: A launched Fabric; its callbacks may implement the hooks of `FederationCallback`.
        sampler: Samples the clients of a round, and decides whether a round with failures is accepted.
        channel: Encodes, checks and counts messages.
        evaluate_every: Rounds between evaluations; the set-up, if there is one, and round T are always evaluated.
        robust: Defence against clients that send false values in the declared form; None for none.
        transport: Builds the transport to clients on other machines; takes the transport to clients in the processes
            of this Fabric. None where all clients are in these processes.
        names: Names of the clients in messages.

    Attributes:
        exchanges: The method's exchanges, or those by which `lit_fedad.privacy.protection` replaces them.
        staged: Whether data come in stages.
        summing: Collects only the sum of uploads; None where the server receives each upload.
        plan: The budget of differential privacy; None for none.
        holders: All clients that hold images.
        clients: The holders that take part: all but those that failed before round 1 and have not caught up.

    Raises:
        UserError: If there is no exchange to run.
    """

    def __init__(
        self,
        method: Method,
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
        robust: Robust | None = None,
        transport: Callable[[LocalTransport], Transport] | None = None,
        names: ClientNames = NUMBERS,
    ) -> None:
        client, server = method.client, method.server
        self.method, self.server, self.client = method, server, client
        self.data, self.evaluator = data, evaluator
        self.fabric, self.rounds, self.seed = fabric, rounds, seed
        self.checkpoints, self.pool = checkpoints, pool
        self.sampler, self.channel, self.evaluate_every = sampler, channel, evaluate_every
        self.exchanges = method.exchanges
        if rounds < 1 and not self.exchanges.setup:
            raise UserError(f"rounds={rounds}: this method does nothing before round 1; give at least 1")
        # Data are staged if a milestone has other stages than round 1. All milestones are looked at, because the last
        # round may have the stage of round 1 again where stages take turns.
        self.staged = any(data.at(round).stages != data.at(1).stages for round in data.milestones)
        if isinstance(self.exchanges.of_round(1)[0], Idle) and self.staged:
            warnings.warn(
                "images come in stages, and this method looks at those of the first alone, before round 1;"
                " METHOD=federated_bank, federated_subspace and federated_padim learn from all",
                stacklevel=2,
            )
        elif self.staged and (fixed := [one.name for one in self.exchanges.setup if one.first_stage]):
            warnings.warn(
                f"images come in stages, and what is set up before round 1 ({', '.join(fixed)}) is of the first alone",
                stacklevel=2,
            )
        self.runner = ClientRunner(client, channel, fabric)
        self.names = names
        self.receiver = Receiver(server, client, channel.up, robust, names)
        self.holders = sorted(client for client, size in data.sizes.items() if size > 0)
        self.clients = self.holders
        server.fabric = fabric
        shards = shard({c: data.sizes[c] for c in self.clients}, fabric.world_size)
        self.mine = set(shards[fabric.global_rank])
        self.sender = Sender(server, client, channel.down, fabric)
        local = LocalTransport(self.runner, data, pool, self.mine, evaluator, sampler)
        self.transport = transport(local) if transport else local
        self.collecting = Collecting(self.sender, self.transport, self.receiver, sampler, names, fabric)
        self.summing: Collecting | None = None
        self.plan: Budget | None = None
        self.history: list[RoundReport] = []
        self._predictions: tuple[int | None, Mapping[int, Any]] = None, {}

    def run(self) -> list[RoundReport]:
        """Runs all rounds after the last checkpoint.

        Returns:
            One report per round, including rounds before the run was resumed. Complete on the first process only.

        Raises:
            UserError: If a client fails and the policy is to stop, or too few clients remain.
        """
        first = self.resume()
        self.server.register_clients({client: self.data.sizes[client] for client in self.holders})
        rounds = range(first, self.rounds + 1)
        self.transport.progress.begin(client for round in rounds for client in self._visits_in(round))
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
        """Runs one round: all of its exchanges with the sampled clients; returns its report without metrics."""
        began = time.perf_counter()
        context = Context(self.seed, round)
        failed: dict[int, str] = {}
        if round > 0 and self.joinable:
            failed = self.collecting.catch_up(self.exchanges, context, self.holders, self.history)
            self.clients = [client for client in self.holders if client not in failed]
        self.server.context = context
        exchanges = self.exchanges.of_round(round)
        noised_sums = self.plan.released_in(exchanges, self.client) if self.plan else 0
        if (plan := self.plan) is not None:
            on_first(self.fabric, lambda: plan.check(self.released + noised_sums, f"round {round}"))
        report = RoundReport(round, exchanges[0].name, self.sampler.sample(self.clients, context))
        add_causes(report.failures, failed)
        sizes = self.data.at(round).sizes
        for number, exchange in enumerate(exchanges):
            # Clients that fail in one exchange are left out of the round's later ones.
            current = replace(context, exchange=number)
            self.server.context = current
            spares = self.sampler.spares(self.clients, current) if number == 0 else []
            turn = Turn(exchange, current, report, sizes, spares, partial(self._scored, exchange, current))
            collecting = (exchange.upload_spec(self.client) and self.summing) or self.collecting
            updates, results = collecting.collect(turn)
            counted = on_first(self.fabric, partial(self._merge, turn, updates, results))
            self.sender.forget()
            self.transport.settle(counted)
            report.participants = self.fabric.broadcast(report.participants)
        if round <= 0:
            self._leave_out(self.fabric.broadcast(report.failures))
        report.noised_sums = noised_sums
        if self.fabric.is_global_zero:
            report.scalars |= numbers_of(self.server)
            report.warnings += warnings_of(self.server)
        report.seconds = time.perf_counter() - began
        return report

    def evaluate(self, round: int) -> dict[str, Any] | None:
        """Scores the clients after the last finished round; returns metrics on the first process, None elsewhere."""
        self.transport.progress.extend(self.evaluator.asked(self.client, self.clients, round))
        evaluation = self.evaluator.evaluate(self, round)
        self._predictions = round, evaluation.predictions if evaluation is not None else {}
        if evaluation is None:
            return None
        if evaluation.trained is not None and self.history:
            self.history[-1].trained = evaluation.trained
        return evaluation.metrics

    def predictions(self, round: int) -> Mapping[int, Any]:
        """Returns the predictions of the test images after a round, by client; on the first process.

        They come from the round's evaluation, which is run now if this command has not run it, as after an
        interruption. Its metrics replace those of the report: thresholds may be others now.
        """
        if self._predictions[0] != round:
            metrics = self.evaluate(round)
            if metrics is not None and self.history:
                self.history[-1].metrics = metrics
        return self._predictions[1]

    def ask(
        self,
        round: int,
        query: ClientQuery[T],
        clients: list[int] | None = None,
        which: Literal["own", "server"] = "own",
        sums: bool = False,
        optional: bool = False,
    ) -> dict[int, T]:
        """Asks clients, prepared to predict as they do after a round; sends them the server's next message for it.

        Args:
            round: The last finished round.
            query: The query.
            clients: Client numbers; None for all clients.
            which: Whether clients predict with their own model or with the server's.
            sums: Whether they receive the message of `Exchanges.leave_out` instead of that of the next round.
            optional: Whether the answers are optional: then no client needs to answer.

        Returns:
            Answers by client, without clients that failed; empty on all processes but the first.

        Raises:
            UserError: If no client can answer, unless answers are optional.
        """
        chosen = self.clients if clients is None else clients
        lent = self._lent(round) if which == "server" else {}
        # After the last round the clients' predictors (with their banks) become their states: the checkpoint then
        # keeps them for new images.
        pose = Pose(round, which, lent, keep=round == self.rounds and which == "own", sums=sums)
        values = self._ask(query, chosen, pose)
        # Where all clients predict with one model, another client can answer if the chosen ones fail.
        one_model = which == "server" and self.client.predictors.server_shared
        alike = one_model or self.evaluator.alike(self.client, round)
        spares = [number for number in self.clients if alike and number not in chosen]
        while bool(spares) and on_first(self.fabric, partial(operator.not_, values)):
            values = self._ask(query, [spares.pop(0)], pose)
        if not optional:
            on_first(self.fabric, lambda: self._check_answers(round, values))
        return values

    @property
    def joinable(self) -> bool:
        """Whether clients can join after round 1 has begun."""
        return self.method.joinable and self.summing is None and self.plan is None

    @property
    def released(self) -> int:
        """Number of noised sums, or noised rounds of training, released so far; 0 on all but the first process."""
        return sum(report.noised_sums for report in self.history)

    @property
    def privacy(self) -> dict[str, Any] | None:
        """The part of the privacy budget that is spent (`Plan.summary`); None without differential privacy."""
        return None if self.plan is None else self.plan.summary(self.released)

    def resume(self) -> int:
        """Restores the last checkpoint, if there is one.

        Returns:
            The number of the next round.
        """
        latest = self.checkpoints.latest()
        if latest is None:
            return self.exchanges.first_round
        round, state = self.checkpoints.load(latest)
        load_state(self.server, state["server"])
        self.sender.forget()
        self.sender.checkpoint = latest
        self.history = state["history"]
        self.transport.restore(latest)
        if self.fabric.is_global_zero:
            self.checkpoints.remove_older()
        if round > 0 and self.joinable:
            late = set[int]().union(*clients_behind(self.exchanges, self.holders, self.history).values())
            self.clients = [client for client in self.holders if client not in late]
        else:
            for report in self.history:
                if report.round <= 0:
                    self._leave_out(report.failures)
        return round + 1

    def save(self, round: int) -> None:
        """Writes a checkpoint: every process the states of its clients, the first process also the server's state."""
        previous = self.checkpoints.latest()
        if self.fabric.is_global_zero:
            self.checkpoints.begin(round)
        folder = self.fabric.broadcast(self.checkpoints.partial(round))
        self.transport.save(folder, previous)
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            state = {"server": state_of(self.server), "history": self.history}
            self.checkpoints.commit(round, state)
        self.fabric.barrier()

    def _merge(self, turn: Turn, updates: dict[int, Update], results: dict[int, ClientResult]) -> set[int]:
        """Merges the updates on the server, and adds the results of merged clients to the report."""
        exchange, context, report = turn.exchange, turn.context, turn.report
        updates = dict(sorted(updates.items()))
        answered = senders(updates)
        left_out = self.names.titled(report.failures | report.refused)
        self.sampler.check_finished(len(answered), left_out, report.round)
        self._call("on_updates", context, updates)
        with all_cores(self.fabric):
            merged = self.receiver.merge(exchange, updates, self.clients, self.exchanges, context)
        add_causes(report.refused, merged.refused)
        report.warnings += [
            f"round {report.round}: {self.names.title(client)} {remark}" for client, remark in merged.remarks
        ]
        good = {client: results[client] for client in answered if client not in merged.refused}
        left_out = self.names.titled(report.failures | report.refused)
        self.sampler.check_finished(len(good), left_out, report.round)
        report.participants = list(good)
        add_counts(report.elements_up, {c: elements(u.message) for c, u in updates.items() if c in good})
        report.trained |= {c: result.trained for c, result in good.items() if result.trained is not None}
        scalars = {c: result.scalars for c, result in good.items()}
        report.scalars |= mean_scalars(scalars, turn.sizes)
        if exchange.name == report.exchange:
            report.per_client = scalars
        return good.keys() - merged.left_out

    def _lent(self, round: int) -> Message:
        """Returns the mean over clients of the entries `Predictors.lent` after a round, on every process."""
        names = self.client.predictors.lent
        if not names:
            return {}

        def lend(client: Client, number: int) -> Message:
            state = client.task.state_dict()
            return {name: state[name].detach().to("cpu", copy=True) for name in names}

        sizes = self.data.at(round).sizes
        lent = self._ask(LocalQuery("lent entries", lend), self.clients, Pose(round))
        mean = weighted_mean({c: Update(m, sizes[c]) for c, m in lent.items()}) if lent else {}
        return self.fabric.broadcast(mean)

    def _ask(self, query: ClientQuery[T], clients: list[int], pose: Pose) -> dict[int, T]:
        """Sends clients the server's message of the next round together with a query, and returns their answers."""
        context = Context(self.seed, pose.round + 1)
        self.server.context = context
        sums = self.exchanges.leave_out if pose.sums else None
        exchange = sums or self.exchanges.at(context)
        try:
            sent = self.sender.messages(exchange, clients, context)
        except UserError as error:
            if self.rounds > 0:
                raise
            raise UserError("rounds=0: this method has no model before round 1; give at least 1") from error
        self.transport.progress.extend(clients)
        outcome = self.transport.ask(query, sent, pose)

        def note(failures: dict[int, str]) -> None:
            if failures:
                self.sampler.check_failures(self.names.titled(failures), self.history[-1].round)
                add_causes(self.history[-1].unscored, failures)

        on_first(self.fabric, partial(note, outcome.failures))
        return outcome.values

    def _check_answers(self, round: int, values: Mapping[int, object]) -> None:
        if not values and self.history and self.history[-1].unscored:
            client, cause = next(iter(self.history[-1].unscored.items()))
            raise UserError(f"round {round}: no client can be scored; {self.names.title(client)}: {cause}")

    def _leave_out(self, failures: Mapping[int, str]) -> None:
        """Excludes clients that failed before round 1 from later rounds, which depend on what these clients missed."""
        self.clients = [client for client in self.clients if client not in failures]

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of `FederationCallback` on the first process."""
        if self.fabric.is_global_zero:
            self.fabric.call(hook, self, *arguments)

    def _visits_in(self, round: int) -> list[int]:
        """Lists the clients of a round, each as often as the round visits it."""
        sampled = self.sampler.sample(self.clients, Context(self.seed, round))
        visits = sampled * len(self.exchanges.of_round(round))
        if self._evaluation_due(round):
            visits += self.evaluator.asked(self.client, self.clients, round)
        return visits

    def _evaluation_due(self, round: int) -> bool:
        return round >= 0 and (
            round % self.evaluate_every == 0 or round == self.rounds or round in self.data.milestones
        )

    def _scored(self, exchange: Exchange, context: Context, playing: list[int]) -> set[int]:
        """Returns the clients to score after training: those that are not sampled again before the next evaluation."""
        predictors = self.client.predictors
        if not (exchange.trains and self.evaluator.after_fit and predictors.own) or predictors.merged:
            return set()
        last, round = set(playing), context.round
        while not self._evaluation_due(round):
            round += 1
            last.difference_update(self.sampler.sample(self.clients, Context(self.seed, round)))
        return last

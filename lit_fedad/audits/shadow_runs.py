"""Shadow runs: a run's federation, played again with other training images, and what is seen of their messages."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.audits.shadow_splits import draw_cells, split, trained_on
from lit_fedad.audits.statistics import received_statistics, sent_statistics
from lit_fedad.contracts import SUM, Client, Context, Update, nothing_to_attack
from lit_fedad.contracts.randomness import derive_seed
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.identity import identity
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.partition import Partition
from lit_fedad.experiment.build import (
    build_data,
    build_model,
    build_public,
    build_server_labelled,
)
from lit_fedad.experiment.federations import build_federation, shared_key
from lit_fedad.experiment.finished_run import FinishedRun, one_process
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.checkpoint import read_state, write_state
from lit_fedad.federation.evaluator import Evaluator, QueriedFederation
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.privacy.image_privacy import KEY_FILE
from lit_fedad.privacy.noised_sums import Noised
from lit_fedad.report.console import Display

Side = Literal["sent", "received"]

Seen = dict[str, dict[int, dict[str, Tensor]]]
"""Statistics of one side: exchange -> client -> kind of statistic -> [n, statistics], in the order of examples."""

_ADVICE = "remove it, and the same command plays this shadow run again"


class ShadowRuns:
    """Runs of a federation in which every client is trained on a random half of its examples.

    All begin with the run's initial weights and pick the clients that it picked, because the attacker knows both. All
    other random numbers differ between shadow runs.

    Args:
        run: The run.
        home: Folder of the shadow runs.
        share: Share of a client's images that are examples.
        seed: Seed that draws the examples and those that each shadow run is trained on.

    Raises:
        UserError: If there are no examples.
    """

    def __init__(self, run: FinishedRun, home: Path, share: float, seed: int) -> None:
        self.config = run.config
        self.home, self.seed, self.fabric = home, seed, run.fabric
        self.key = f"{identity(run.folder.config())} train {share} {seed}"
        self.partition, self.images = run.data.partition, run.data.images
        self.public = build_public(self.config, self.images)
        self.server_labelled = build_server_labelled(self.config, self.images, self.partition)
        categories = [sample.category for sample in self.images.train]
        self.cells = draw_cells(self.partition.by_stage, categories, share, seed)
        if not self.cells:
            raise UserError(
                f"{self.images.name}: no client holds two images of a class, which could be compared"
            )

    @property
    def clients(self) -> list[int]:
        """Clients with examples."""
        return sorted({cell.client for cell in self.cells})

    def examples(self, client: int) -> list[int]:
        """Lists a client's examples, cell by cell, as positions in the images."""
        return [i for cell in self.cells if cell.client == client for i in cell.examples]

    def cells_of(self, client: int) -> Tensor:
        """Returns the number of each example's cell [n]."""
        sizes = [len(cell.examples) for cell in self.cells if cell.client == client]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    def trained_on(self, client: int, shadows: Iterable[int]) -> Tensor:
        """Returns whether each of J shadow runs is trained on each example of a client, bool [J, n]."""
        chosen = [split(self.cells, number, self.seed) for number in shadows]
        return torch.tensor([[i in training for i in self.examples(client)] for training in chosen])

    def play(self, shadow: int, on_visit: Callable[[int, int], None]) -> dict[Side, Seen] | None:
        """Plays a shadow run and computes statistics of all messages; keeps them in a file and plays once.

        Args:
            shadow: Number of the shadow run.
            on_visit: As in `Federation`.

        Returns:
            The statistics, or None where the noise of differential privacy hid the shadow run's images.

        Raises:
            UserError: If messages say nothing of single images, or the folder holds other shadow runs.
        """
        folder = self.home / f"shadow_{shadow}"
        file = folder / "seen.pt"
        stored = _read(file)
        if stored and stored["key"] != self.key:
            raise UserError(
                f"{folder}: of another run, or of other options; remove {self.home} or give out=DIR"
            )
        if not stored or not stored["complete"]:
            config = {**self.config, "seed": derive_seed(self.seed, f"shadow_{shadow}")}
            stages = trained_on(self.partition.by_stage, self.cells, split(self.cells, shadow, self.seed))
            if self.partition.stages is None:
                partition = Partition(tuple(client_stages[0] for client_stages in stages))
            else:
                partition = Partition.in_stages(stages, schedule=self.partition.schedule)
            observer = _Observer(self, file, on_visit)
            model = build_model(self.config, self.images.categories, self.public, self.server_labelled)
            fabric = one_process(config, [observer])
            data = build_data(config, self.images, partition, model, fabric, Display(quiet=True))
            federation = build_federation(
                config,
                folder,
                model,
                data.module,
                NoEvaluation(),
                fabric,
                data.digest,
                key=shared_key(folder, config, data.digest, fabric),
            )
            observer.images = data.module
            federation.sampler = SampledAs(**asdict(federation.sampler), seed=self.config["seed"])
            try:
                federation.run()
                observer.write(complete=True)
            except HiddenByNoiseError:
                observer.write(complete=True, hidden=True)
        for name in ("checkpoints", "personal"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / KEY_FILE).unlink(missing_ok=True)
        return read_state(file, advice=_ADVICE)["seen"]


@dataclass
class _Observer(FederationCallback):
    """Observes what clients of a shadow run send, and what they receive."""

    shadows: ShadowRuns
    file: Path
    on_visit: Callable[[int, int], None]
    images: FederatedDataModule = field(init=False)
    seen: dict[Side, Seen] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = _read(self.file).get("seen") or {"sent": {}, "received": {}}

    def on_client_end(self, done: int, total: int) -> None:
        """Shows how far the shadow run is."""
        self.on_visit(done, total)

    def on_updates(self, federation: Federation, context: Context, updates: Mapping[int, Update]) -> None:
        """Computes statistics of the uploads: each client's own, or for each client the (noised) sum of all."""
        observed, exchange = {}, federation.exchanges.at(context)
        if isinstance(exchange, Noised):
            (first, *_) = updates.values()
            updates = {SUM: replace(first, message=exchange.released(federation.server, updates))}
        for client in self.shadows.clients:
            update = updates.get(SUM, updates.get(client))
            if update is not None and update.message:
                observed[client] = sent_statistics(federation, client, update, self._examples(client))
        if any(observed.values()):
            self.seen["sent"][f"{context.round}.{context.exchange}"] = observed
            self.write()
            return
        no_statistic = observed or not any(update.message for update in updates.values())
        trains = context.round >= 1 and exchange.trains
        if no_statistic and trains and not self.seen["sent"]:
            raise nothing_to_attack(federation.client)  # before all rounds are played

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Computes statistics of what the server sends next."""
        federation.server.context = Context(federation.seed, report.round + 1)
        observed = {}
        for client in sorted(set(self.shadows.clients) & set(federation.clients)):
            observed[client] = received_statistics(federation, client, self._examples(client))
        if any(observed.values()):
            self.seen["received"][f"{report.round + 1}.0"] = observed
        self.write()

    def write(self, complete: bool = False, hidden: bool = False) -> None:
        """Writes all that was seen so far, so that an interrupted shadow run can go on; None where noise hid it."""
        seen = None if hidden else self.seen
        with atomic(self.file) as partial:
            write_state({"key": self.shadows.key, "complete": complete, "seen": seen}, partial)

    def _examples(self, client: int) -> DataLoader:
        return self.images.normal_loader(self.shadows.examples(client))


class NoEvaluation(Evaluator):
    """An evaluator that evaluates nothing: only the uploads of a shadow run count."""

    metrics = ()

    def asked(self, client: Client, clients: list[int], round: int) -> list[int]:
        """Lists no client."""
        return []

    def evaluate(self, federation: QueriedFederation, round: int) -> None:
        """Returns nothing."""


@dataclass(frozen=True)
class SampledAs(ClientSampler):
    """A sampler that samples the clients that an experiment with another seed samples.

    Attributes:
        seed: Seed of the other experiment.
    """

    seed: int = 0

    def sample(self, clients: list[int], context: Context) -> list[int]:  # type: ignore[override]
        """Samples the clients of a round, ascending."""
        return super().sample(clients, replace(context, seed=self.seed))


def _read(file: Path) -> dict[str, Any]:
    """Reads what was seen in a shadow run so far; empty before it has begun."""
    return read_state(file, advice=_ADVICE) if file.exists() else {}

"""Measures what one lying client does to a federation, without and with robust aggregation.

    python scripts/byzantine.py [root=DATA weights=FILE] [seeds=0] [robust=off,default] [rounds=1] [liar=0]

One client alters its message on the wire, behind the sender's checks; it trains as honestly as the others. Prints the
pixel AUROC of honest clients after the last round, and which clients warnings name. With ``root``, the images are
those of ``experiment=real_mixture``, otherwise the embedded textures.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _script import script
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from lit_fedad.contracts import Message
from lit_fedad.core.building import call
from lit_fedad.core.config import Config, compose
from lit_fedad.core.options import bind
from lit_fedad.experiment.local_clients import build_run
from lit_fedad.experiment.run import Run
from lit_fedad.federation.client_runner import ClientResult, ClientRunner
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.processes import launched, make_fabric
from lit_fedad.memory.coreset import greedy_k_center
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.report.console import Display

Lie = Callable[[Run, Message, Message], Message]
"""A lie: from the run, the server's message and the honest message to the one that is sent."""


def anomalous(run: Run, received: Message, honest: Message) -> Message:
    """Replaces the bank by patches of the defects of the liar's own products, compressed as the method does.

    They are those of the test set, so that the detector is blinded to just what it is tested on: an upper bound.
    """
    if "memory" not in honest:
        return honest
    patches, size = defects(run), len(honest["memory"])
    generator = torch.Generator().manual_seed(0)
    if "counts" in honest:
        return {**honest, "memory": kmeans(patches, size, generator=generator).centroids}
    return {"memory": patches[greedy_k_center(patches, size, generator=generator, projection=128)]}


def noise(run: Run, received: Message, honest: Message) -> Message:
    """Replaces all but counts by noise of a thousand times the size."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(entry.shape, generator=draw).abs() * 1000 * entry.square().mean().sqrt()
        if entry.is_floating_point() and name != "counts"
        else entry
        for name, entry in honest.items()
    }


def larger_counts(run: Run, received: Message, honest: Message) -> Message:
    """Multiplies counts by a million."""
    return {n: (e * 1_000_000 if n in ("count", "counts") else e) for n, e in honest.items()}


def statistics(run: Run, received: Message, honest: Message) -> Message:
    """Moves the means of channels by ten deviations either way, and widens the deviations ten times."""
    if "covariance" in honest:
        far = 100 * honest["covariance"].abs().amax().sqrt() * torch.ones_like(honest["mean"])
        return {**honest, "mean": honest["mean"] + far, "covariance": 100 * honest["covariance"]}
    if "variance" not in honest:
        return honest
    draw = torch.Generator().manual_seed(0)
    signs = torch.randn(honest["mean"].shape, generator=draw).sign()
    mean = honest["mean"] + 10 * signs * honest["variance"].sqrt()
    return {**honest, "mean": mean, "variance": 100 * honest["variance"]}


def flipped(run: Run, received: Message, honest: Message) -> Message:
    """Reverses the sign of all weights."""
    return {n: (-e if n in received and e.is_floating_point() else e) for n, e in honest.items()}


def flipped_change(run: Run, received: Message, honest: Message) -> Message:
    """Undoes what the client learnt, ten times over."""
    return {
        n: (received[n] - 10 * (e - received[n]) if n in received and e.is_floating_point() else e)
        for n, e in honest.items()
    }


LIES: dict[str, dict[str, Lie | None]] = {
    "federated_bank": {
        "honest": None,
        "anomalous patches": anomalous,
        "noise x 1000": noise,
        "counts x 1e6": larger_counts,
        "false statistics": statistics,
    },
    "feddymem": {"honest": None, "anomalous patches": anomalous, "noise x 1000": noise},
    "federated_patchcore": {"honest": None, "anomalous patches": anomalous, "noise x 1000": noise},
    "fedavg": {
        "honest": None,
        "noise x 1000": noise,
        "false statistics": statistics,
        "flipped weights": flipped,
        "flipped change x 10": flipped_change,
    },
}


class LyingRunner:
    """A turn in which one client alters its message on the wire.

    Args:
        run: The run.
        runner: The honest turn.
        liar: Number of the client.
        lie: What it does to its message.
    """

    def __init__(self, run: Run, runner: ClientRunner, liar: int, lie: Lie) -> None:
        self.run, self.runner, self.liar, self.lie = run, runner, liar, lie
        self.fabric, self.client, self.channel = runner.fabric, runner.client, runner.channel
        self.received: Message = {}

    def activate(self, *arguments: Any) -> Message:
        """Activates a client, and keeps what it received."""
        self.received = self.runner.activate(*arguments)
        return self.received

    def play(self, exchange: Any, data: Any, mask: Any = None) -> ClientResult:
        """Plays the turn; the liar's bytes are replaced."""
        result = self.runner.play(exchange, data, mask)
        client = self.runner.client
        if client.context.client == self.liar and result.blob:
            honest = self.runner.channel.up.unpack(result.blob, exchange.upload_spec(client), "the liar")
            sent = self.runner.channel.up.codec.encode(
                self.lie(self.run, self.received, honest), client.context
            )
            result.blob = save({name: entry.contiguous() for name, entry in sent.items()})
        return result


@torch.no_grad()
def defects(run: Run) -> Tensor:
    """Computes the features [n, C] of all anomalous test patches of the products that the live client holds."""
    task, images, grid = run.model.client.task, run.local.images, run.config["grid"]
    client = run.model.client.context.client
    assert client is not None
    products = {images.train[i].category for i in run.local.partition.clients[client]}
    found = []
    for batch in run.local.module.test_dataloader():
        held = torch.tensor([images.test[i].category in products for i in batch["index"].tolist()])
        marked = adaptive_max_pool2d(batch["mask"][:, None].float(), grid)[:, 0].flatten(1) > 0
        found.append(task(run.fabric.to_device(batch))[held[:, None] & marked].float().cpu())
    return torch.cat(found)


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        root: Folder of the data of ``real_mixture``; none for the embedded textures.
        weights: File of ResNet-18's weights, for these.
        methods: Methods to attack.
        lies: Words that the names of lies must contain, any of them; none for all.
        robust: Files of ``conf/federation/robust``.
        seeds: Seeds.
        rounds: Training rounds, for methods that train.
        liar: Number of the lying client; none for that with the median number of images.
    """

    root: str | None = None
    weights: str | None = None
    methods: tuple[str, ...] = tuple(LIES)
    lies: tuple[str, ...] = ()
    robust: tuple[str, ...] = ("off", "default")
    seeds: tuple[int, ...] = (0,)
    rounds: int = 1
    liar: int | None = None


def measure(options: Options, screen: Display | None = None) -> Iterator[dict[str, str]]:
    """Plays all runs, and yields a row of the table for each method, lie and seed.

    Raises:
        UserError: As a run does.
    """
    images = ["backbone=own"]
    if options.root:
        images = [
            "experiment=real_mixture",
            f"data.root={options.root}",
            f"backbone.weights={options.weights}",
        ]
    for method in options.methods:
        for name, lie in LIES[method].items():
            if options.lies and not any(word in name for word in options.lies):
                continue
            for seed in options.seeds:
                row = {"method": method, "lie": name, "seed": str(seed)}
                for robust in options.robust:
                    rounds = [] if method == "federated_patchcore" else [f"rounds={options.rounds}"]
                    overrides = [
                        *images,
                        f"method={method}",
                        f"seed={seed}",
                        f"federation/robust={robust}",
                        *rounds,
                    ]
                    score, liar, warnings = play(compose([*overrides, "tracking=off"]), lie, options.liar)
                    row["liar"] = "-" if lie is None else str(liar)
                    row[robust] = f"{score:.3f}"
                    named = sorted({word for line in warnings for word in re.findall(r"client (\d+)", line)})
                    row[f"{robust} names"] = " ".join(named) or "-"
                    if screen is not None:
                        for line in warnings:
                            screen.note(line)
                yield row


def play(config: Config, lie: Lie | None, liar: int | None) -> tuple[float, int, list[str]]:
    """Plays one run, and returns the mean pixel AUROC of honest clients, the liar, and all warnings."""
    found: list[Any] = []
    with TemporaryDirectory() as out:
        launched(call(make_fabric, config["fabric"], "fabric"), _play)(
            {**config, "out": out}, lie, liar, found
        )
    return found[0], found[1], found[2]


def _play(fabric: Any, config: Config, lie: Lie | None, liar: int | None, found: list[Any]) -> None:
    run = build_run(fabric, config, Display(quiet=True))
    federation, sizes = run.federation, run.data.module.sizes
    if liar is None:
        liar = sorted(sizes, key=lambda client: (sizes[client], client))[len(sizes) // 2]
    if lie is not None:
        federation.runner = LyingRunner(run, federation.runner, liar, lie)  # type: ignore[assignment]
        assert isinstance(federation.transport, LocalTransport)
        federation.transport.runner = federation.runner
    reports = [federation.play(round) for round in range(federation.resume(), federation.rounds + 1)]
    evaluator = federation.evaluator
    honest = [client for client in federation.clients if client != liar]
    # Clients with one bank in common score alike: any of them shows what the server holds.
    asked = honest if config["method"]["name"] == "fedavg" else honest[:1]
    metrics = evaluator.summarise(federation.ask(federation.rounds, evaluator, asked))
    found += [metrics["p_auroc"]["mean"], liar, [line for report in reports for line in report.warnings]]


if __name__ == "__main__":
    with script() as display:
        rows = []
        for row in bind(measure, sys.argv[1:], Path(__file__).stem, screen=display)():
            rows.append(row)
            display.note("   ".join(row.values()))
        display.table(rows)

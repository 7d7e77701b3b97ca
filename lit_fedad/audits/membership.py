"""Infers from each client's last upload in a finished run which images it was trained on, by LiRA.

Shadow models are runs of the same experiment, in which every client is trained on a random half of its own images and
as many held-out ones. Uploads are not stored, so the attacked run is played again too, with the same code and seed,
which gives the same uploads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_fedad.config import Config, identity
from lit_fedad.contracts import Client, Context, Update
from lit_fedad.contracts.randomness import derive_seed
from lit_fedad.data.labelled import Images, LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import (
    build_data,
    build_federation,
    build_model,
    build_public,
    build_server_labelled,
)
from lit_fedad.experiment.finished_run import FinishedRun, one_process
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.evaluator import Evaluator, Interview
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.federation.state_file import read_state, write_state
from lit_fedad.privacy.lira import (
    MembershipReport,
    confidence,
    membership_report,
    offline_scores,
    online_scores,
    roc,
)
from lit_fedad.privacy.shadow_splits import draw_cells, split, trained_on
from lit_fedad.report.console import Display
from lit_fedad.report.figures import save_figure
from lit_fedad.report.files import whole_file
from lit_fedad.report.roc_curves import roc_figure
from lit_fedad.tracking.tracker import amend


@dataclass(frozen=True)
class LiraOptions:
    """Options of ``lit-fedad privacy attack=lira``.

    Attributes:
        shadows: Number of shadow runs, even.
        mode: ``online`` compares with shadow runs with and without an image, ``offline`` only with those without it.
        out: Folder that gets ``privacy`` and ``figures``; None for the run's.
        seed: Seed that draws the attacked images and those that each shadow run is trained on.

    Raises:
        UserError: If there are too few shadow runs, or an odd number.
    """

    shadows: int = 16
    mode: Literal["online", "offline"] = "online"
    out: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shadows < 4 or self.shadows % 2:
            raise UserError(f"shadows={self.shadows}: give an even number, at least 4")


def infer(run: FinishedRun, options: LiraOptions) -> MembershipReport:
    """Attacks what each client uploaded in a run's last round; writes ``privacy/lira.json``, ``figures/lira.png``.

    Called again it continues where it was interrupted; shadow runs that are complete are not played again.

    Args:
        run: The attacked run.
        options: What is compared, and with how many shadow runs.

    Returns:
        How the attack went on each client that uploaded.

    Raises:
        UserError: If nothing in the run can be attacked, or its folder holds shadow runs of another seed.
    """
    folder, config, display = run.folder.path, run.folder.config(), run.display
    if config["rounds"] < 1:
        raise UserError(
            f"{folder}: rounds=0, no client uploads what it has trained; there is nothing to attack"
        )
    if str(config["fabric"]["devices"]) not in ("1", "auto") or config["fabric"]["num_nodes"] != 1:
        raise UserError(f"{folder}: a run of several processes; attack one with fabric.devices=1")
    home = Path(options.out) if options.out else folder
    shadows = ShadowRuns(run, home / "privacy" / "lira", options.seed)
    with display.progress("Attacked run and shadow runs") as progress:
        phi, *observed = (
            shadows.play(number - 1 if number else None, _part(progress, number, options.shadows + 1))
            for number in range(options.shadows + 1)
        )
    scores, members = attack(shadows, phi, observed, options.mode)
    try:
        report = membership_report(scores, members)
    except ValueError as error:
        raise UserError(f"{error}; give more shadows") from error
    display.table(_rows(report))
    display.note(
        f"LiRA {options.mode}, {options.shadows} shadow runs, by {shadows.looks_at}: AUC {report.worst:.3f} at worst,"
        f" {report.mean:.3f} on average, defence rate {report.defence_rate:.0%}"
    )
    content = {"attack": "lira", **asdict(options), "round": config["rounds"], "looks_at": shadows.looks_at}
    file = RunFolder(home / "privacy").save_json(
        "lira.json", {**content, **_summary(report), **asdict(report)}
    )
    curves = {c: roc(own[~own.isnan()], members[c][~own.isnan()]) for c, own in scores.items()}
    figure = save_figure(roc_figure(curves, report.auc), home / "figures" / "lira.png")
    metrics = {f"lira/{name}": value for name, value in _summary(report).items()}
    metrics |= {f"lira/auc/client_{client}": auc for client, auc in report.auc.items()}
    delivery = amend(folder, metrics, config["rounds"], [file, figure], "privacy")
    if delivery.pending:
        display.warn(f"{delivery.pending} tracking records are kept; send them: lit-fedad sync run={folder}")
    display.where_next([("written", str(file)), ("curves", str(figure))])
    return report


def attack(
    shadows: ShadowRuns, phi: Mapping[int, Tensor], observed: list[dict[int, Tensor]], mode: str
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Scores each client's examples by how likely they are members.

    Args:
        shadows: The shadow runs, which know the examples that each was trained on.
        phi: The statistic phi of a client's examples under the attacked run [n], by client.
        observed: The same under each shadow run. A client that did not upload in one of them is missing there.
        mode: ``online`` or ``offline``.

    Returns:
        By client: scores [n], and whether each example is a member, bool [n].
    """
    chosen = [shadows.chosen(number) for number in range(len(observed))]
    rule = {"online": online_scores, "offline": offline_scores}[mode]
    scores, members = {}, {}
    for client, own in phi.items():
        examples = shadows.examples(client)
        seen = torch.stack([heard.get(client, torch.full_like(own, torch.nan)) for heard in observed])
        scores[client] = rule(own, seen, torch.tensor([[i in part for i in examples] for part in chosen]))
        members[client] = torch.arange(len(own)) < len(own) // 2
    return scores, members


class ShadowRuns:
    """A run's federation, played again with the same training images or, as a shadow run, with other ones.

    All begin with the run's initial weights and pick the clients that it picked, because the attacker knows both. All
    other random numbers differ between shadow runs.

    Args:
        run: The attacked run.
        home: Folder of the shadow runs.
        seed: Seed that draws the attacked images and those that each shadow run is trained on.

    Attributes:
        looks_at: Name of the statistic phi.

    Raises:
        UserError: If there are no non-members among the test images.
    """

    def __init__(self, run: FinishedRun, home: Path, seed: int) -> None:
        self.config, self.identity = run.config, identity(run.folder.config())
        self.home, self.seed, self.fabric = home, seed, run.fabric
        config, images, self.partition = run.config, run.data.images, run.data.partition
        self.public = build_public(config, images)
        self.server_labelled = build_server_labelled(config, images, self.partition)
        self.images, held_out = _joined(images)
        categories = [sample.category for sample in self.images.train]
        self.cells = draw_cells(self.partition.by_stage, categories, held_out, seed)
        if not self.cells:
            raise UserError(
                f"{images.name}: no test image can be a non-member: none is of a class that a client holds"
            )
        self.looks_at = "confidence" if images.kind == "classification" else "negative image score"

    def examples(self, client: int) -> list[int]:
        """Lists a client's attacked members, then as many non-members, as positions in the joined images."""
        own = [cell for cell in self.cells if cell.client == client]
        return [i for cell in own for i in cell.members] + [i for cell in own for i in cell.others]

    def chosen(self, shadow: int) -> set[int]:
        """Draws the examples that a shadow run is trained on."""
        return split(self.cells, shadow, self.seed)

    def play(self, shadow: int | None, on_visit: Callable[[int, int], None]) -> dict[int, Tensor]:
        """Plays a run and computes phi of the examples from the last uploads; keeps it in a file and plays once.

        Args:
            shadow: Number of the shadow run; None for the attacked run.
            on_visit: As in `Federation`.

        Returns:
            phi of every client that uploaded, float64 [n] in the order of `examples`.

        Raises:
            UserError: If uploads say nothing of single images, or the folder holds other shadow runs.
        """
        config, partition, name = self.config, self.partition, "target"
        if shadow is not None:
            name = f"shadow_{shadow}"
            config = {**config, "seed": derive_seed(self.seed, name)}
            stages = trained_on(partition.by_stage, self.cells, self.chosen(shadow))
            partition = (
                Partition(tuple(own[0] for own in stages))
                if partition.stages is None
                else Partition.in_stages(stages, schedule=partition.schedule)
            )
        folder = self.home / name
        file, key = folder / "phi.pt", f"{self.identity} {self.seed}"
        if not file.exists():
            self._federation(config, partition, folder, key, on_visit).run()
        for spent in ("checkpoints", "personal"):
            shutil.rmtree(folder / spent, ignore_errors=True)
        kept = read_state(file, advice="remove it, and the same command plays this shadow run again")
        if kept["key"] != key:
            raise UserError(
                f"{folder}: attacked with another seed, or another run's; remove {self.home} or give out=DIR"
            )
        return kept["phi"]

    def _federation(
        self,
        config: Config,
        partition: Partition,
        folder: Path,
        key: str,
        on_visit: Callable[[int, int], None],
    ) -> Federation:
        """Builds a federation that evaluates nothing, and writes phi when the last uploads come in."""
        observer = _Observer(self, folder, key, on_visit)
        fabric = one_process(config, [observer])
        model = build_model(self.config, self.images.categories, self.public, self.server_labelled)
        data = build_data(config, self.images, partition, model, fabric, Display(quiet=True))
        federation = build_federation(config, folder, model, data, fabric)
        observer.train = data.module.train
        federation.evaluator = NoEvaluation()
        federation.sampler = SampledAs(**asdict(federation.sampler), seed=self.config["seed"])
        return federation

    def write_phi(
        self, federation: Federation, updates: Mapping[int, Update], train: Dataset, folder: Path, key: str
    ) -> None:
        """Writes phi of the examples, computed from the last uploads.

        Args:
            federation: The shadow run's, before its server merges the uploads.
            updates: The uploads, by client.
            train: Training and test images, joined.
            folder: Folder of the shadow run.
            key: Identifies the attacked run and the seed.
        """
        attacked = sorted(updates.keys() & {cell.client for cell in self.cells})
        phi = {c: self._phi(federation.adversary_view(c, updates[c]), c, train) for c in attacked}
        with whole_file(folder / "phi.pt") as part:
            write_state({"key": key, "phi": phi}, part)

    def _phi(self, client: Client, number: int, train: Dataset) -> Tensor:
        """Computes the statistic phi of a client's examples under a predictor, in their order [n]."""
        examples, size = self.examples(number), self.config["evaluation"]["batch_size"]
        parts = []
        for start in range(0, len(examples), size):
            batch = train.__getitems__(examples[start : start + size])  # type: ignore[attr-defined]
            prediction = predict_batch(client, batch, self.fabric)
            if prediction.logits is not None and client.task.kind == "classification":
                parts.append(confidence(prediction.logits.cpu(), batch["label"]))
            else:
                parts.append(-prediction.image_score.cpu().double())
        phi = torch.cat(parts)
        if not phi.isfinite().all():
            raise UserError(
                f"{type(client).__name__}: scores from the upload of client {number} are not finite"
            )
        return phi


@dataclass
class _Observer(FederationCallback):
    """Observes the uploads of a shadow run."""

    shadows: ShadowRuns
    folder: Path
    key: str
    on_visit: Callable[[int, int], None]
    train: Dataset = field(init=False)

    def on_client_end(self, done: int, total: int) -> None:
        """Shows how far the shadow run is."""
        self.on_visit(done, total)

    def on_updates(self, federation: Federation, context: Context, updates: Mapping[int, Update]) -> None:
        """Attacks the uploads of the last round's training."""
        if context.round < 1 or not federation.exchanges.at(context).trains:
            return
        if context.round == 1:
            # What cannot be attacked is refused before all rounds are played.
            federation.adversary_view(*next(iter(updates.items())))
        if context.round == federation.rounds:
            self.shadows.write_phi(federation, updates, self.train, self.folder, self.key)


class NoEvaluation(Evaluator):
    """An evaluator that evaluates nothing: only the uploads of a shadow run count."""

    metrics = ()

    def asked(self, client: Client, clients: list[int]) -> list[int]:
        """Lists no client."""
        return []

    def evaluate(self, interview: Interview, round: int) -> None:
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


def _joined(images: Images) -> tuple[Images, range | list[int]]:
    """Joins training and test images to one training set, and lists the normal images in it that no client holds."""
    held = len(images.train)
    if isinstance(images, LabelledSet):
        joined = replace(
            images,
            train_images=torch.cat([images.train_images, images.test_images]),
            train_labels=torch.cat([images.train_labels, images.test_labels]),
        )
        return joined, range(held, len(joined.train))
    normal = [held + place for place, sample in enumerate(images.test) if not sample.label]
    return replace(images, train=(*images.train, *images.test), test=()), normal


def _part(progress: Callable[[int, int], None], number: int, runs: int) -> Callable[[int, int], None]:
    """Scales the progress of one of several equally long runs to that of all."""
    return lambda done, total: progress(number * total + done, runs * total)


def _summary(report: MembershipReport) -> dict[str, float]:
    return {"max_auc": report.worst, "mean_auc": report.mean, "defence_rate": report.defence_rate}


def _rows(report: MembershipReport) -> list[dict[str, str]]:
    return [
        {
            "client": str(client),
            "AUC": f"{auc:.3f}",
            "TPR at 1 % FPR": f"{report.tpr[client]:.3f}",
            "examples": str(report.examples[client]),
        }
        for client, auc in report.auc.items()
    ]

"""LiRA on a finished run: how well clients' training images show in what each of them uploaded last.

Shadow models are runs of the same experiment, in which every client is trained on a random half of its own images and
as many held-out ones. The attacked run is played again too, since nobody keeps uploads: by the same code, and with the
same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lit_fedad.config import Config, call, identity
from lit_fedad.contracts import Client, Context, Update
from lit_fedad.contracts.randomness import derive_seed
from lit_fedad.data.labelled import Images, LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import (
    Data,
    build_data,
    build_federation,
    build_model,
    build_public,
    build_server_labelled,
)
from lit_fedad.experiment.finished_run import Reopened, reopen
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.participation import Participation
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
from lit_fedad.report.figures import save_figure, whole_file
from lit_fedad.report.roc_curves import roc_figure
from lit_fedad.tracking.tracker import amend


@dataclass(frozen=True)
class Options:
    """What the command line may say.

    Attributes:
        shadows: Shadow runs J, an even number.
        mode: ``online`` looks at shadow runs with and without an image, ``offline`` at those without it alone.
        out: Folder that gets ``privacy`` and ``figures``; None for the run's.
        seed: Decides who is attacked and on whom the shadow runs are trained.

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


def infer(run: str, options: Mapping[str, str]) -> MembershipReport:
    """Attacks what each client uploaded in a run's last round; writes ``privacy/lira.json``, ``figures/lira.png``.

    Called again it continues where it was interrupted, and plays no shadow run twice.

    Args:
        run: MLflow run id, or the run's folder.
        options: See `Options`; beside them values that differ on this machine, such as ``data.root``.

    Returns:
        How the attack went on each client that uploaded.

    Raises:
        UserError: If there is no such complete run, or nothing in it to attack.
    """
    own = {key: value for key, value in options.items() if "." not in key}
    typed = {k: int(v) if k != "out" and v.isdecimal() else v for k, v in own.items()}
    given = call(Options, typed, "attack=lira")
    opened = reopen(run, {key: value for key, value in options.items() if key not in own})
    folder, config, display = opened.folder.path, opened.folder.config(), opened.display
    if config["rounds"] < 1:
        raise UserError(
            f"{folder}: rounds=0, no client uploads what it has trained; there is nothing to attack"
        )
    if str(config["fabric"]["devices"]) not in ("1", "auto") or config["fabric"]["num_nodes"] != 1:
        raise UserError(f"{folder}: a run of several processes; attack one with fabric.devices=1")
    home = Path(given.out) if given.out else folder
    shadows = ShadowRuns(opened, home / "privacy" / "lira", given.seed)
    with display.progress("Attacked run and shadow runs") as progress:
        phi, *observed = (
            shadows.play(number - 1 if number else None, _part(progress, number, given.shadows + 1))
            for number in range(given.shadows + 1)
        )
    scores, members = attack(shadows, phi, observed, given.mode)
    try:
        report = membership_report(scores, members)
    except ValueError as error:
        raise UserError(f"{error}; give more shadows") from error
    display.table(_rows(report))
    display.note(
        f"LiRA {given.mode}, {given.shadows} shadow runs, by {shadows.looks_at}: AUC {report.worst:.3f} at worst,"
        f" {report.mean:.3f} on average, defence rate {report.defence_rate:.0%}"
    )
    content = {"attack": "lira", **asdict(given), "round": config["rounds"], "looks_at": shadows.looks_at}
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
    """Scores of each client's examples, and which of them are members.

    Args:
        shadows: Knows which shadow run was trained on whom.
        phi: What the attacked run thinks of a client's examples [n]; by client.
        observed: The same of every shadow run. A client that did not upload in one of them is missing there.
        mode: ``online`` or ``offline``.
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
    """Plays a run's federation again: as it was, or with other training images of each client's examples.

    All begin with the run's initial weights and pick the clients that it picked: an observer knows both. Other random
    numbers are a shadow run's own.

    Args:
        opened: The run.
        home: Where its shadow runs lie.
        seed: Decides who is attacked, and on whom shadow runs are trained.

    Attributes:
        looks_at: What phi is, in words.

    Raises:
        UserError: If there are no non-members among the test images.
    """

    def __init__(self, opened: Reopened, home: Path, seed: int) -> None:
        self.config, self.identity = opened.config, identity(opened.folder.config())
        self.home, self.seed, self.fabric = home, seed, opened.fabric
        config, images, self.partition = opened.config, opened.data.images, opened.data.partition
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
        """A client's members that are attacked, then as many non-members: positions in the joined images."""
        own = [cell for cell in self.cells if cell.client == client]
        return [i for cell in own for i in cell.members] + [i for cell in own for i in cell.others]

    def chosen(self, shadow: int) -> set[int]:
        """The examples that a shadow run is trained on."""
        return split(self.cells, shadow, self.seed)

    def play(self, shadow: int | None, on_visit: Callable[[int, int], None]) -> dict[int, Tensor]:
        """What an observer of the last uploads thinks of the examples; kept in a file, and not computed twice.

        Args:
            shadow: Which shadow run; None for the attacked run.
            on_visit: As in `Federation`.

        Returns:
            phi float64 [n] of every client that uploaded, in the order of `examples`.

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
                else Partition.in_stages(stages)
            )
        folder = self.home / name
        file, key = folder / "phi.pt", f"{self.identity} {self.seed}"
        if not file.exists():
            self._federation(config, partition, folder, key, on_visit).run()
        for spent in ("checkpoints", "personal"):
            shutil.rmtree(folder / spent, ignore_errors=True)
        kept = torch.load(file)
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
        """A federation that evaluates nothing, and writes phi when the last uploads come in."""
        model = build_model(self.config, self.images.categories, self.public, self.server_labelled)
        data = build_data(config, self.images, partition, model, self.fabric, Display(quiet=True))
        federation = build_federation(config, folder, model, data, self.fabric)
        federation.evaluator, federation.on_visit = NoEvaluation(), on_visit
        federation.participation = AsPicked(**asdict(federation.participation), seed=self.config["seed"])

        def listen(context: Context, updates: Mapping[int, Update]) -> None:
            if federation.server.phase != "train":
                return
            if context.round == 1:
                # What cannot be attacked is refused before all rounds are played.
                federation.overhear(*next(iter(updates.items())))
            if context.round == federation.rounds:
                attacked = sorted(updates.keys() & {cell.client for cell in self.cells})
                phi = {c: self._phi(federation.overhear(c, updates[c]), c, data) for c in attacked}
                with whole_file(folder / "phi.pt") as part:
                    torch.save({"key": key, "phi": phi}, part)

        federation.on_updates = listen
        return federation

    def _phi(self, client: Client, number: int, data: Data) -> Tensor:
        """What a predictor thinks of a client's examples, in their order [n]."""
        examples, size = self.examples(number), self.config["evaluation"]["batch_size"]
        parts = []
        for start in range(0, len(examples), size):
            batch = data.module.train.__getitems__(examples[start : start + size])  # type: ignore[attr-defined]
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


class NoEvaluation(Evaluator):
    """Asks nobody."""

    def asked(self, client: Client, clients: list[int]) -> list[int]:
        """Nobody."""
        return []

    def evaluate(self, federation: Federation, round: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class AsPicked(Participation):
    """Picks the clients that an experiment with another seed picks.

    Attributes:
        seed: The other experiment's.
    """

    seed: int = 0

    def pick(self, clients: list[int], context: Context) -> list[int]:  # type: ignore[override]
        """The clients of a round, ascending."""
        return super().pick(clients, replace(context, seed=self.seed))


def _joined(images: Images) -> tuple[Images, range | list[int]]:
    """Training and test images as one training set, and the places in it of those that are nobody's and normal."""
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
    """The progress of one of so many equally long runs."""
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

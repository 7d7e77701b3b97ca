"""Reconstructs images from what a client of a finished run sends, by inversion.

A client of the run sends once more, in the exchange that would come next. Its message is attacked as the server could
attack it, and the reconstructions are compared with the client's own images. The same attack on another client,
compared with the same images, is the control: what it reaches is due to the prior and not to the upload. The positive
controls are easier attacks with a known answer: where they fail, the attack could not have found anything.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from scipy.stats import binomtest
from torch import Tensor

from lit_fedad.audits.inversion_attack import Attack, InversionOptions, pixels, private_images
from lit_fedad.audits.page import Outcome
from lit_fedad.audits.reconstruction import Matches, closest
from lit_fedad.contracts import Context
from lit_fedad.contracts.randomness import generator
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.experiment.run_files import save_json
from lit_fedad.models.backbones import OWN_NAME, create_backbone
from lit_fedad.report.audit_figures import Shown, inversion_sheet
from lit_fedad.report.figures import save_figure

_MAX_CANDIDATES = 200  # images of other clients that the judge compares with
_MAX_ROWS = 16  # reconstructions in the figure: with two hundred it would be higher than a file can be


class Identified(NamedTuple):
    """How near reconstructions come to the true images, among all candidates.

    Attributes:
        ranks: Rank of the nearest true image of each reconstruction among the candidates, 1 for the nearest, int64 [n].
        top1: Share of the reconstructions whose nearest candidate is a true image.
        low: Lower end of its exact binomial 95 % interval.
        high: Upper end.
        chance: Share of true images among the candidates.
    """

    ranks: Tensor
    top1: float
    low: float
    high: float
    chance: float


def identify(reconstructed: Tensor, true: Tensor, others: Tensor) -> Identified:
    """Ranks candidates by their distance to each reconstruction (Euclidean, features divided by their deviation).

    Args:
        reconstructed: Features of reconstructions [n, D].
        true: Features of the images that they may show [m, D].
        others: Features of other images [k, D].

    Example:
        >>> true, others = torch.tensor([[0.0, 1.0]]), torch.tensor([[4.0, 1.0], [8.0, 3.0]])
        >>> found = identify(torch.tensor([[1.0, 1.0], [5.0, 1.0]]), true, others)
        >>> found.ranks.tolist(), found.top1, round(found.chance, 2)
        ([1, 2], 0.5, 0.33)
    """
    candidates = torch.cat([true, others]).double()
    scale = candidates.std(0, correction=0).clamp(min=1e-9)
    gaps = torch.cdist(
        reconstructed.double() / scale, candidates / scale, compute_mode="donot_use_mm_for_euclid_dist"
    )
    nearest = gaps[:, : len(true)].amin(1, keepdim=True)
    ranks = 1 + (gaps[:, len(true) :] < nearest).sum(1)
    hits = int((ranks == 1).sum())
    interval = binomtest(hits, len(ranks)).proportion_ci(0.95)
    return Identified(
        ranks, hits / len(ranks), float(interval.low), float(interval.high), len(true) / len(candidates)
    )


class Jury:
    """A judge, and the candidates that it tells apart: the attacked client's images, and those of others.

    The judge is the library's own backbone; of runs with that backbone, one with random weights. Its features are means
    over positions.

    Args:
        run: The run.
        client: The attacked client.

    Attributes:
        name: Name of the judge, its backbone and weights.
        own: Features of the client's images [m, D].
        others: Features of images of other clients [k, D]: of the classes that the client holds, or else of any,
            without images that it holds too.
        candidates: What is compared, in words.
    """

    def __init__(self, run: FinishedRun, client: int) -> None:
        weights = "random" if run.model.provenance.get("taken") == "own" else "own"
        self.name = f"{OWN_NAME}, weights {weights}"
        self.backbone = create_backbone(OWN_NAME, (1, 2, 3), weights)
        clients, classes = run.data.partition.clients, [sample.category for sample in run.data.images.train]
        held_classes = {classes[index] for index in clients[client]}
        others = [index for number, images in enumerate(clients) if number != client for index in images]
        same_class = [index for index in others if classes[index] in held_classes]
        chosen = (same_class or others)[:: max(1, len(same_class or others) // _MAX_CANDIDATES)][
            :_MAX_CANDIDATES
        ]
        own, their_images = private_images(run, client), pixels(run, chosen)
        # Images that others hold too tell nothing: each would always be nearest to itself, among the client's.
        own_bytes = {image.numpy().tobytes() for image in own}
        is_foreign = [image.numpy().tobytes() not in own_bytes for image in their_images]
        their_images = their_images[torch.tensor(is_foreign, dtype=torch.bool)]
        self.own, self.others = self.features(own), self.features(their_images)
        kinds = "of its classes" if same_class else "of other classes, which alone may tell them apart"
        self.candidates = f"{len(self.own)} of the client and {len(self.others)} of others, {kinds}"

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Computes features [n, D] of pixels in [0, 1] [n, ch, H, W], of 1 or 3 channels."""
        mean, std = (
            torch.tensor(values).view(-1, 1, 1) for values in (self.backbone.mean, self.backbone.std)
        )
        parts = []
        for batch in images.expand(-1, 3, -1, -1).split(32):
            pyramid = self.backbone((batch - mean) / std)
            parts.append(torch.cat([layer.mean((2, 3)) for layer in pyramid], 1))
        return torch.cat(parts)

    def identify(self, images: Tensor, true: Tensor | None = None) -> dict[str, Any]:
        """Ranks true images, all of the client's by default, among the candidates of others (`Identified`)."""
        true_features = self.own if true is None else self.features(true)
        identified = identify(self.features(images), true_features, self.others)
        return {**identified._asdict(), "ranks": identified.ranks.tolist()}


BANKS = (1, 4, 16, 60)
"""Numbers of images behind the banks that are inverted."""


class Control(NamedTuple):
    """An inversion with a known answer.

    Attributes:
        name: What was inverted.
        images: Reconstructions in [0, 1] [n, ch, H, W].
        true: The images behind it [m, ch, H, W].
    """

    name: str
    images: Tensor
    true: Tensor


def positive_controls(attack: Attack, private: Tensor) -> Iterator[Control]:
    """Inverts what a few images of the attacked client give, by the same search.

    Of a memory, the features of one image position by position, then banks of 1, 4, 16 and 60 images, as far as the
    client has so many; of weights, the gradient of one image of known class. Images that are sent need no search.

    Args:
        attack: The attack, which has been run.
        private: The client's images in [0, 1] [n, ch, H, W], in its own order.
    """
    order = torch.randperm(len(private), generator=generator(attack.options.seed, "positive control"))
    if attack.target == "weights":
        with attack.run.display.progress("Positive control") as progress:
            inverted = attack.invert_one_gradient(int(order[0]), progress)
        yield Control("gradient of one image", inverted.images, private[order[:1]])
    if attack.target != "memory":
        return
    run = attack.run
    with run.display.progress("Positive controls") as progress:
        one_image = private[order[:1]]
        with torch.no_grad():
            features = attack.encode(one_image.to(run.fabric.device))[0]
        yield Control(
            "one image, by position", attack.search_features(features, True, 1, progress).images, one_image
        )
        positions = torch.tensor(run.data.partition.clients[attack.client])
        for size in (size for size in BANKS if size <= len(private)):
            chosen = order[:size]
            loader = run.data.module.normal_loader(positions[chosen].tolist())
            context = Context(attack.options.seed, 0, attack.client)
            bank = attack.bank.of_images(loader, context)
            images = min(size, attack.options.images)
            inverted = attack.search_features(bank, attack.bank.ordered, images, progress)
            yield Control(f"bank of {size} image{'s' * (size > 1)}", inverted.images, private[chosen])


class Judged(NamedTuple):
    """Reconstructions and the private images that they come nearest to.

    Attributes:
        images: Reconstructions in [0, 1] [n, ch, H, W].
        matches: The nearest private image of each.
    """

    images: Tensor
    matches: Matches

    def best(self, shown: int) -> list[int]:
        """Lists the reconstructions of highest PSNR, the best first."""
        return self.matches.psnr.argsort(descending=True)[:shown].tolist()

    def summary(self, mean: Tensor) -> dict[str, float]:
        """Computes PSNR in dB, and SSIM: means, the best values, and all beside the mean image [1, ch, H, W]."""
        return {
            "psnr": float(self.matches.psnr.mean()),
            "ssim": float(self.matches.ssim.mean()),
            "best_psnr": float(self.matches.psnr.max()),
            "best_ssim": float(self.matches.ssim.max()),
            "psnr_to_mean_image": float(closest(self.images, mean).psnr.mean()),
        }


def judge(images: Tensor, private: Tensor) -> Judged:
    """Compares reconstructions [n, ch, H, W] with all private images [m, ch, H, W], both in [0, 1]."""
    return Judged(images, closest(images, private))


def draw_inversion(
    judged: Judged, control: Judged, private: Tensor, names: Sequence[str], title: str
) -> Figure:
    """Draws the best reconstructions, the private images they are nearest to, and the best of the control.

    At most 16 rows; names are those of the attacked client and of the control.
    """
    rows = []
    for best, other in zip(judged.best(_MAX_ROWS), control.best(_MAX_ROWS), strict=False):
        index = int(judged.matches.nearest[best])
        rows.append(
            [
                _panel(judged.images[best], _quality(judged, best)),
                _panel(private[index], f"image {index} of {names[0]}"),
                _panel(control.images[other], _quality(control, other)),
            ]
        )
    return inversion_sheet(rows, ["reconstruction", "closest private image", names[1]], title)


def _quality(judged: Judged, index: int) -> str:
    return f"{judged.matches.psnr[index]:.1f} dB, SSIM {judged.matches.ssim[index]:.2f}"


def _panel(image: Tensor, caption: str) -> Shown:
    pixels = image.permute(1, 2, 0).numpy()
    return Shown(pixels[..., 0] if pixels.shape[2] == 1 else pixels, caption)


_ENDS = {"": "top1", "_low": "low", "_high": "high", "_chance": "chance"}


def invert(run: FinishedRun, options: InversionOptions) -> Outcome:
    """Reconstructs images from what a client sends; writes ``privacy/inversion.json`` and ``figures/inversion.png``.

    What is attacked is what the method shares:

    - ``memory`` (FedDyMem, federated PatchCore): images are sought whose generated features are the bank: position by
      position where the bank keeps positions (`PositionReduce`), as a set where it does not. Of a bank that was moved
      towards the last shared one, the client's own part is taken, which the server can compute.
    - ``weights`` of a classifier (FedAvg and methods like it): the update is inverted as a gradient.
    - ``images`` (FedDM, FedVCK): they are judged as they are.

    Args:
        run: The attacked run.
        options: Whom to attack and how.

    Returns:
        How near reconstructions come to the client's images.

    Raises:
        UserError: If there is no such client, an option does not fit, or the method shares nothing that this attack is
            about.
    """
    attack = Attack.of(run, options)
    private = private_images(run, attack.client)
    mean = private.mean(0, keepdim=True)
    reconstructed, control = attack(attack.client), attack(attack.control)
    reached, by_control = judge(reconstructed.images, private), judge(control.images, private)
    names = [f"client {attack.client}", f"control (client {attack.control})"]
    judged = zip((*names, "mean image"), (reached, by_control, judge(mean, private)), strict=True)
    summaries = {name: result.summary(mean) for name, result in judged}
    jury = Jury(run, attack.client)
    identified = {
        name: jury.identify(result.images)
        for name, result in zip(names, (reconstructed, control), strict=True)
    }
    easier = [
        {
            "control": result.name,
            **jury.identify(result.images, result.true),
            **judge(result.images, result.true).summary(mean),
        }
        for result in positive_controls(attack, private)
    ]
    positions = run.data.partition.clients[attack.client]
    report = {
        "method": run.result["method"],
        **attack.described,
        "private_images": len(private),
        "judged": summaries,
        "judge": jury.name,
        "candidates": jury.candidates,
        "identified": identified,
        **{f"top1{end}": identified[names[0]][key] for end, key in _ENDS.items()},
        "top1_control": identified[names[1]]["top1"],
        "positive_controls": easier,
        "closest": [positions[index] for index in reached.matches.nearest.tolist()],
        "psnr": reached.matches.psnr.tolist(),
        "ssim": reached.matches.ssim.tolist(),
        "losses": reconstructed.losses,
        "control_losses": control.losses,
    }
    path = save_json(run.folder.path / "privacy", "inversion.json", report)
    figure = run.folder.path / "figures" / "inversion.png"
    title = f"{run.result['method']}: inversion of the {attack.target} sent by client {attack.client}"
    save_figure(draw_inversion(reached, by_control, private, names, title), figure)
    metrics = {f"inversion/top1{end}": float(report[f"top1{end}"]) for end in _ENDS}
    metrics["inversion/psnr"] = summaries[names[0]]["psnr"]
    return Outcome("inversion", report, metrics, [path, figure])

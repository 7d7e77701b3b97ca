"""Reconstructs images from what a client of a finished run sends, by inversion.

A client of the run sends once more, in the exchange that would come next. Its message is attacked as the server could
attack it, and the reconstructions are compared with the client's own images. The same attack on another client,
compared with the same images, is the control: what it reaches is due to the prior and not to the upload. The positive
controls are easier attacks, whose answer is known: where they fail, the attack could not have found anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_fedad.audits.identification import Jury
from lit_fedad.audits.inversion_attack import Attack, InversionOptions, private_images
from lit_fedad.audits.page import Outcome
from lit_fedad.audits.reconstruction import Matches, closest
from lit_fedad.contracts import Context
from lit_fedad.contracts.randomness import generator
from lit_fedad.experiment.figures.embedding import loader_of
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.audit_figures import Shown, inversion_sheet
from lit_fedad.report.figures import save_figure

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
    """Inverts what few images of the attacked client give, by the same search.

    Of a memory, the features of one image position by position, then banks of 1, 4, 16 and 60 images, as far as the
    client has so many; of weights, the gradient of one image of known class. Images that are sent need no search.

    Args:
        attack: The attack, which has been run.
        private: The client's images in [0, 1] [n, ch, H, W], in its own order.
    """
    order = torch.randperm(len(private), generator=generator(attack.options.seed, "positive control"))
    if attack.target == "weights":
        with attack.run.display.progress("Positive control") as progress:
            found = attack.invert_one_gradient(int(order[0]), progress)
        yield Control("gradient of one image", found.images.cpu(), private[order[:1]])
    if attack.target != "memory":
        return
    run = attack.run
    with run.display.progress("Positive controls") as progress:
        one = private[order[:1]]
        with torch.no_grad():
            features = attack.encode(one.to(run.fabric.device))[0]
        yield Control(
            "one image, by position", attack.search_features(features, True, 1, progress).images.cpu(), one
        )
        held = torch.tensor(run.data.partition.clients[attack.client])
        for size in (size for size in BANKS if size <= len(private)):
            chosen = order[:size]
            loader = loader_of(run.data.module.train, held[chosen], run.data)
            context = Context(attack.options.seed, 0, attack.client)
            bank = attack.bank.of_images(loader, context)
            images = min(size, attack.options.images)
            found = attack.search_features(bank, attack.bank.ordered, images, progress)
            yield Control(f"bank of {size} image{'s' * (size > 1)}", found.images.cpu(), private[chosen])


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
    own: Judged, control: Judged, private: Tensor, shown: int, names: Sequence[str], title: str
) -> Figure:
    """Draws the best reconstructions, the private images they are nearest to, and the best of the control.

    At most ``shown`` rows; names are those of the attacked client and of the control.
    """
    rows = []
    for best, other in zip(own.best(shown), control.best(shown), strict=False):
        index = int(own.matches.nearest[best])
        rows.append(
            [
                _panel(own.images[best], _quality(own, best)),
                _panel(private[index], f"image {index} of {names[0]}"),
                _panel(control.images[other], _quality(control, other)),
            ]
        )
    return inversion_sheet(rows, ["reconstruction", "closest private image", names[1]], title)


def _quality(judged: Judged, index: int) -> str:
    return f"{judged.matches.psnr[index]:.1f} dB, SSIM {judged.matches.ssim[index]:.2f}"


def _panel(image: Tensor, caption: str) -> Shown:
    pixels = image.cpu().permute(1, 2, 0).numpy()
    return Shown(pixels[..., 0] if pixels.shape[2] == 1 else pixels, caption)


__all__ = ["InversionOptions", "invert"]

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
    own, control = attack(attack.client), attack(attack.control)
    reached, by_control = judge(own.images, private), judge(control.images, private)
    names = [f"client {attack.client}", f"control (client {attack.control})"]
    judged = zip((*names, "mean image"), (reached, by_control, judge(mean, private)), strict=True)
    summaries = {name: one.summary(mean) for name, one in judged}
    jury = Jury(run, attack.client)
    found = {name: jury.identify(one.images) for name, one in zip(names, (own, control), strict=True)}
    easier = [
        {
            "control": one.name,
            **jury.identify(one.images, one.true),
            **judge(one.images, one.true).summary(mean),
        }
        for one in positive_controls(attack, private)
    ]
    held = run.data.partition.clients[attack.client]
    report = {
        "method": run.result["method"],
        **attack.described,
        "private_images": len(private),
        "judged": summaries,
        "judge": jury.name,
        "candidates": jury.candidates,
        "identified": found,
        **{f"top1{end}": found[names[0]][key] for end, key in _ENDS.items()},
        "top1_control": found[names[1]]["top1"],
        "positive_controls": easier,
        "closest": [held[index] for index in reached.matches.nearest.tolist()],
        "psnr": reached.matches.psnr.tolist(),
        "ssim": reached.matches.ssim.tolist(),
        "losses": own.losses,
        "control_losses": control.losses,
    }
    path = RunFolder(run.folder.path / "privacy").save_json("inversion.json", report)
    figure = run.folder.path / "figures" / "inversion.png"
    title = f"{run.result['method']}: inversion of the {attack.target} sent by client {attack.client}"
    save_figure(draw_inversion(reached, by_control, private, options.images, names, title), figure)
    metrics = {f"inversion/top1{end}": float(report[f"top1{end}"]) for end in _ENDS}
    metrics["inversion/psnr"] = summaries[names[0]]["psnr"]
    return Outcome("inversion", report, metrics, [path, figure])

"""FedVCK as its authors released it, where that differs from the paper's text (Youth-49/FedVCK_2024).

Six differences, each an argument of client or server: synthetic images go on from round to round instead of beginning
as noise; the weight of the contrast falls to a tenth in every round and stays there; images are drawn by the softmax of
their importance; the contrast counts classes as often as a batch has them; clients condense under random networks of
their own in round 1; and K counts the class itself (`negatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from lightning.fabric import Fabric
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.kernels import Kernel
from lit_fedad.condensation.relations import RelationalContrast
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss
from lit_fedad.contracts import Message
from lit_fedad.methods.feddm import OwnImages
from lit_fedad.methods.fedvck import Constraints, FedVCKClient, FedVCKServer
from lit_fedad.tasks.classifier import Classifier


class FedVCKReleasedClient(FedVCKClient):
    """A client of FedVCK with the released code's images, draws and first model.

    Args:
        task: See `FedVCKClient`, also for the other arguments that are not listed here.
        go_on: Whether synthetic images go on where they ended in the client's last round.
        softmax: Whether images are drawn by the softmax of their importance, not in proportion to it.
        own_first_model: Whether the client condenses under random weights of its own in round 1, which are also its
            previous model in round 2.
    """

    state_names: ClassVar[tuple[str, ...]] = ("synthetic",)

    def __init__(
        self,
        task: Classifier,
        condensation: Condensation,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        share: float = 0.01,
        minimum: int = 5,
        least: int = 10,
        init: Literal["noise", "real"] = "noise",
        quantize: bool = True,
        kernel: Kernel = "linear",
        constraints: Constraints = "running",
        selection: bool = True,
        alpha: float = 0.5,
        bias: float = 0.0,
        prototype_images: int = 1,
        ranks: bool = False,
        go_on: bool = True,
        softmax: bool = True,
        own_first_model: bool = True,
    ) -> None:
        given = share, minimum, least, init, quantize, kernel, constraints, selection, alpha, bias
        super().__init__(task, condensation, mean, std, *given, prototype_images, ranks)
        self.go_on, self.softmax, self.own_first_model = go_on, softmax, own_first_model

    def condense(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Condenses as FedVCK does, in round 1 under weights of its own."""
        if self.own_first_model and self.context.round == 1:
            with self.context.seeded("own first model"):
                draw_weights(self.task)
        return super().condense(loader, fabric)

    def _start(self, own: OwnImages, counts: Sequence[int], generator: Generator) -> Tensor:
        start = super()._start(own, counts, generator)
        return self.synthetic if self.go_on and self.synthetic.shape == start.shape else start

    def _chances(self, weights: Tensor) -> Tensor:
        return weights.softmax(0) if self.softmax else super()._chances(weights)


def draw_weights(task: nn.Module) -> None:
    """Draws the weights of all layers anew, from torch's global generator, each as its kind begins."""
    for layer in task.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()


class FedVCKReleasedServer(FedVCKServer):
    """The server of FedVCK with the released code's contrast.

    Args:
        client: See `FedVCKServer`, also for the other arguments that are not listed here.
        prior: See `RelationalContrast`.
        falling: Whether the weight of the contrast falls to a tenth from round to round.
    """

    def __init__(
        self,
        client: FedVCKClient,
        training: CondensedTraining,
        rounds_kept: int | None = None,
        contrast: float = 0.05,
        negatives: int = 4,
        temperature: float = 1.0,
        with_own: bool = True,
        head_width: int = 128,
        head_rate: float = 0.01,
        prior: bool = True,
        falling: bool = True,
    ) -> None:
        given = rounds_kept, contrast, negatives, temperature, with_own, head_width, head_rate
        super().__init__(client, training, *given)
        self.prior, self.falling = prior, falling

    def _relate(self, messages: Sequence[Message]) -> ExtraLoss | None:
        """Returns the contrast: in round t with a weight of 10^-(t - 1) where it falls."""
        extra = super()._relate(messages)
        if extra is None or not self.falling:
            return extra
        return ExtraLoss(extra.module, extra.weight * 0.1 ** (self.context.round - 1), extra.learning_rate)

    def _contrast(self, features: Tensor, negatives: Tensor) -> RelationalContrast:
        """Builds the contrast, with the batch's frequencies."""
        return RelationalContrast(
            features, negatives, self.head_width, self.temperature, self.with_own, self.prior
        )

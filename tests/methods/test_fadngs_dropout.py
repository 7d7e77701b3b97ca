"""FADngs' distillation of a network with dropout: its draws belong to the round."""

import torch
from torch import nn

from lit_fedad.methods.fadngs import FADngsClient, FADngsServer
from lit_fedad.methods.parts.ensemble_distillation import EnsembleDistillation


class Forgetful(nn.Sequential):
    num_features = 8

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, stride=2), nn.AvgPool2d(3), nn.Flatten(), nn.Dropout(0.5))


def test_dropout_depends_on_the_round_alone(federate, make_contrastive, make_images, exactly):
    """Not on numbers that the process has drawn before, as it has not after an interruption."""
    public = torch.arange(12 * 3 * 8 * 8).remainder(251).to(torch.uint8).view(12, 3, 8, 8)
    distillation = EnsembleDistillation(queue=16, epochs=2, batch_size=5, learning_rate=0.01)
    weights = []
    for drawn in (1, 2):
        torch.manual_seed(0)
        played = federate(
            FADngsClient,
            FADngsServer,
            task=make_contrastive(encoder=Forgetful(), warmup=0),
            data={0: make_images(), 1: make_images(seed=1)},
            server={"distillation": distillation, "public": public},
            rounds=2,
            question=lambda client, number: None,
            after_round=lambda *_, count=drawn: torch.manual_seed(count),
        )
        weights.append(played.server.weights)
    exactly(*weights)

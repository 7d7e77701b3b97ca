"""Who is pointed at by a reconstruction, by hand and against SciPy's exact interval."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import beta

from lit_fedad.audits import inversion, inversion_attack
from lit_fedad.audits.inversion import Jury, draw_inversion, identify, judge


def test_ranks_by_hand():
    """Distances to the nearest true image, and how many of the others lie nearer."""
    true, others = torch.tensor([[0.0], [10.0]]), torch.tensor([[4.0], [5.0], [6.0]])
    found = identify(torch.tensor([[1.0], [5.1], [9.0], [4.4]]), true, others)
    assert found.ranks.tolist() == [1, 4, 1, 4]
    assert found.top1 == 0.5
    assert found.chance == pytest.approx(0.4)


def test_the_interval_is_clopper_pearsons():
    true, others = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    found = identify(torch.tensor([[0.1], [0.2], [0.9], [0.3], [0.0]]), true, others)
    assert found.top1 == 0.8
    assert found.low == pytest.approx(beta.ppf(0.025, 4, 2))
    assert found.high == pytest.approx(beta.ppf(0.975, 5, 1))


def test_features_count_in_units_of_their_deviation():
    true, others = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1e6], [1.0, 1e6], [1.0, 0.0]])
    shown = torch.tensor([[0.1, 1e5], [0.9, 1e5]])
    assert (
        identify(shown, true, others).ranks.tolist()
        == identify(
            shown * torch.tensor([1, 1e-6]), true * torch.tensor([1, 1e-6]), others * torch.tensor([1, 1e-6])
        ).ranks.tolist()
    )


def test_noise_points_at_nobody():
    generator = torch.Generator().manual_seed(0)
    shown, true, others = (torch.randn(n, 16, generator=generator) for n in (400, 20, 60))
    found = identify(shown, true, others)
    assert abs(found.top1 - found.chance) < 0.15


def run_of(clients, classes):
    """A run of clients that hold images, each of a class."""
    images = SimpleNamespace(train=[SimpleNamespace(category=name) for name in classes])
    data = SimpleNamespace(partition=SimpleNamespace(clients=clients), images=images)
    return SimpleNamespace(model=SimpleNamespace(provenance={}), data=data)


@pytest.mark.parametrize(("shared", "chance"), [(0, 0.4), (1, 0.5), (3, 1.0)])
def test_images_that_others_hold_too_are_no_candidates(monkeypatch, shared, chance):
    """Where all images are equal, nearest to one of the client's would else be nearest to it alone."""
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[2 : 2 + shared] = images[0]
    for module in (inversion, inversion_attack):
        monkeypatch.setattr(module, "pixels", lambda run, positions: images[list(positions)])
    found = Jury(run_of([[0, 1], [2, 3, 4]], "ccccc"), 0).identify(images[:1])
    assert (found["top1"], found["chance"]) == (1.0, pytest.approx(chance))


@pytest.mark.parametrize(
    ("classes", "others", "said"),
    [("ccdc", 1, "1 of others, of its classes"), ("ccdd", 2, "2 of others, of other classes")],
)
def test_candidates_are_of_the_classes_that_the_client_holds(monkeypatch, classes, others, said):
    """The class alone would else tell the client's images apart from those of others."""
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for module in (inversion, inversion_attack):
        monkeypatch.setattr(module, "pixels", lambda run, positions: images[list(positions)])
    jury = Jury(run_of([[0, 1], [2, 3]], classes), 0)
    assert len(jury.others) == others
    assert jury.candidates.startswith(f"2 of the client and {said}")


def test_of_many_reconstructions_the_best_are_drawn():
    """All of them would be a picture that is too high for a file."""
    private = torch.rand(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    judged = judge(private, private)
    figure = draw_inversion(judged, judged, private, ["client 0", "control"], "inversion")
    assert len(figure.axes) == 3 * 16

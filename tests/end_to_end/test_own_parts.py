"""By default every method's own part changes what it predicts; docs/parameter_sharing.md names the exceptions."""

import pytest
import torch
from helpers.nightly import by_method
from helpers.pairs import PAIRS, TASKS

from lit_fedad.core.config_groups import choices
from lit_fedad.evaluation import accuracy, accuracy_stream, predict
from lit_fedad.evaluation.predict import predict_batch

CLIENT, SERVER = "method.client", "method.server"
FEDAVG = ("method=fedavg",)  # in place of the method: what it does beyond averages is left out

# What leaves each part of a method out.
OFF = {
    "apfl": [(f"{CLIENT}.adaptive=false",)],
    "apple": [(f"{SERVER}.independent_init=false",)],
    "creff": [FEDAVG],
    "dbe": [(f"{CLIENT}.kappa=0.0",)],
    "deep_svdd": [(f"{CLIENT}.pretraining=0",)],
    "desa": [(f"{CLIENT}.anchor_weight=0.0",), (f"{CLIENT}.distillation=0.0",), (f"{CLIENT}.contrast=0.0",)],
    "dfrd": [(f"{SERVER}.steps=0",)],
    "ditto": [(f"{CLIENT}.lam=0.0",)],
    "elsa": [FEDAVG],
    "fadngs": [
        (f"{CLIENT}.share_densities=false",),
        (f"{SERVER}.distillation=null",),
        ("contrastive_loss=simclr",),
    ],
    "fadngs_code": [("contrastive_loss=crad",), (f"{SERVER}.distillation.own_key=false",)],
    "fadngs_literal": [("task.loss.base_temperature=0.07",), ("task.score_from=encoder",)],
    "fedadagrad": [FEDAVG],
    "fedadam": [FEDAVG],
    "fedavgm": [FEDAVG],
    "fedbn": [FEDAVG],
    "feddm": [(f"{CLIENT}.radius=0.0",)],
    "feddymem": [
        ("task.head=null",),
        ("task.whiten=null",),
        ("task.loss.repulsion=0.0",),
        ("task.image_score=null",),
        (f"{SERVER}.aggregation.weighted=false",),
        (f"{SERVER}.aggregation.continued=false",),
    ],
    "feddymem_literal": [(f"{CLIENT}.independent_init=false",)],
    "feddyn": [FEDAVG],
    "fedgan": [(f"{CLIENT}.share=0.0",)],
    "fedgen": [(f"{CLIENT}.weight=0.0",)],
    "fedic": [(f"{SERVER}.steps=0",)],
    "fedmix": [(f"{CLIENT}.weight=0.0",)],
    "fednova": [FEDAVG],
    "fedphp": [(f"{CLIENT}.weight=0.0",), (f"{CLIENT}.mu=0.0",)],
    "fedprox": [(f"{CLIENT}.mu=0.0",)],
    "fedrep": [FEDAVG],
    "fedvck": [(f"{CLIENT}.selection=false",), (f"{CLIENT}.constraints=own",), (f"{SERVER}.contrast=0.0",)],
    "fedvck_released": [(f"{CLIENT}.continue_images=false",), (f"{CLIENT}.constraints=batch",)],
    "fedyogi": [FEDAVG],
    "gldp": [(f"{CLIENT}.lam=0.0",), (f"{CLIENT}.lam=1.0",)],
    "moon": [(f"{CLIENT}.mu=0.0",)],
    "panda": [(f"{CLIENT}.bank=own",)],
    "pfedme": [FEDAVG],
}
# Without a part that can be left out.
WHOLE = {
    "centralised", "local", "nearest_neighbour", "fedavg",  # nothing beyond the task, or averages
    "federated_bank", "federated_padim", "federated_patchcore", "federated_subspace", "prototype_statistics",  # one sum
    "feddetect",  # one threshold for all
    "fedvck_sums",  # condensed images alone
    "scaffold",  # controls are no setting; tests/methods/test_scaffold.py plays without them
}  # fmt: skip
# Where the method works with several, what it does beyond them is seen best on the one that is judged fastest.
FIRST = ("classifier", *TASKS)
LONG = f"{CLIENT}.local_epochs=8"  # a round of one step holds nothing that draws weights back
# So many draws, under a model that errs by unlike amounts, that what it errs by decides some of them.
DRAWS = (f"{CLIENT}.condensation.steps=10", f"{CLIENT}.condensation.batch=16", f"{SERVER}.training.epochs=20")
# Clients of unlike sizes, and so of unlike numbers of steps.
UNLIKE = ("partition=dirichlet", "partition.clients=4", "partition.min_size=2", "batch_size=2")
SIZES = {
    **dict.fromkeys(("apfl", "fedphp", "fedprox", "moon"), (LONG,)),
    "feddymem": ("task.slots=32",),
    "fedmix": (f"{CLIENT}.weight=0.05",),  # the default
    "dfrd": (f"{SERVER}.steps=10", f"{SERVER}.batch_size=16"),  # steps: the default
    "fednova": UNLIKE,
    **dict.fromkeys(("fedvck", "fedvck_released"), DRAWS),
}
LEAST = 1e-4  # of the distance that training moves what is predicted


def test_every_method_is_here():
    assert {*OFF} | WHOLE == {*choices("method")}
    assert not {*OFF} & WHOLE


@pytest.fixture(scope="module")
def played():
    """What runs predicted, by their overrides."""
    return {}


@pytest.fixture
def predicted(lab, pair_overrides, monkeypatch, tmp_path, played):
    """What the clients of a small run predict of images, first and last [n], of those that calibrate too."""
    seen = {}

    def note(client, prediction):
        numbers = prediction.image_score if prediction.logits is None else prediction.logits.softmax(-1)
        seen.setdefault(client.context.round, []).append(numbers.detach().cpu().flatten())
        return prediction

    for module in (accuracy, accuracy_stream, predict):
        monkeypatch.setattr(
            module, "predict_batch", lambda client, *given: note(client, predict_batch(client, *given))
        )

    def play(method, changes):
        task = next(task for task in FIRST if PAIRS[method, task] is None)
        given = (
            *pair_overrides(method, task),
            *SIZES.get(method, ()),
            "calibration.share=0",
            "evaluation.every=2",
        )
        if changes == FEDAVG:
            given = tuple(o for o in given if not o.startswith(("method", "public.")))
        given += changes
        if given not in played:
            seen.clear()
            lab.train(tmp_path / str(len(played)), *given)
            played[given] = [torch.cat(seen[round]).double() for round in (min(seen), max(seen))]
        return played[given]

    return play


def distance(one, other):
    """Root mean square of differences; a model in common has predicted once, models of clients one by one."""
    short, long = sorted((one, other), key=len)
    return float((short.repeat(len(long) // len(short)) - long).square().mean()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("method", "changes"), by_method((m, off) for m in OFF for off in OFF[m]))
def test_the_default_changes_what_is_predicted(predicted, method, changes):
    first, last = predicted(method, ())
    _, without = predicted(method, changes)
    assert distance(last, without) > LEAST * distance(last, first)

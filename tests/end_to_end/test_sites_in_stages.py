"""Sites whose images come in stages end with the digits of the same federation in one process."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from helpers.sites import DEBUG, HERE, NAMES, Here, OwnTests, coordinated, kept_states, settings, told

from lit_fedad.contracts.state import state_of
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.textures import textures
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator
from lit_fedad.experiment.train import train
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.site import Site

STAGES = {"north": ((0,), (1,)), "east": ((2,),), "south": ((4,), (3,))}
"""Products by stage: a site with fewer stages has longer ones, and stages need not follow the alphabet."""
ROUNDS = 4


def paint(folder):
    """Paints five products: all below ``all``, and those of each site below its folder; returns their names."""
    images = textures(folder / "painted", size=64, train_per_product=8, test_per_product=4)
    names = sorted(images.categories[:5])  # as folders are read
    root = images.train[0].path.parents[3]
    for site, stages in STAGES.items():
        for product in (names[number] for stage in stages for number in stage):
            shutil.copytree(root / product, folder / site / "images" / product)
            shutil.copytree(root / product, folder / "all" / product)
    return names


def sites(folder, products):
    """Three sites, each with its stages in its own overrides."""
    return [
        Site(replace(settings(folder, name), stages=stages_of(name, products)), Display(quiet=True))
        for name in NAMES
    ]


def stages_of(name, products):
    """What an operator says; nothing where all images are there from the start."""
    stages = [[products[number] for number in stage] for stage in STAGES[name]]
    return stages if len(stages) > 1 else ()


class OwnHere(AnomalyStreamEvaluator):
    """The evaluator of stages of one process; answers pass their message's form."""

    def score(self, client, number):
        return self.unpack(self.pack(super().score(client, number)))


def in_one_process(folder, overrides, products):
    """The run of the same federation, whose partition is a file with stages."""
    held = [name for name in products if (folder / "all" / name).exists()]
    data = ["data=mvtec_mixture", f"data.root={folder / 'all'}", f"data.products=[{','.join(held)}]"]
    data += ["data.train_per_product=null", "data.test_per_product=null"]
    stages = [
        [[i for number in stage for i in range(8 * number, 8 * number + 8)] for stage in STAGES[name]]
        for name in NAMES
    ]
    (folder / "stages.json").write_text(json.dumps({"stages": stages}))
    config = compose([
        *overrides, *data, "partition=file", f"partition.path={folder / 'stages.json'}", "~partition.clients",
        "tracking=off", f"out={folder / 'one'}", f"cache.folder={folder / 'cache'}", *HERE,
    ])  # fmt: skip
    clients = OwnTests(evaluator_of)
    train(config, clients, quiet=True)
    return clients.run


def evaluator_of(run):
    """An evaluator of stages that packs answers as sites do."""
    judge = run.federation.evaluator
    assert isinstance(judge, AnomalyStreamEvaluator)
    counts = run.local.partition.stage_counts(run.local.images)
    own = OwnHere(judge.judges, judge.timetable, counts, judge.pro_limit, common=False)
    own.metrics = judge.metrics
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["method=federated_bank"], ["method=federated_subspace"], ["method=fedavg", "task=memory_bank"]],
    ids=lambda overrides: overrides[0],
)
def test_sites_with_stages_and_one_process_end_alike(tmp_path, differences, overrides):
    overrides = [*overrides, *DEBUG, f"rounds={ROUNDS}"]
    products = paint(tmp_path)
    plan = Plan(overrides, NAMES, str(tmp_path / "run"), HERE)
    result, there = coordinated(plan, Here(sites(tmp_path, products)))
    one = in_one_process(tmp_path, overrides, products).federation
    assert told(there.history) == told(one.history)
    assert differences(state_of(there.server), state_of(one.server)) == []
    for client, kept in enumerate(kept_states(tmp_path, there)):
        assert differences(kept, one.pool.get(client)) == []
    of_sites, of_one = (
        json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("run", "one")
    )
    assert of_sites == of_one
    assert [len(own) for own in result["partition"]["stage_sizes"]] == [2, 1, 2]
    # Sites in their second stage are judged on what they have met, the others on all that they will ever meet.
    assert sorted(there.data.milestones) == [2, 4]
    tasks = [there.history[-1].metrics["i_auroc_task_2"]["per_client"][client] for client in range(3)]
    assert [value == value for value in tasks] == [True, False, True]
    assert set(result["last"]) >= {"i_auroc", "forgetting", "incremental_i_auroc", "i_auroc_task_2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "overrides", "cause"),
    [
        ([[0]], [], r"product .* must be in one, and is in 0"),
        ([[0], [0, 1]], [], r"product .* must be in one, and is in 2"),
        ([[0], [1], [4]], [], "it has the products .*, and no others"),
        ([[0], [1]], ["rounds=1"], "has images in 2 stages, and rounds=1: give at least as many rounds"),
        ([[0], [1]], ["federation=secure"], "has no key registry"),
    ],
)
def test_stages_that_cannot_be_are_refused_in_one_line(tmp_path, capfd, stages, overrides, cause):
    products = paint(tmp_path)
    own = replace(
        settings(tmp_path, "north"), stages=[[products[number] for number in stage] for stage in stages]
    )
    plan = Plan(
        ["method=federated_subspace", *DEBUG, *overrides],
        NAMES,
        str(tmp_path / "run"),
        ("fabric.accelerator=cpu",),
    )
    others = [Site(settings(tmp_path, name), Display(quiet=True)) for name in NAMES[1:]]
    with pytest.raises(UserError, match="^site north:? (has|failed)") as refused:
        coordinate(plan, Here([Site(own, Display(quiet=True)), *others]), quiet=True)
    assert not any(product in str(refused.value) for product in products)  # they stay in the site's log
    assert re.search(cause, " ".join([*capfd.readouterr().err.split(), str(refused.value)]))

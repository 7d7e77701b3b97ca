"""Every mistake in a configuration ends in one line."""

from __future__ import annotations

import pytest

from lit_fedad.config import build, call, compose
from lit_fedad.data.transform import ImageTransform
from lit_fedad.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.processes import make_fabric


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task.learning_rat=1"], "unknown key 'task.learning_rat'; did you mean 'task.learning_rate'"),
        (["metod=feddymem"], "did you mean 'method'"),
        (["partition.alfa=1"], "did you mean 'partition.alpha'"),
        (["method=feddymm"], "method has no option 'feddymm'; did you mean 'feddymem'"),
        (["backbone=resnet"], "did you mean 'resnet18'"),
        (["data=mvtec_mixture"], "'data.root' must be given: data.root=..."),
        (["partition=file"], "'partition.path' must be given"),
        (["method"], "'method' is not of the form key=value"),
        (["task.grid=[1,2"], "[1,2"),
        (["+taks.grid=3"], "did you mean 'task'"),
        (["+evaluation.evry=3"], "evaluation has no key 'evry'; did you mean 'every'"),
        (["+cache.foldr=x"], "cache has no key 'foldr'; did you mean 'folder'"),
        (["rounds=many"], "rounds='many' must be int"),
        (["rounds=-1"], "rounds=-1 must be at least 0"),
        (["batch_size=0"], "batch_size=0 must be at least 1"),
        (["seed=null"], "seed=None must be int"),
        (["fresh=3"], "fresh=3 must be bool"),
        (["start=3"], "start=3 must be null or str"),
        (["public=folder"], "'public.root' must be given"),
        (["contrastive_loss=crat"], "contrastive_loss has no option 'crat'; did you mean 'crad'"),
        (["out=[a]"], "out=['a'] must be null or str"),
        (["evaluation.every=0"], "evaluation.every=0 must be at least 1"),
        (["evaluation=3"], "evaluation"),
        (["callbacks=3"], "callbacks=3 must be a section"),
        (["+callbacks.pictures=3"], "callbacks.pictures=3 must be a section with _target_"),
        (["+callbacks.pictures.every=3"], "callbacks.pictures={'every': 3} must be a section with _target_"),
    ],
)
def test_mistake_is_refused_when_composing(overrides, said):
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+task.learning_rat=1"], "MemoryBank has no key 'learning_rat'; did you mean 'learning_rate'"),
        (["+task.head.hiden=1"], "MemoryGenerator has no key 'hiden'; did you mean 'hidden'"),
        (["task.learning_rate=high"], "MemoryBank.learning_rate='high' must be float"),
        (["task.grid=1.5"], "MemoryBank.grid=1.5 must be int"),
        (["task.standardise=1"], "MemoryBank.standardise=1 must be bool"),
        (["task._target_=lit_fedad.tasks.memory_bank.MemoryBnk"], "cannot be imported"),
        (["backbone.layers=1"], "layers=1 must be list"),
        (["~task.loss"], "MemoryBank needs 'loss'"),
        (["+method.client.epochs=3"], "did you mean 'local_epochs'"),
        (["method.client.local_epochs=0"], "local_epochs=0 must be at least 1"),
        (["method=apfl", "method.client.alpha=2"], "method.client.alpha=2 must be in [0, 1]"),
        (["method=fadngs", "task.warmup=x"], "Contrastive.warmup='x' must be int"),
    ],
)
def test_mistake_is_refused_when_building_the_model(overrides, said):
    with pytest.raises(UserError) as error:
        build_model(compose(["debug=seconds", *overrides]), ["a", "b"])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "overrides", "said"),
    [
        (
            "data",
            ["data=mvtec_mixture", "data.root=x", "data.products=bottle"],
            "products='bottle' must be list or null",
        ),
        ("data", ["data.root=5"], "root=5 must be null or str"),
        (
            "partition",
            ["partition=dirichlet", "partition.clients=two"],
            "Dirichlet.clients='two' must be int",
        ),
        ("partition", ["partition=pooled", "+partition.clients=2"], "Pooled has no key 'clients'"),
    ],
)
def test_mistake_in_a_section_is_refused(section, overrides, said):
    with pytest.raises(UserError) as error:
        build(compose(overrides)[section])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("target", "section", "overrides", "said"),
    [
        (ImageTransform, "image", ["+image.sise=3"], "image has no key 'sise'; did you mean 'size'"),
        (ImageTransform, "image", ["image.size=big"], "image.size='big' must be int"),
        (make_fabric, "fabric", ["fabric.accelerator=cup"], "cup"),
        (make_fabric, "fabric", ["fabric.accelerator=cpu", "fabric.devices=two"], "devices"),
        (make_fabric, "fabric", ["fabric.precision=12"], "12"),
        (make_fabric, "fabric", ["+fabric.device=2"], "did you mean 'devices'"),
    ],
)
def test_mistake_in_a_section_without_target_is_refused(target, section, overrides, said):
    with pytest.raises(UserError) as error:
        call(target, compose(overrides)[section], section)
    assert said in str(error.value)
    assert "\n" not in str(error.value)

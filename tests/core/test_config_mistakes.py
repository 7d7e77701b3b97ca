"""Every mistake in a configuration ends in one line."""

import copy
import functools

import pytest
from helpers.refusals import refusal
from hydra.core.override_parser.overrides_parser import OverridesParser

from lit_fedad.core.building import build, call
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import TILING
from lit_fedad.data.transform import ImageTransform
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.processes import make_fabric

composed = functools.cache(lambda *overrides: compose(overrides))


def composed_with(overrides):
    """Composes the files that overrides choose, once for all mistakes in them, and writes the other values into it."""
    keys = [override.partition("=")[0] for override in overrides]
    files = [o for o, key in zip(overrides, keys, strict=True) if "." not in key or key == "data.root"]
    config = copy.deepcopy(composed(*files))
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        if "." in override.key_or_group:
            *sections, key = override.key_or_group.split(".")
            section = functools.reduce(dict.__getitem__, sections, config)
            if override.is_delete():
                del section[key]
            else:
                section[key] = override.value()
    return config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task.learning_rat=1"], "unknown key 'task.learning_rat'; did you mean 'task.learning_rate'"),
        (["metod=feddymem"], "did you mean 'method'"),
        (["callbacks={mine: 1}"], "unknown key 'callbacks'; a new callback needs a plus sign: +callbacks="),
        (["callbacks.mine._target_=a.B"], "a new callback needs a plus sign: +callbacks.mine._target_="),
        (["METHOD=feddymem"], "unknown key 'METHOD'; did you mean 'method'?"),
        (["alpha=0.1"], "unknown key 'alpha'; did you mean 'evaluation.alpha' or 'partition.alpha'?"),
        (["method=fedbn", "method.client.mu=1"], "unknown key 'method.client.mu'; method.client has "),
        (
            ["method=fedavg", "method.client.keep_optimizer=true"],
            "unknown key 'method.client.keep_optimizer'; FedAvgClient takes it: give +method.client.keep_optimizer=...",
        ),
        (["method.server._target_=a.B", "method.server.nothing=1"], "unknown key 'method.server.nothing'"),
        (
            ["federation.privacy.epsilon=1"],
            "unknown key 'federation.privacy.epsilon'; choose federation/privacy= first: central, distributed, dp_sgd",
        ),
        (["partition.alfa=1"], "did you mean 'partition.alpha'"),
        (["method=5"], "method has no option '5'"),
        (
            ["contrastive_loss=crad"],
            "contrastive_loss=crad: this task has a loss of its own; give task=contrastive",
        ),
        (["method=[fedavg,../../elsewhere]"], "method has no option '[fedavg,../../elsewhere]'"),
        (["+method@_global_=../../elsewhere"], "method has no option '../../elsewhere'"),
        (["data=MVTec"], "data has no option 'MVTec'; did you mean 'mvtec'?"),
        (["data=mvtec", "data.root="], "data.root=: an empty path, as of a shell variable that is not set"),
        (["data=mvtec", 'data.root=""'], "an empty path"),
        (["--method=fedavg"], "'--method=fedavg' is not of the form key=value"),
        (["=1"], "'=1' is not of the form key=value"),
        (["method=padim"], "method has no option 'padim'; did you mean task=padim?"),
        (["method=feddymm"], "method has no option 'feddymm'; did you mean 'feddymem'"),
        (["backbone=resnet"], "did you mean 'resnet18'"),
        (
            ["data=./mine"],
            "data=./mine is no data set; a folder is given by data.root=./mine, with data=auto",
        ),
        (["data=mvtec_mixture"], "'data.root' must be given: data.root=..."),
        (["partition=file"], "'partition.path' must be given"),
        (["method"], "'method' is not of the form key=value"),
        (["data._target_=builtins.int"], "nothing that a section can describe"),
        (
            ["task.grid=[1,2"],
            """task.grid=[1,2 cannot be read; give "task.grid='[1,2'" to take it as typed""",
        ),
        (["+taks.grid=3"], "did you mean 'task'"),
        (["+evaluation.evry=3"], "evaluation has no key 'evry'; did you mean 'every'"),
        (["+cache.foldr=x"], "cache has no key 'foldr'; did you mean 'folder'"),
        (["seed=0,1"], "seed=0,1: a run has one value, and another run another; a list is [0,1]"),
        (["rounds=many"], "rounds='many' must be int"),
        (["rounds=-1"], "rounds=-1 must be at least 0"),
        (["batch_size=0"], "batch_size=0 must be at least 1"),
        (["seed=null"], "seed=None must be int"),
        (["tracking=null"], "tracking=null: every run has one"),
        (["~data"], "data=null: every run has one"),
        (["image=null"], "image=null: every run has one"),
        (["fabric=null"], "fabric=null: every run has one"),
        (["encoder=null"], "encoder=null: every run has one"),
        (["+encoder=null"], "encoder=null: every run has one"),
        (
            ["method=gldp", "features=null"],
            "task.encoder is that of 'features', which this configuration lacks",
        ),
        (["fresh=3"], "fresh=3 must be bool"),
        (["public=folder"], "'public.root' must be given"),
        (["contrastive_loss=crat"], "contrastive_loss has no option 'crat'; did you mean 'crad'"),
        (["evaluation.every=0"], "evaluation.every=0 must be at least 1"),
        (["grid=0"], "grid=0 must be in [1, 1024]"),
        (["image.size=0"], "image.size=0 must be in [1, 8192]"),
        (["image.size=1000000000"], "image.size=1000000000 must be in [1, 8192]"),
        (["image.size=nan"], "image.size=nan must be a finite number"),
        (["image.resize=-1"], "image.resize=-1 must be in [1, 8192]"),
        (["image.channels=0"], "image.channels=0 must be in [1, 3]"),
        (["evaluation.alpha=7"], "evaluation.alpha=7 must be auto, a number above 0 and below 1"),
        (["evaluation.alpha=-0.1"], "evaluation.alpha=-0.1 must be auto, a number above 0 and below 1"),
        (["evaluation.alpha=nan"], "evaluation.alpha=nan must be a finite number"),
        (
            ["evaluation.alpha=[0.1,1.0]"],
            "evaluation.alpha=[0.1, 1.0] must be auto, a number above 0 and below 1",
        ),
        (["evaluation.alpha=[]"], "evaluation.alpha=[] must hold a rate"),
        (["evaluation.alpha=low"], "evaluation.alpha=low must be auto, a number above 0 and below 1"),
        (["calibration.share=1"], "calibration.share=1 must be in [0, 0.9]"),
        (["calibration.folds=1"], "calibration.folds=1 must be in [2, 1000]"),
        (["calibration.by=site"], "calibration.by='site' must be one of ['product', 'client']"),
        (["calibration.shares=0.1"], "unknown key 'calibration.shares'"),
        (["evaluation.batch_size=0"], "evaluation.batch_size=0 must be at least 1"),
        (["evaluation.client_test=all"], "evaluation.client_test='all' must be one of ['own', 'balanced']"),
        (["evaluation.pictures=-1"], "evaluation.pictures=-1 must be at least 0"),
        (["evaluation=3"], "evaluation"),
        (["image=128"], "image must be a section; give image.size=..."),
        (["federation.robust=off"], "chosen with a slash; give federation/robust=off"),
        (["federation.privacy=central"], "chosen with a slash; give federation/privacy=central"),
        (["method=feddymem", "task.head=[1]"], "task.head=[1]: task.head must be a section"),
        (["backbone.layers={a:1}"], "backbone.layers={a:1}: backbone.layers must be a list"),
        (["callbacks=3"], "callbacks=3 must be a section"),
        (["+callbacks.pictures=3"], "callbacks.pictures=3 must be a section with _target_"),
        (["+callbacks.pictures.every=3"], "callbacks.pictures={'every': 3} must be a section with _target_"),
        (["out=n\udcff"], r"out=n\udcff: is not UTF-8"),
        (["+data.products=['n\udcff']"], r"data.products=n\udcff: is not UTF-8"),
        (["~seed"], "seed is missing, and every run has one"),
        (["~cache"], "cache.enabled is missing, and every run has one"),
        (["~evaluation.alone"], "evaluation.alone is missing, and every run has one"),
        (["~federation.sampler"], "federation.sampler is missing, and every run has one"),
        (["federation.channel=null"], "federation.channel must be a section with _target_"),
        (["federation.pool_bytes=x"], "federation.pool_bytes='x' must be int"),
        (["method=federated_bank", "method.under=1"], "method.under=1 must be a section"),
        (["method.client=null"], "method.client must be a section with _target_"),
        (["method.paper=null"], "method.paper=None must be str"),
        (["tracking.enabled=no"], "tracking.enabled='no' must be bool"),
        (["seed=9223372036854775808"], "seed=9223372036854775808 is too large a number"),
        (["hydra.run.dir=x"], "hydra.run.dir=x: Hydra starts nothing here"),
        (["+hydra=3"], "+hydra=3: Hydra starts nothing here"),
        (["+="], "'+=' is not of the form key=value"),
    ],
)
def test_mistake_is_refused_when_composing(overrides, said):
    with refusal() as error:
        compose(overrides)
    assert said in str(error.value)


def test_a_folder_in_place_of_a_data_set_is_told_from_a_misspelt_one(tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="a folder is given by data.root=plain, with data=auto"):
        compose(["data=plain"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+task.learning_rat=1"], "task has no key 'learning_rat'; did you mean 'learning_rate'"),
        (["method=feddymem", "+task.head.hiden=1"], "task.head has no key 'hiden'; did you mean 'hidden'"),
        (["task.learning_rate=high"], "task.learning_rate='high' must be float"),
        (["task.grid=1.5"], "task.grid=1.5 must be int"),
        (["task.standardise=1"], "task.standardise=1 must be bool"),
        (["task._target_=lit_fedad.tasks.memory_bank.MemoryBnk"], "cannot be imported"),
        (["backbone.layers=1"], "layers=1 must be list; give [1]"),
        (["~task.loss"], "task needs 'loss'"),
        (["+method.client.epochs=3"], "did you mean 'local_epochs'"),
        (["method.exchanges=null"], "its YAML names no method.exchanges"),
        (
            ["method=fedavg", "method.exchanges._target_=lit_fedad.methods.fedavg.FedAvgServer"],
            "method.exchanges gives a FedAvgServer, not Exchanges(setup, rounds)",
        ),
        (["method.server._target_=builtins.int"], "is nothing that a section can describe"),
        (["method.client.local_epochs=0"], "local_epochs=0 must be at least 1"),
        (["method=apfl", "method.client.alpha=2"], "method.client.alpha=2 must be in [0, 1]"),
        (["method=fadngs", "task.warmup=x"], "task.warmup='x' must be int"),
        (["task.slots=-1"], "task.slots=-1 must be at least 1"),
        (["task.slots=0"], "task.slots=0 must be at least 1"),
        (["task.slots=3"], "task.slots=3: a bank of 3 slots, but loss and score look at 6"),
        (
            ["method=feddymem", "task.grid=2", "task.slots=null", "task.rim=0"],
            "task.grid=2: a bank of 4 slots, but loss and score look at 6",
        ),
        (["task.image_size=0"], "task.image_size=0 must be at least 1"),
        (["task.patches_per_image=0"], "task.patches_per_image=0 must be at least 1"),
        (["task.learning_rate=-1"], "task.learning_rate=-1 must be at least 0"),
        (["task.learning_rate=nan"], "task.learning_rate=nan must be a finite number"),
        (["task.weight_decay=-1"], "task.weight_decay=-1 must be at least 0"),
        (["task.sigma=-1"], "task.sigma=-1 must be in [0, 8192]"),
        (["task.sigma=inf"], "task.sigma=inf must be a finite number"),
        (["task.loss.neighbours=0"], "task.loss.neighbours=0 must be at least 1"),
        (["task.loss.threshold=high"], "task.loss.threshold='high' must be a number or 'median'"),
        (["task.loss.repulsion=-1"], "task.loss.repulsion=-1 must be at least 0"),
        (["task.image_score.exponent=-1"], "task.image_score.exponent=-1 must be at least 0"),
        (["method=feddymem", "task.head.hidden=0"], "task.head.hidden=0 must be at least 1"),
        (["method=feddymem", "task.head.grid_size=0"], "task.head.grid_size=0 must be at least 1"),
        (["task.loss=3"], "task.loss=3 must be a section with _target_"),
        (["task.head=3"], "task.head=3 must be a section with _target_"),
        (["method=federated_bank", "task.head=[1]"], "task.head=[1] must be a section with _target_"),
        (
            ["method=fedavgm", "method.server.server_optimizer.lr=[1]"],
            "method.server.server_optimizer.lr=[1] must be a section",
        ),
        (["method=federated_bank", "task.products=[1]"], "task.products[0]=1 must be str"),
        (
            ["method=fadngs", "contrastive_loss=cross_entropy", "task.loss.classes=1"],
            "task.loss.classes=1 must be at least 2",
        ),
        (["method=gldp", "task.encoder=null"], "task.encoder=null must be a section with _target_"),
        (["method=gldp", "~task.encoder"], "task needs 'encoder'"),
        (
            ["method=fedvck_sums", "+method.server.descent.section=here"],
            "method.server.descent has no key 'section'",
        ),
        (["backbone.layers=[2,x]"], "backbone.layers=[2, 'x']: give whole numbers"),
        (
            ["method=feddymem", "+method.server.aggregation.max_steps=0"],
            "method.server.aggregation.max_steps=0 must be at least 1",
        ),
        (["method=fedprox", "method.client.mu=-1"], "method.client.mu=-1 must be at least 0"),
        (["method=fedphp", "method.client.mu=2"], "method.client.mu=2 must be in [0, 1]"),
        (["method=apple", "method.client.early=-1"], "method.client.early=-1 must be at least 0"),
        *(
            ([f"method={method}", f"{section}.rounds=-1"], f"{section}.rounds=-1 must be at least 0")
            for method, section in (
                ("fedphp", "method.client"),
                ("apple", "method.client"),
                ("fadngs", "task"),
                ("deep_svdd", "task"),
            )
        ),
        (["method=dbe", "method.client.momentum=2"], "method.client.momentum=2 must be in [0, 1]"),
        (["method=moon", "method.client.temperature=0"], "method.client.temperature=0 must be above 0"),
        (
            ["method=scaffold", "method.client.learning_rate=0"],
            "method.client.learning_rate=0 must be above 0",
        ),
        (
            ["method=federated_patchcore", "method.client.vectors=0"],
            "method.client.vectors=0 must be at least 1",
        ),
        (["method=gldp", "method.server.beta=2"], "method.server.beta=2 must be in [0, 1]"),
        (
            ["method=creff", "method.server.matching_rate=-1"],
            "method.server.matching_rate=-1 must be above 0",
        ),
        (
            ["method=fedavgm", "method.server.server_optimizer.momentum=-1"],
            "method.server.server_optimizer: Invalid momentum value: -1",
        ),
        (["method=fedvck", "method.client.bias=1e30"], "method.client.bias=1e+30 must be in [-50, 50]"),
        (["method=fedgan", "method.client.share=1e30"], "method.client.share=1e+30 must be in [0, 1000]"),
        (["method=gldp", "task.momentum=-1"], "task.momentum=-1 must be at least 0"),
        (["method=fadngs", "task.projection=0"], "task.projection=0 must be at least 1"),
        (
            ["method=fadngs", "contrastive_loss=simclr", "task.loss.temperature=0"],
            "temperature=0 must be above 0",
        ),
        # Keys of the class above: `PatchTask`.
        (["+task.rimm=1"], "task has no key 'rimm'; did you mean 'rim'"),
        (["task.rim=x"], "task.rim='x' must be int"),
        (["method=fadngs", "+task.views.flip=2"], "task.views.flip=2 must be in [0, 1]"),
        (
            [
                "method=fadngs",
                "experiment=semantic_small",
                "features=train",
                "task.encoder.network.channels=0",
            ],
            "encoder.channels=0 must be at least 1",
        ),
        (
            ["method=fadngs", "method.server.distillation.epochs=0"],
            "method.server.distillation.epochs=0 must be at least 1",
        ),
    ],
)
def test_mistake_is_refused_when_building_the_model(overrides, said):
    with refusal() as error:
        build_model(composed_with(["debug=seconds", "backbone.name=test_resnet", *overrides]), ["a", "b"])
    assert said in str(error.value)


def build_each(section, key):
    nodes = (
        {key: section} if "_target_" in section else {f"{key}.{name}": node for name, node in section.items()}
    )
    for path, node in nodes.items():
        if isinstance(node, dict):
            build(node, path)


@pytest.mark.parametrize(
    ("section", "overrides", "said"),
    [
        (
            "data",
            ["data=mvtec_mixture", "data.root=x", "data.products=bottle"],
            "products='bottle' must be list or null",
        ),
        ("data", ["data.root=5"], "root=5 must be null or str"),
        ("data", ["data=motif_classes", "data.std=[1,null,1]"], "std[1]=None must be float"),
        (
            "federation",
            ["federation.sampler.min_clients=0"],
            "federation.sampler.min_clients=0 must be at least 1",
        ),
        ("federation", ["federation.sampler.min_clients=-3"], "min_clients=-3 must be at least 1"),
        ("federation", ["federation.robust.weights.min_cosine=5"], "weights.min_cosine=5 must be in [-1, 1]"),
        (
            "federation",
            ["federation.robust.banks.malicious_share=2"],
            "banks.malicious_share=2 must be in [0, 1]",
        ),
        (
            "federation",
            ["federation.robust.statistics.max_deviation_ratio=1"],
            "statistics.max_deviation_ratio=1 must be above 1",
        ),
        (
            "federation",
            ["federation/robust=trimmed_mean", "federation.robust.weights.malicious_share=-1"],
            "weights.malicious_share=-1 must be in [0, 1]",
        ),
        (
            "federation",
            ["federation.sampler.fraction=nan"],
            "federation.sampler.fraction=nan must be a finite number",
        ),
        (
            "federation",
            ["federation.channel.up=3"],
            "federation.channel.up=3 must be a section with _target_",
        ),
        (
            "federation",
            ["federation.channel.up=[1]"],
            "federation.channel.up=[1] must be a section with _target_",
        ),
        (
            "partition",
            ["partition=dirichlet", "partition.clients=two"],
            "partition.clients='two' must be int",
        ),
        ("partition", ["partition=pooled", "+partition.clients=2"], "partition has no key 'clients'"),
    ],
)
def test_mistake_in_a_section_is_refused(section, overrides, said):
    with pytest.raises(UserError) as error:
        build_each(composed_with(overrides)[section], section)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("target", "section", "overrides", "said"),
    [
        (ImageTransform, "image", ["+image.sise=3"], "image has no key 'sise'; did you mean 'size'"),
        (ImageTransform, "image", ["image.size=big"], "image.size='big' must be int or list"),
        (make_fabric, "fabric", ["fabric.accelerator=cup"], "cup"),
        (
            make_fabric,
            "fabric",
            ["fabric.accelerator=tpu"],
            "fabric.accelerator=auto takes what this machine has",
        ),
        (make_fabric, "fabric", ["fabric.accelerator=cpu", "fabric.devices=two"], "devices"),
        (make_fabric, "fabric", ["fabric.precision=12"], "12"),
        (
            make_fabric,
            "fabric",
            ["fabric.precision=bf16-true"],
            "fabric.precision=bf16-true: weights stay in 32 bits",
        ),
        (make_fabric, "fabric", ["fabric.precision=16-true"], "bf16-mixed or 16-mixed"),
        (make_fabric, "fabric", ["fabric.precision=64-true"], "give 32-true"),
        (make_fabric, "fabric", ["+fabric.device=2"], "did you mean 'devices'"),
    ],
)
def test_mistake_in_a_section_without_target_is_refused(target, section, overrides, said):
    def composed():
        return {key: value for key, value in composed_with(overrides)[section].items() if key not in TILING}

    with refusal() as error:
        call(target, composed(), section)
    assert said in str(error.value)

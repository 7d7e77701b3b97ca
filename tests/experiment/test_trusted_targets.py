"""What a stored configuration may call: nothing that could do more than compute."""

from pathlib import Path

import pytest
from helpers.refusals import refusal

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.trusted_targets import check_targets

FILE = Path("run/config.yaml")


@pytest.mark.parametrize(
    "target",
    [
        "lit_fedad.methods.feddymem.FedDyMemClient",
        "lit_fedad.federation.channel.Plain",
        "lit_fedad.data.textures.textures",
        "lit_fedad.memory.reduce.SlotReduce",
        "torch.nn.Linear",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "torchvision.models.ResNet",
        "timm.models.resnet.ResNet",
    ],
)
def test_what_computes_is_allowed(target):
    check_targets({"task": {"parts": [{"_target_": target}]}}, FILE)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "torch.load",
        "torch.hub.load",
        "torch.nn.modules.module.torch.hub.load",
        "torch.nn.utils.rnn.warnings",
        "torch.nn.parallel.DistributedDataParallelX",
        "torchvision.datasets.utils.download_url",
        "timm.create_model",
        "timm.models.load_checkpoint",
        "lit_fedad.cli.main.main",
        "lit_fedad.__main__.main",
        "lit_fedad.core.building.build",
        "lit_fedad.experiment.train.train",
        "lit_fedad.data.content.content_hashes",
        "lit_fedad.data.feature_cache.FeatureCache",
        "lit_fedad.models.backbones.Path",
        "lit_fedad.methods.gone.Client",
        "lit_fedad",
        "",
        "json.tool",
        ["os.system"],
        None,
        {"_target_": "os.system"},
    ],
)
def test_what_could_do_more_is_refused_in_one_line(target):
    with refusal():
        check_targets({"task": {"parts": [{"deep": {"_target_": target}}]}}, FILE)


def test_a_refusal_names_file_target_and_remedy():
    with pytest.raises(
        UserError, match=r"^run/config\.yaml: names 'os\.system'.*LIT_FEDAD_PACKAGES=PACKAGE$"
    ):
        check_targets({"_target_": "os.system"}, FILE)


def test_the_users_own_packages_are_declared_outside_of_the_run(monkeypatch):
    config = {"packages": ["mine"], "LIT_FEDAD_PACKAGES": "mine", "task": {"_target_": "mine.tasks.Task"}}
    with pytest.raises(UserError, match=r"mine\.tasks\.Task"):
        check_targets(config, FILE)
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "other, mine")
    check_targets(config, FILE)
    with pytest.raises(UserError, match=r"minestrone\.Task"):
        check_targets({"_target_": "minestrone.Task"}, FILE)


@pytest.mark.parametrize("method", ["feddymem", "fadngs", "gldp", "fedvck", "creff", "fedic"])
def test_packaged_configurations_are_allowed(method):
    check_targets(compose([f"method={method}"]), FILE)

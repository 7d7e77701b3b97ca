"""The pretrain command: reproducible, resumed bit for bit, and its weights are a backbone's."""

import os
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from PIL import Image

from lit_fedad.cli.main import main
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import create_backbone
from lit_fedad.pretraining import pretrain as module
from lit_fedad.pretraining.dense_contrast import DenseContrast
from lit_fedad.pretraining.pretrain import PretrainOptions, pretrain

TINY = PretrainOptions(
    steps=4, size=32, batch=2, places=4, shift=2, layers=(1, 2), precision="32-true", accelerator="cpu", save_every=2,
    tracking=False, quiet=True,
)  # fmt: skip


def tiny(out, **other):
    return replace(TINY, out=str(out), **other)


def test_the_same_settings_give_the_same_weights_however_often_it_was_stopped(tmp_path, monkeypatch):
    whole = safetensors.torch.load_file(pretrain(tiny(tmp_path / "whole")))
    step = DenseContrast.training_step

    def stop(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DenseContrast, "training_step", stop)
    with pytest.raises(RuntimeError, match="power cut"):
        pretrain(tiny(tmp_path / "cut"))
    monkeypatch.setattr(DenseContrast, "training_step", step)
    assert torch.load(tmp_path / "cut" / module.LAST, weights_only=False)["global_step"] == 2
    resumed = safetensors.torch.load_file(pretrain(tiny(tmp_path / "cut")))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    other = safetensors.torch.load_file(pretrain(tiny(tmp_path / "other", seed=1)))
    assert not torch.equal(whole["layer1.0.conv1.weight"], other["layer1.0.conv1.weight"])


def test_an_interruption_is_one(tmp_path, monkeypatch):
    def interrupted(self, batch, batch_idx):
        raise KeyboardInterrupt

    monkeypatch.setattr(DenseContrast, "training_step", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning silences Ctrl-C while it ends
    with pytest.raises(KeyboardInterrupt):
        pretrain(tiny(tmp_path))


def test_its_weights_are_half_precision_and_a_backbone_takes_them(tmp_path):
    file = pretrain(tiny(tmp_path))
    state = safetensors.torch.load_file(file)
    assert {value.dtype for value in state.values()} == {torch.float16}
    backbone = create_backbone("resnet10t", (1, 2), file)
    found = backbone.state_dict()["features.model.layer2.0.conv1.weight"]
    assert torch.equal(found, state["layer2.0.conv1.weight"].float())


def test_steps_are_tracked_and_scenes_shown(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        module.Tracker, "metrics", lambda self, values, step: seen.append((step, set(values)))
    )
    pretrain(tiny(tmp_path))
    assert {"loss", "loss_layer1", "loss_layer2"} <= set.union(*(names for _, names in seen))
    with Image.open(tmp_path / module.VIEWS) as shown:
        assert shown.size == (2 * 32, 2 * 32)


def test_a_folder_goes_on_with_its_own_training_only(tmp_path):
    pretrain(tiny(tmp_path))
    with pytest.raises(UserError, match="holds a training with other settings .*choose another out="):
        pretrain(tiny(tmp_path, steps=6))


class Planted:
    """Code in the form of a pickle."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_planted_checkpoint_runs_no_code(tmp_path):
    torch.save({"state_dict": Planted(tmp_path / "owned")}, tmp_path / module.LAST)
    with pytest.raises(UserError, match="cannot be read") as caught:
        pretrain(tiny(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_a_damaged_checkpoint_is_named(tmp_path):
    pretrain(tiny(tmp_path))
    (tmp_path / module.LAST).write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"last.ckpt cannot be read .*delete it to begin anew"):
        pretrain(tiny(tmp_path))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file.*cannot be written .*choose another out="):
        pretrain(tiny(tmp_path / "file" / "out"))


def test_a_training_that_goes_astray_ends(tmp_path):
    with pytest.raises(UserError, match="the loss is not finite at step .*: lower learning_rate"):
        pretrain(tiny(tmp_path, learning_rate=1e30))
    assert not (tmp_path / module.WEIGHTS).exists()


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_any_pyramid_of_timm_can_be_trained(name, tmp_path):
    """Also those whose layers timm would rename."""
    file = pretrain(tiny(tmp_path, name=name, steps=1))
    assert create_backbone(name, (1, 2), file).provenance["taken"] == f"file:{module.WEIGHTS}"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["stps=3"], "pretrain has no key 'stps'; did you mean 'steps'?"),
        (["steps=many"], "pretrain.steps='many' must be int"),
        (["steps=0"], "steps=0 must be at least 1"),
        (["size=31"], "size=31 must be at least 32"),
        (["lighting=nan"], "lighting=nan must be a finite number"),
        (["learning_rate=0"], "learning_rate=0.0 must be greater than 0"),
        (["data.root=x"], "pretrain has no key 'data.root'"),
        (["steps"], "'steps' is not of the form key=value"),
        (["name=resnet10"], "backbone.name=resnet10: timm has no such model; did you mean"),
        (["layers=3,1"], "give layer numbers from 0 up, in rising order"),
        (["precision=half"], "pretrain: Precision 'half' is invalid"),
        (["accelerator=abacus"], "pretrain: You selected an invalid accelerator name"),
    ],
)
def test_bad_options_end_in_one_line(options, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", *options]) == 2
    err = capsys.readouterr().err
    assert line in " ".join(err.split())
    assert not list(tmp_path.iterdir())

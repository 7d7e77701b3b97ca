import os
import socket
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
from helpers.refusals import refusal, refused
from torch import nn

from lit_fedad.core.errors import UserError
from lit_fedad.models import backbones
from lit_fedad.models.backbones import create_backbone

TINY = "test_resnet"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, on this machine, and an empty cache of downloads."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def weights() -> Path:
    data = os.environ.get("LIT_FEDAD_DATA")
    if not data:
        pytest.skip("LIT_FEDAD_DATA is not set")
    return Path(data).parent / "weights"


@pytest.fixture
def whole():
    """A complete tiny model whose weights and statistics are none of the defaults."""
    model = timm.create_model(TINY)
    generator = torch.Generator().manual_seed(1)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.5 + 0.1 * torch.rand(value.shape, generator=generator))
    return model.eval()


def random_backbone(name=TINY, **options):
    with warnings.catch_warnings(action="ignore"):
        return create_backbone(name, weights="random", **options)


def by_hand(model, images, stages=("layer1", "layer2", "layer3")):
    features, found = model.maxpool(model.act1(model.bn1(model.conv1(images)))), []
    for stage in stages:
        features = getattr(model, stage)(features)
        found.append(features)
    return found


def assert_equal_features(found, wanted):
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "layers", "size"),
    [
        (TINY, (1, 2, 3), 64),
        (TINY, (2,), 64),
        ("test_efficientnet", (1, 2), 64),
        ("test_vit", (0, 2), 160),
        ("resnetv2_50_gluon", (0, 1), 64),
    ],
)
def test_channels_and_strides_are_those_of_the_features(name, layers, size):
    backbone = random_backbone(name, layers=layers)
    found = backbone(torch.randn(2, 3, size, size))
    assert [tuple(layer.shape) for layer in found] == [
        (2, channels, size // stride, size // stride)
        for channels, stride in zip(backbone.channels, backbone.strides, strict=True)
    ]
    assert all(layer.is_contiguous() for layer in found)
    assert len(found) == len(layers)


def test_it_is_frozen_and_stays_in_evaluation_mode():
    backbone = random_backbone()
    parent = nn.Sequential(backbone, nn.Identity()).train()
    assert parent.training
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    images = torch.randn(2, 3, 64, 64, requires_grad=True)
    features = backbone(images)[0]
    assert not features.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    head = nn.Conv2d(features.shape[1], 2, 1)
    head(features).sum().backward()  # which tensors of inference mode would refuse
    assert head.weight.grad is not None


def test_layers_behind_the_last_used_one_are_dropped():
    keys = random_backbone(layers=(1, 2)).state_dict()
    assert any(".layer2." in key for key in keys)
    assert not any(".layer3." in key or ".layer4." in key or ".fc." in key for key in keys)


@pytest.mark.parametrize(
    ("made", "given"),
    [(lambda maps: maps[0], "a Tensor"), (lambda maps: maps[:1], "1 maps")],
    ids=["one map", "fewer"],
)
def test_a_module_that_gives_no_map_for_each_layer_is_refused(monkeypatch, made, given):
    pyramid = create_backbone("test_resnet", (1, 2), "random")
    forward = pyramid.features.forward
    monkeypatch.setattr(pyramid.features, "forward", lambda images: made(forward(images)))
    with pytest.raises(
        UserError, match=rf"backbone 'test_resnet' gives {given}; its module must give a list of 2"
    ):
        pyramid(torch.zeros(1, 3, 32, 32))


def test_random_weights_are_seeded_said_and_recorded():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"'test_resnet' has RANDOM weights \(seed 3\)") as warned:
        first = create_backbone(TINY, weights="random", seed=3)
    assert len(warned) == 1
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = random_backbone(seed=3), random_backbone(seed=4)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.provenance == {
        "name": TINY,
        "layers": [1, 2, 3],
        "weights": "random",
        "taken": "random",
        "sha256": first.fingerprint,
    }


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
def test_a_file_is_loaded(tmp_path, whole, wrapper, suffix):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(whole.state_dict(), path)
    else:
        torch.save({wrapper: whole.state_dict(), "epoch": 3} if wrapper else whole.state_dict(), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone = create_backbone(TINY, weights=path)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_equal_features(backbone(images), by_hand(whole, images))
    assert backbone.provenance["taken"] == f"file:weights{suffix}"
    assert backbone.provenance["weights"] == str(path)


def test_a_file_need_not_hold_the_unused_layers(tmp_path, whole):
    path = tmp_path / "weights.pth"
    state = {key: value for key, value in whole.state_dict().items() if not key.startswith(("layer4", "fc"))}
    torch.save({key: value for key, value in state.items() if "num_batches" not in key}, path)
    complete = tmp_path / "complete.pth"
    torch.save(whole.state_dict(), complete)
    fingerprint = create_backbone(TINY, weights=path).fingerprint
    assert fingerprint == create_backbone(TINY, weights=complete).fingerprint
    assert fingerprint != create_backbone(TINY, layers=(1, 2), weights=path).fingerprint
    with pytest.raises(UserError, match=r"weights\.pth lacks 'layer4\.0\.conv1\.weight', which backbone"):
        create_backbone(TINY, layers=(1, 4), weights=path)


def _without(state):
    return {
        key: value for key, value in state.items() if key not in ("layer2.0.bn1.weight", "layer3.0.bn1.bias")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "lacks 'layer2.0.bn1.weight'"),
        (lambda state: {**state, "bn1.weight": torch.ones(3)}, r"'bn1.weight' has shape \(3,\), backbone"),
        (lambda state: {**state, "stray.weight": torch.ones(3)}, "holds 'stray.weight', unknown to backbone"),
        (lambda state: {"epoch": 3}, "holds no state dict"),
        (lambda state: torch.ones(3), "holds no state dict"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, whole, change, message):
    path = tmp_path / "weights.pth"
    torch.save(change(whole.state_dict()), path)
    with pytest.raises(UserError, match=rf"weights\.pth.*{message}"):
        create_backbone(TINY, weights=path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\x03\x04 cut short"])
def test_damaged_files_are_said_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with refusal(rf"weights{suffix} cannot be read: "):
        create_backbone(TINY, weights=path)


def test_nobody_is_advised_to_read_a_file_without_protection(tmp_path, whole):
    torch.save(whole, tmp_path / "weights.pth")
    told = refused(
        "cannot be read: Weights only load failed; give a state dict",
        create_backbone,
        TINY,
        weights=tmp_path / "weights.pth",
    )
    assert "weights_only" not in told


def test_a_packed_file_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights/data.pkl", bytes(1 << 20))
    with pytest.raises(UserError, match=r"weights\.pth cannot be read: it is packed"):
        create_backbone(TINY, weights=path)


@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_a_registered_model_that_gives_no_maps_is_refused(monkeypatch):
    monkeypatch.delattr(timm.models.ResNet, "forward_intermediates")
    with pytest.raises(UserError, match=r"gives no features .* has no attribute 'forward_intermediates'"):
        create_backbone(TINY, (1,), "random", seed=77)  # which no other test has built


@pytest.mark.parametrize(
    ("name", "layers", "weights", "message"),
    [
        ("test_resnett", (1,), "random", "no such model; did you mean 'test_resnet'"),
        ("resnet18.none_in1k", (1,), "random", r"no such weights, only .*resnet18\.tv_in1k"),
        (TINY, (), "random", r"layers=\[\]"),
        (TINY, (3, 1), "random", r"layers=\[3, 1\]: give layer numbers .* rising"),
        (TINY, (1, 9), "random", r"'test_resnet' gives no features at layers \[1, 9\]"),
        (
            TINY,
            (1,),
            "imagnet",
            "backbone.weights=imagnet: no such file; give imagenet, auto, lite0, lite2, own, random or a file",
        ),
        ("resnetv2_50_gluon", (1,), "imagenet", "has no ImageNet weights to download: pass a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*RANDOM")
def test_wrong_requests_are_named(name, layers, weights, message):
    with pytest.raises(UserError, match=message):
        create_backbone(name, layers=layers, weights=weights)


@pytest.fixture
def no_download(monkeypatch):
    """The hub's own client, which repeats requests for most of a minute, must not begin."""
    forbidden = "a hub out of reach was asked for a file"
    monkeypatch.setattr(backbones.hub, "hf_hub_download", lambda *_, **__: pytest.fail(forbidden))


def test_a_hub_that_refuses_is_said_at_once(no_download):
    with pytest.raises(
        UserError,
        match=r"cannot be downloaded \(http://127.0.0.1:9: .*backbone=lite0 or the library's own: backbone=own",
    ):
        create_backbone(TINY)


def test_a_hub_that_never_answers_is_given_up(no_download, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(backbones, "HUB_TIMEOUT", 0.2)
        with pytest.raises(UserError, match=r"cannot be downloaded .*weights=/path/to/file"):
            create_backbone(TINY)


def test_offline_mode_asks_nobody(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(backbones.hub, "get_session", lambda: pytest.fail("the network was asked"))
    with pytest.raises(UserError, match=r"cannot be downloaded \(HF_HUB_OFFLINE is set\)"):
        create_backbone(TINY)


def test_auto_falls_back_to_the_librarys_own_backbone_and_says_so(monkeypatch):
    monkeypatch.setattr(backbones, "first_installed", lambda: None)
    line = r"'test_resnet' cannot be downloaded \(.*\); the library's own backbone \(resnet10t\) takes its place$"
    with pytest.warns(UserWarning, match=line) as warned:
        backbone = create_backbone(TINY, weights="auto")
    assert len(warned) == 1
    facts = backbone.provenance
    assert (facts["name"], facts["weights"], facts["taken"]) == ("resnet10t", "own", "own")
    assert backbone.fingerprint == create_backbone("resnet10t", weights="own").fingerprint


@pytest.mark.parametrize("weights", ["imagenet", "auto"])
def test_downloaded_weights_are_taken_from_the_cache_without_a_network(tmp_path, whole, weights):
    folder = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    file = folder / "snapshots" / "abc" / "model.safetensors"
    safetensors.torch.save_file(whole.state_dict(), file)
    backbone = create_backbone(TINY, weights=weights)
    assert backbone.provenance["taken"] == "imagenet:r160_in1k"
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_equal_features(backbone(images), by_hand(whole, images))
    file.write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        create_backbone(TINY, weights=weights)


def test_downloads_are_asked_for_by_name_until_one_exists(tmp_path, whole, monkeypatch):
    """Only the hub's transport is replaced: the older file name follows the newer one."""
    asked = []

    def download(repository, file, revision=None, etag_timeout=None):
        asked.append((repository, file))
        if file == "model.safetensors":
            raise huggingface_hub.errors.EntryNotFoundError("404")
        path = tmp_path / file
        torch.save(whole.state_dict(), path)
        return str(path)

    monkeypatch.setattr(backbones, "hub_trouble", lambda: None)
    monkeypatch.setattr(backbones.hub, "hf_hub_download", download)
    assert create_backbone(TINY).provenance["taken"] == "imagenet:r160_in1k"
    repository = "timm/test_resnet.r160_in1k"
    assert asked == [(repository, "model.safetensors"), (repository, "pytorch_model.bin")]

    def interrupted(repository, file, revision=None, etag_timeout=None):
        raise ConnectionResetError("connection reset\nby peer")

    monkeypatch.setattr(backbones.hub, "hf_hub_download", interrupted)
    with pytest.raises(UserError, match=r"cannot be downloaded \(connection reset\)"):
        create_backbone(TINY)


@pytest.mark.real_data
def test_real_resnet18(weights):
    file = weights / "resnet18_imagenet1k_v1_bnfolded_stem_to_layer3.pth"
    backbone = create_backbone("resnet18", weights=file)
    assert (backbone.channels, backbone.strides) == ((64, 128, 256), (4, 8, 16))
    import torchvision

    reference = torchvision.models.resnet18(weights=None).eval()
    reference.load_state_dict(torch.load(file, weights_only=True), strict=False)
    reference.act1 = reference.relu
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_equal_features(backbone(images), by_hand(reference, images))


@pytest.mark.real_data
def test_real_resnetv2_gluon(weights):
    file = weights / "resnetv2_50_imagenet1k_gluon_stem_to_stage3.pth"
    backbone = create_backbone("resnetv2_50_gluon", weights=file)
    assert (backbone.channels, backbone.strides) == ((256, 512, 1024), (4, 8, 16))
    assert {value.dtype for value in backbone.state_dict().values()} <= {torch.float32, torch.int64}

    state = OrderedDict((key, value.float()) for key, value in torch.load(file, weights_only=True).items())
    assert any(value.dtype == torch.float16 for value in torch.load(file, weights_only=True).values())
    reference = timm.create_model("resnetv2_50").eval()
    reference.load_state_dict(
        {key.replace("stem.conv.conv", "stem.conv"): value for key, value in state.items()}, strict=False
    )

    def normalise(values, module):
        names = ("running_mean", "running_var", "weight", "bias")
        return nn.functional.batch_norm(values, *(state[f"stem.conv.{module}.{name}"] for name in names))

    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    wanted = []
    with torch.no_grad():
        features = reference.stem.conv(normalise(images, "bn_in"))
        features = reference.stem.pool(normalise(features, "bn").relu())
        for stage in reference.stages[:3]:
            features = stage(features)
            wanted.append(features)
    assert_equal_features(backbone(images), wanted)


def test_random_weights_leave_no_residual_branch_closed():
    with pytest.warns(UserWarning, match="RANDOM"):
        pyramid = create_backbone("resnet18", layers=(1, 2, 3), weights="random")
    scales = [m.weight for m in pyramid.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert scales
    assert all(scale.any() for scale in scales)

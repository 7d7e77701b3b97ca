"""Frozen feature pyramids: any timm model, with downloaded, packaged, given, random or the library's own weights."""

import contextlib
import difflib
import hashlib
import threading
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import safetensors.torch
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_fedad.core.errors import UserError, first_line, first_sentence
from lit_fedad.core.files import check_unpacked, forbidden_in_one_line
from lit_fedad.models.backbone_parts import TransformerBlocks, dynamic_size
from lit_fedad.models.lite import LITE, first_installed

HUB_TIMEOUT = 5.0  # seconds; a hub out of reach is noticed within twice this

OWN_NAME = "resnet10t"  # the timm model of the library's own weights
OWN_WEIGHTS = Path(__file__).parent / "own" / "weights.safetensors"
_PACKAGED = {"own": (OWN_NAME, 3), **{word: (weights.name, 4) for word, weights in LITE.items()}}
"""Model and last layer of the weights that need no hub."""

_INSTEAD = (
    "pass a file (backbone.weights=/path/to/file), or take backbone=lite0 or the library's own: backbone=own"
)


class FeaturePyramid(nn.Module):
    """A frozen backbone that computes one feature map for each layer.

    Its parameters need no gradient, it stays in evaluation mode whatever its parent does, and layers behind the last
    used one are removed.

    Args:
        features: timm feature extractor, or blocks of a transformer: images ``[B, 3, H, W]`` to a list of maps
            ``[B, C_l, H_l, W_l]``.
        name: Name of the timm model.
        layers: The used layers, as timm counts them.
        weights: Weights that were loaded, as `create_backbone` takes them, but never ``"auto"``.
        taken: Origin of the weights, such as ``"own"`` or ``"file:NAME"``.

    Attributes:
        channels: C_l of each layer.
        strides: H / H_l of each layer.
        mean, std: Means and standard deviations of the channels by which the model expects images to be normalised.
        fingerprint: SHA-256 over architecture, layers and weights: equal fingerprints, equal features.
        provenance: Model, layers, weights and their origin, for the record of a run.
    """

    def __init__(self, features: Any, name: str, layers: tuple[int, ...], weights: str, taken: str) -> None:
        super().__init__()
        self.channels: tuple[int, ...] = tuple(features.feature_info.channels())
        self.strides: tuple[int, ...] = tuple(features.feature_info.reduction())
        self.fingerprint = _fingerprint(name, layers, features)
        self.provenance: dict[str, Any] = {
            "name": name,
            "layers": list(layers),
            "weights": weights,
            "taken": taken,
            "sha256": self.fingerprint,
        }
        config = features.model.pretrained_cfg
        self.mean: tuple[float, ...] = tuple(config["mean"])
        self.std: tuple[float, ...] = tuple(config["std"])
        self._fixed_size = bool(config.get("fixed_input_size")) and not dynamic_size(name)
        # On a CPU convolutions are up to twice as fast with channels last in memory.
        self.features: nn.Module = features.to(memory_format=torch.channels_last)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "FeaturePyramid":
        """Keeps the evaluation mode: the statistics of a frozen BatchNorm must not follow a client's data."""
        return super().train(False)

    # Not inference_mode: its tensors could not enter the graph of a head that is trained on them.
    @torch.no_grad()
    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps images ``[B, 3, H, W]`` to features ``[B, C_l, H_l, W_l]``, one tensor for each layer.

        Raises:
            UserError: If the model takes no images of this size, which may have to be a multiple of a patch, or
                does not give one map for each layer.
        """
        try:
            maps = self.features(images.contiguous(memory_format=torch.channels_last))
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, AssertionError) or self._fixed_size:
                size = f"{images.shape[-2]} x {images.shape[-1]} pixels"
                raise UserError(
                    f"backbone {self.provenance['name']!r} takes no images of {size} ({first_line(error)}):"
                    " give another image.size"
                ) from error
            raise
        if not isinstance(maps, (list, tuple)) or len(maps) != len(self.channels):
            given = f"{len(maps)} maps" if isinstance(maps, (list, tuple)) else f"a {type(maps).__name__}"
            raise UserError(
                f"backbone {self.provenance['name']!r} gives {given}; its module must give a list of"
                f" {len(self.channels)}, a map [B, C, H, W] for each layer"
            )
        return [features.contiguous() for features in maps]


def create_backbone(
    name: str = "wide_resnet50_2",
    layers: Sequence[int] = (1, 2, 3),
    weights: str | Path = "imagenet",
    seed: int = 0,
) -> FeaturePyramid:
    """Creates a frozen feature pyramid from a timm model.

    Args:
        name: timm model; a tag selects one set of its weights (``"wide_resnet50_2.tv_in1k"``).
        layers: Feature levels as timm counts them, in ascending order. For ResNets 0 is the stem, and 1 to 4 are the
            stages; for transformers they are the blocks, from 0.
        weights: ``"imagenet"`` downloads timm's; ``"lite0"`` and ``"lite2"`` take those of the extra ``weights``, of
            ``tf_efficientnet_lite0`` and ``..._lite2``; ``"own"`` the library's own, of ``resnet10t``; ``"auto"``
            downloads if it can, and otherwise takes the first of these three that is installed, with its model instead
            of ``name`` and with a warning; ``"random"`` draws them from ``seed``; anything else is a file: a state dict
            in ``.pth``, ``.pt`` or ``.safetensors`` that has at least the weights of the used layers.
        seed: Seed of random weights. The global random state does not change.

    Returns:
        The pyramid, on the CPU.

    Raises:
        UserError: If the model or a layer is unknown, or the weights cannot be read or do not fit.

    Example:
        >>> with warnings.catch_warnings(action="ignore"):
        ...     pyramid = create_backbone("test_resnet", layers=(1, 2), weights="random")
        >>> [tuple(features.shape) for features in pyramid(torch.zeros(1, 3, 64, 64))]
        [(1, 32, 16, 16), (1, 48, 8, 8)]
    """
    if not all(type(layer) is int for layer in layers):
        raise UserError(f"backbone.layers={list(layers)}: give whole numbers, such as [2,3]")
    layers = tuple(layers)
    weights = str(weights)
    check_model(name, layers)
    name, weights, hub_file = _resolve(name, layers, weights, seed)
    features = _build(name, layers, seed, hub_file, drawn=weights == "random")
    if hub_file is not None:
        taken = f"imagenet:{timm.get_pretrained_cfg(name).tag}"
    elif weights == "random":
        _open_residual_branches(features)
        taken = "random"
    elif weights in LITE:
        _load_state(features.model, LITE[weights].read(), LITE[weights].package, name)
        taken = f"imagenet:{LITE[weights].package}"
    elif weights == "own":
        _load_state(features.model, _read_state(OWN_WEIGHTS), OWN_WEIGHTS, name)
        taken = "own"
    else:
        _load_state(features.model, _read_state(Path(weights)), Path(weights), name)
        taken = f"file:{Path(weights).name}"
    return FeaturePyramid(features, name, layers, weights, taken)


def _resolve(name: str, layers: tuple[int, ...], weights: str, seed: int) -> tuple[str, str, Path | None]:
    """Finds model and weights that are used, and timm's file of weights if there is one; warns of substitutes."""
    if weights in ("imagenet", "auto"):
        try:
            return name, "imagenet", _hub_file(name)
        except UserError as error:
            if weights == "imagenet":
                raise
            reason = str(error).removesuffix(f": {_INSTEAD}")
            if word := first_installed():
                name, weights, instead = LITE[word].name, word, f"{LITE[word].name} of {LITE[word].package}"
            else:
                name, weights, instead = OWN_NAME, "own", f"the library's own backbone ({OWN_NAME})"
            warnings.warn(f"{reason}; {instead} takes its place", stacklevel=3)
    if weights == "random":
        line = f"backbone {name!r} has RANDOM weights (seed {seed}): its scores mean nothing"
        warnings.warn(line, stacklevel=3)
    if weights in _PACKAGED:
        _check_packaged(name, layers, weights)
    return name, weights, None


def _open_residual_branches(features: nn.Module) -> None:
    """Sets normalisation scales that are zero at initialisation to one.

    Training increases these scales; in a frozen random network residual branches with scale zero would have no effect.
    """
    for module in features.modules():
        scale = getattr(module, "weight", None)
        if isinstance(scale, nn.Parameter) and scale.ndim == 1 and not scale.any():
            nn.init.ones_(scale)


def check_model(name: str, layers: Sequence[int]) -> None:
    """Checks that timm has a model of this name and tag, and that layers are in ascending order.

    Raises:
        UserError: If one of these does not hold.
    """
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"backbone.name={name}: timm has no such model{hint}")
    if tag and name not in (tagged := timm.list_pretrained(f"{architecture}.*")):
        raise UserError(f"backbone.name={name}: timm has no such weights, only {', '.join(tagged) or 'none'}")
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise UserError(f"backbone.layers={list(layers)}: give layer numbers from 0 up, in rising order")


def _check_packaged(name: str, layers: tuple[int, ...], weights: str) -> None:
    """Checks that the model and layers are those of the packaged weights."""
    model, last = _PACKAGED[weights]
    if name != model:
        raise UserError(
            f"backbone.weights={weights}: these weights are of {model}, not {name}: give backbone={weights}"
        )
    if layers[-1] > last:
        raise UserError(
            f"backbone.layers={list(layers)}: {model}, backbone={weights}, ends with layer {last}"
        )


class _SkipDraws(TorchFunctionMode):
    """Skips random draws of weights that a file replaces, which take most of the time to build a wide network."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return function(*args, **(kwargs or {}))


def _build(name: str, layers: tuple[int, ...], seed: int, hub_file: Path | None, drawn: bool) -> Any:
    """Builds timm's feature extractor up to the last used layer; the global random state does not change."""
    options: dict[str, Any] = {}
    if hub_file is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": str(hub_file)}}
    with torch.random.fork_rng(devices=[]), contextlib.nullcontext() if drawn else _SkipDraws():
        torch.default_generator.manual_seed(seed)
        try:
            if any_size := dynamic_size(name):
                return TransformerBlocks(timm.create_model(name, **options, **any_size), layers)
            options |= {"features_only": True, "feature_cls": "getter", "out_indices": layers}
            features = timm.create_model(name, **options)
            _ = features.model.forward_intermediates  # raises for a model of a user that lacks it
            return features
        except safetensors.SafetensorError as error:
            hint = f"({first_line(error)}): delete it, or {_INSTEAD}"
            raise UserError(f"weights file {hub_file} is damaged {hint}") from error
        except (AssertionError, AttributeError, IndexError, RuntimeError) as error:
            reason = f"layers {list(layers)}: {first_line(error)}"
            raise UserError(f"backbone {name!r} gives no features at {reason}") from error


def _hub_file(name: str) -> Path:
    """Returns timm's own weights as a local file, downloaded if necessary.

    Raises:
        UserError: If timm has none, or the hub cannot be reached, which takes at most twice the timeout to notice.
    """
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        raise UserError(f"backbone {name!r} has no ImageNet weights to download: {_INSTEAD}")
    repository, _, tail = config.hf_hub_id.partition("@")
    revision = tail or None
    files = [config.hf_hub_filename] if config.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
    for file in files:
        cached = hub.try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached)

    reason = hub_trouble()
    for file in files if reason is None else []:
        try:
            return Path(hub.hf_hub_download(repository, file, revision=revision, etag_timeout=HUB_TIMEOUT))
        except Exception as error:  # the hub's HTTP library, and so its errors, differ between releases
            reason = first_line(error)
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                break
    raise UserError(f"ImageNet weights of backbone {name!r} cannot be downloaded ({reason}): {_INSTEAD}")


def hub_trouble() -> str | None:
    """Returns why weights cannot be downloaded now, within `HUB_TIMEOUT`; None if they can be.

    It makes one request without retries, since the hub's own client retries for most of a minute. The request runs in
    a thread, because no timeout covers the look-up of the host's name.
    """
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = hub.constants.ENDPOINT
    reason: list[str | None] = [f"{endpoint} did not answer in {HUB_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            hub.get_session().head(endpoint, timeout=HUB_TIMEOUT)
            reason[0] = None
        except Exception as error:  # errors of the HTTP library, as in `_hub_file`
            reason[0] = f"{endpoint}: {first_line(error)}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return reason[0]


def _load_state(model: nn.Module, state: dict[str, Tensor], path: Path | str, name: str) -> None:
    """Loads weights into the pruned timm model; any further weights must belong to its pruned parts."""
    needed = model.state_dict()
    for key, value in needed.items():
        if key.endswith("num_batches_tracked"):
            continue  # counts training steps; converted files leave it out
        if key not in state:
            raise UserError(f"weights file {path} lacks {key!r}, which backbone {name!r} needs")
        if state[key].shape != value.shape:
            shapes = f"{tuple(state[key].shape)}, backbone {name!r} needs {tuple(value.shape)}"
            raise UserError(f"weights file {path}: {key!r} has shape {shapes}")
    extra = [key for key in state if key not in needed]
    if extra:
        with torch.random.fork_rng(devices=[]), _SkipDraws():
            whole = timm.create_model(name).state_dict()
        unknown = [key for key in extra if key not in whole]
        if unknown:
            raise UserError(f"weights file {path} holds {unknown[0]!r}, unknown to backbone {name!r}")
    model.load_state_dict({key: value for key, value in state.items() if key in needed}, strict=False)


def _read_state(path: Path) -> dict[str, Tensor]:
    """Reads a state dict, which is the content of the file or its entry ``state_dict`` or ``model``."""
    if not path.is_file():
        raise UserError(
            f"backbone.weights={path}: no such file; give imagenet, auto, lite0, lite2, own, random or a file"
        )
    try:
        with forbidden_in_one_line(path):
            if path.suffix == ".safetensors":
                return safetensors.torch.load_file(path)
            if zipfile.is_zipfile(path):  # other files have the format of torch before version 1.6
                check_unpacked(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in zipfile, pickle, struct, safetensors or torch
        raise UserError(
            f"weights file {path} cannot be read: {first_sentence(error)}; give a state dict"
            " (torch.save(model.state_dict(), FILE)) or a file of safetensors"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"weights file {path} holds no state dict")
    return content


def _fingerprint(name: str, layers: tuple[int, ...], features: nn.Module) -> str:
    """Hashes all that determines the features: architecture, layers and weights, but not the tag of the weights."""
    digest = hashlib.sha256(f"{name.partition('.')[0]} {layers}".encode())
    for key, value in features.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.contiguous().numpy().data)
    return digest.hexdigest()

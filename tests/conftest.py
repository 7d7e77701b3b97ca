"""What pytest does before any test: which files it collects, in which order, with which fixtures."""

import gc
import os

import hypothesis

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch, before anything imports it)

# Services of CI set it, and commands that tests start would colour their lines.
os.environ.pop("FORCE_COLOR", None)

# How long an example takes is up to the machine and its load.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_configure(config):
    """Loads the fixtures, but not where tests are only dealt out to workers, which would wait for the imports."""
    if config.getoption("dist", "no") == "no":
        gc.disable()  # of what is imported nothing becomes garbage
        for plugin in ("helpers.fixtures", "helpers.once"):
            config.pluginmanager.import_plugin(plugin)


def pytest_ignore_collect(collection_path, config):
    """Leaves files without slow tests out where only such are asked for: their import takes each worker ten seconds."""
    asked, *more = config.option.markexpr.split(" ")
    if asked in ("slow", "nightly") and "or" not in more and collection_path.match("test_*.py"):
        return {"slow": "mark.slow", "nightly": "nightly"}[asked] not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items):
    """Puts long tests first: begun last, they would leave the other processes idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Keeps the modules, which stay, out of every later search for garbage."""
    gc.freeze()
    gc.enable()

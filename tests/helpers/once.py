"""What all tests of a process do once: compositions, parsing, drawing of weights, searches for packages."""

import copy
import functools
import hashlib
import importlib
import os
import pickle
from types import SimpleNamespace

import omegaconf
import pytest
import torch
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict

from lit_fedad.core import config
from lit_fedad.core.config_groups import conf_folder, config_groups
from lit_fedad.core.files import atomic
from lit_fedad.deployment import formats
from lit_fedad.models import backbones


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory):
    """A folder that all workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def packaged_groups_are_composed_once(of_all_workers):
    """Hundreds of tests choose the same groups and set other keys, which Hydra does one after the other too."""
    compose_anew, folder, composed = config.hydra_compose, conf_folder(), {}
    groups = set(config_groups())

    def compose(name, overrides=(), return_hydra_config=False):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        elsewhere = config.conf_folder() != folder or any(
            one.key_or_group == "hydra.searchpath" for one in parsed
        )
        if elsewhere or any(override.is_sweep_override() for override in parsed):
            return compose_anew(name, overrides, return_hydra_config=return_hydra_config)
        of_groups = [one for one in parsed if one.package is not None or one.key_or_group in groups]
        key = tuple(one.input_line for one in of_groups)
        if key not in composed:
            file = of_all_workers / "compositions" / hashlib.sha256(repr(key).encode()).hexdigest()
            if not file.exists():
                anew = compose_anew(name, list(key), return_hydra_config=True)
                with atomic(file) as part:
                    part.write_bytes(pickle.dumps(anew))
            composed[key] = file.read_bytes()
        whole = pickle.loads(composed[key])
        values = [override for override in parsed if override not in of_groups]
        ConfigLoaderImpl._apply_overrides_to_config(values, whole)
        if not return_hydra_config:
            with open_dict(whole):
                del whole["hydra"]
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "hydra_compose", compose)
        yield


@pytest.fixture(scope="session", autouse=True)
def packaged_files_are_read_once():
    """Hydra parses some thirty files anew for each choice of groups, and lists its choices so far for each of them."""
    load_anew, conf, loaded = ConfigRepository.load_config, conf_folder(), {}
    choices_so_far = defaults_list._create_interpolation_map
    ours = conf.resolve().as_uri().removeprefix("file://")

    def load(repository, config_path):
        if {source.path for source in repository.sources if source.scheme() == "file"} != {ours}:
            return load_anew(repository, config_path)
        if config_path not in loaded:
            loaded[config_path] = pickle.dumps(load_anew(repository, config_path))
        return pickle.loads(loaded[config_path])

    def choices(overrides, defaults, self_added):
        return any(one.is_interpolation() for one in defaults) and choices_so_far(
            overrides, defaults, self_added
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load)
        patch.setattr(defaults_list, "_create_interpolation_map", choices)
        yield


@pytest.fixture(scope="session", autouse=True)
def words_and_interpolations_are_parsed_once():
    """The grammars of Hydra and OmegaConf read the same words anew in each composition."""
    read = functools.cache(OverridesParser.parse_rule)
    one = OverridesParser.create()
    functions = functools.cache(overrides_parser.create_functions)
    parse = functools.cache(omegaconf.base.parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverridesParser, "parse_rule", lambda _, *given: copy.copy(read(one, *given)))
        patch.setattr(overrides_parser, "create_functions", functions)
        patch.setattr(omegaconf.base, "parse", parse)
        patch.setattr(omegaconf._utils, "parse", parse)
        yield


@pytest.fixture(scope="session", autouse=True)
def backbones_are_drawn_once():
    """Drawing a backbone's weights takes longer than most tests that need one."""
    build_anew, built = backbones._build, {}

    def build(*key, drawn):
        if not drawn:
            return build_anew(*key, drawn)
        if key not in built:
            built[key] = build_anew(*key, drawn)
        return copy.deepcopy(built[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "_build", build)
        yield


@pytest.fixture(scope="session", autouse=True)
def callbacks_of_other_packages_are_looked_for_once():
    """Fabric reads the metadata of all installed packages whenever it is built."""
    with pytest.MonkeyPatch.context() as patch:
        fabric = importlib.import_module("lightning.fabric.fabric")
        look = functools.cache(fabric._load_external_callbacks)
        patch.setattr(fabric, "_load_external_callbacks", lambda group: list(look(group)))
        yield


@pytest.fixture(scope="session", autouse=True)
def seeds_are_set_without_a_record_of_who_set_them():
    """For each kind of device that may be found later, torch formats the whole stack whenever a seed is set."""
    with pytest.MonkeyPatch.context() as patch:
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(devices, "traceback", SimpleNamespace(format_stack=list))
        yield


@pytest.fixture(scope="session", autouse=True)
def operators_of_onnx_are_read_once():
    """For each model, PyTorch's exporter parses the source of some five hundred operators."""
    write = formats._onnx
    with pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def keep_what_is_read():  # at the first export: the import takes a second
            registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
            patch.setattr(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib)))

        def write_by_what_is_read(program):
            keep_what_is_read()
            return write(program)

        patch.setattr(formats, "_onnx", write_by_what_is_read)
        yield

"""Configuration files of the user's own packages."""

import pytest

from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices, files_of
from lit_fedad.core.conflicts import check_conflicts
from lit_fedad.core.errors import UserError
from lit_fedad.core.own_files import code_of

METHOD = """# @package _global_
defaults: [fedprox]
method: {name: own_prox, client: {mu: 0.5}}
"""
DATA = """defaults: [textures]
name: own
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the folder `conf` of a package that Python finds and the user trusts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_package")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()

    def write(name: str, text: str):
        path = tmp_path / "own_package" / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_an_own_file_is_a_choice_that_extends_a_packaged_one(write):
    write("method/own_prox.yaml", METHOD)
    assert {"own_prox", "fedprox"} <= set(choices("method"))
    config = compose(["method=own_prox", "debug=seconds", "rounds=3"])
    assert config["method"]["name"] == "own_prox"
    assert config["method"]["client"] == {**compose(["method=fedprox"])["method"]["client"], "mu": 0.5}
    assert config["rounds"] == 3


def test_a_preset_may_set_what_the_packaged_file_behind_an_own_one_takes(write):
    write("data/own_textures.yaml", DATA.replace("name: own", "test_per_product: 3"))
    overrides = ["data=own_textures", "debug=seconds", "method=fedavg"]
    check_conflicts(compose(overrides), overrides)


def test_own_files_change_no_run_that_does_not_name_them(write, monkeypatch):
    write("method/own_prox.yaml", METHOD)
    with_package = compose(["method=fedprox"])
    monkeypatch.delenv("LIT_FEDAD_PACKAGES")
    assert with_package == compose(["method=fedprox"])
    with pytest.raises(UserError, match="method has no option 'own_prox'"):
        compose(["method=own_prox"])


def test_an_own_file_may_not_have_the_name_of_a_packaged_one(write):
    path = write("method/fedavg.yaml", METHOD)
    with pytest.raises(UserError, match=rf"^{path}: .*fedavg\.yaml has the same name; rename your file$"):
        files_of("method")


def test_a_broken_own_file_is_named(write):
    path = write("method/broken.yaml", "a: [")
    with pytest.raises(UserError, match=rf'cannot be read \(.*in "{path}"'):
        compose(["method=broken"])


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.inner"])
def test_a_package_that_python_does_not_find_is_named(monkeypatch, name):
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", name)
    with pytest.raises(UserError, match=f"^LIT_FEDAD_PACKAGES={name}: Python finds no such package"):
        choices("method")


def test_a_trusted_module_without_files_adds_none(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    before = choices("method")
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_module")
    assert choices("method") == before


def test_the_code_of_own_parts_is_that_of_the_packages_that_targets_name(write, tmp_path, monkeypatch):
    (tmp_path / "own_module.py").touch()
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_package,own_module,unused")
    write("method/own_prox.yaml", METHOD)  # settings are compared by their values
    code = code_of(
        ["own_package.tasks.Own", "own_module.Loss", "torch.nn.ReLU", "own_package_of_another.Part"]
    )
    assert list(code) == ["own_package/__init__.py", "own_module"]
    (tmp_path / "own_module.py").write_text("changed = 1")
    changed = code_of(["own_package.tasks.Own", "own_module.Loss"])
    assert [path for path in code if code[path] != changed[path]] == ["own_module"]

"""Words of commands: bound to the parameters of their functions, refused in one line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind


@dataclass(frozen=True)
class Options:
    run: str
    steps: int = 500
    mode: Literal["online", "offline"] = "online"
    out: str | None = None
    rate: float = 0.1
    tracking: bool = True
    client: int | None = None
    uri: str = "http://a"
    names: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    root: Mapping[str, str] = field(default_factory=dict)


def attack(options: Options, overrides: Mapping[str, str]) -> tuple[Options, Mapping[str, str]]:
    return options, overrides


def sweep(options: Options, overrides: Sequence[str]) -> tuple[Options, Sequence[str]]:
    return options, overrides


def plain(overrides: Sequence[str]) -> Sequence[str]:
    return overrides


def sync(client: int | str, mode: Literal["on", "off"]) -> None: ...


def read(words, function=attack):
    return bind(function, words, function.__name__)()


def test_types_defaults_and_the_keys_of_the_configuration():
    given = ["run=a=b", "steps=3", "rate=2e-3", "out=null", "names=x, y,", "seeds=0,1", "data.root=/x"]
    options, overrides = read([*given, "tracking=off", "client=7"])
    assert options == Options("a=b", 3, "online", None, 0.002, False, 7, "http://a", ("x", "y"), (0, 1))
    assert overrides == {"data.root": "/x"}


def test_a_key_of_two_types_that_is_missing_is_told():
    with pytest.raises(
        UserError, match=r"^sync needs 'client': lit-fedad sync client=CLIENT mode=on\|off; all"
    ):
        read([], sync)


def test_several_keys_of_a_mapping():
    options, overrides = read(["run=a", "root.mpdd=/a", "root.x.y=/b=c"])
    assert options.root == {"mpdd": "/a", "x.y": "/b=c"}
    assert overrides == {}


def test_a_key_without_a_value():
    options, overrides = read(["run=a", "out=", "client=", "seeds=", "uri=", "data.root="])
    assert options == Options("a", seeds=())
    assert overrides == {"data.root": ""}


@pytest.mark.filterwarnings("ignore:.* has no effect")
def test_of_equal_keys_the_last_one_counts():
    assert read(["run=a", "a.b=1", "a.c=2", "run=b", "a.b=3"]) == (
        Options("b"),
        {"a.b": "3", "a.c": "2"},
    )


def test_all_that_is_not_declared_is_told_from_what_is():
    given = ["rounds=3", "run=a", "root.mpdd=/a", "~start", "~run", "data.root=/x", "+gamma=2", "steps=2"]
    options, overrides = read(given, sweep)
    assert options == Options("a", 2, root={"mpdd": "/a"})
    assert overrides == ["rounds=3", "~start", "~run", "data.root=/x", "+gamma=2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run=a", "rounds"], "'rounds' is not of the form key=value"),
        (["run=a", "step=2"], "sweep has no key 'step'; did you mean 'steps'?"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        read(words, sweep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run"], "'run' is not of the form key=value"),
        ([], "attack needs 'run'"),
        (["run="], "attack needs 'run'"),
        (["run=a", "step=3"], "attack has no key 'step'; did you mean 'steps'?"),
        (["run=a", "steps=many"], "attack.steps='many' must be int"),
        (["run=a", "steps=1.5"], "attack.steps='1.5' must be int"),
        (["run=a", "steps="], "attack.steps='' must be int"),
        (["run=a", "steps=null"], "attack.steps='null' must be int"),
        (["run=a", "client=x"], "attack.client='x' must be int or null"),
        (["run=a", "rate=fast"], "attack.rate='fast' must be float"),
        (["run=a", "tracking=2"], "attack.tracking='2' must be bool"),
        (["run=a", "mode=off"], "attack.mode='off' must be one of"),
        (["run=a", "seeds=0,x"], "attack.seeds=0,x must be whole numbers, separated by commas"),
        (["run=a", "root=/x"], "attack: give root.NAME=..., not root=..."),
        (["run=a", "root.=/x"], "attack: give root.NAME=..., not root.=..."),
        (["run=a", "~data.root"], "'~data.root' is not of the form key=value"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, message):
    with refusal() as error:
        read(options)
    assert str(error.value).startswith(message)


def test_a_command_without_overrides_takes_none():
    with pytest.raises(UserError, match="sync has no key 'data.root'"):
        read(["client=a", "mode=on", "data.root=/x"], sync)


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (["run=a", "steps=3", "steps=3", "uri=x", "uri=y"], attack),
        (["run=a", "data.root=b", "uri=x", "uri=y"], sweep),
        (["--cfg", "uri=x", "rounds=1", "uri=y"], plain),
    ],
)
def test_a_key_that_is_given_again_with_another_value_is_warned_of(words, function):
    with pytest.warns(UserWarning, match=r"^uri=x has no effect: uri=y is given after it$") as warned:
        bind(function, words, "attack")
    assert len(warned) == 1

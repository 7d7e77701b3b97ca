"""Options of commands: read into dataclasses, refused in one line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lit_fedad.errors import UserError
from lit_fedad.options import read, separate


@dataclass(frozen=True)
class Options:
    run: str
    steps: int = 500
    mode: Literal["online", "offline"] = "online"
    out: str | None = None
    rate: float = 0.1
    seeds: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    root: Mapping[str, str] = field(default_factory=dict)


def test_types_defaults_and_the_keys_of_the_configuration():
    options, overrides = read(
        Options, ["run=a=b", "steps=3", "rate=1", "out=null", "seeds=0,1,", "data.root=/x"], "attack"
    )
    assert options == Options("a=b", 3, "online", None, 1, ("0", "1"))
    assert overrides == {"data.root": "/x"}


def test_several_numbers_and_keys_of_a_mapping():
    options, overrides = read(Options, ["run=a", "widths=8,16", "root.mpdd=/a", "root.x.y=/b=c"], "attack")
    assert options.widths == (8, 16)
    assert options.root == {"mpdd": "/a", "x.y": "/b=c"}
    assert overrides == {}


def test_all_that_is_not_declared_can_be_told_from_what_is():
    words = ["rounds=3", "run=a", "root.mpdd=/a", "~start", "data.root=/x", "rounds=4", "steps=2"]
    own, overrides = separate(Options, words)
    assert own == ["run=a", "root.mpdd=/a", "steps=2"]
    assert overrides == ["rounds=3", "~start", "data.root=/x", "rounds=4"]
    with pytest.raises(UserError, match="'rounds' is not of the form key=value"):
        separate(Options, ["rounds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "'run' is not of the form key=value"),
        ([], "attack needs 'run'"),
        (["run=a", "step=3"], "attack has no key 'step'; did you mean 'steps'?"),
        (["run=a", "steps=many"], "attack.steps='many' must be int"),
        (["run=a", "steps=1.5"], "attack.steps=1.5 must be int"),
        (["run=a", "mode=off"], "attack.mode='off' must be one of"),
        (["run=a", "root=/x"], "attack: give root.NAME=..., not root=..."),
        (["run=a", "root.=/x"], "attack: give root.NAME=..., not root.=..."),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(words, message):
    with pytest.raises(UserError) as error:
        read(Options, words, "attack")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)

"""Images that come after a run: who holds what, in which stage, and how it is recognised."""

from pathlib import Path

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.data.additions import Addition, grow, grown_digest
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.stream import LastStages


def samples(*names, product="nut"):
    return tuple(Sample(Path(f"{name}.png"), product) for name in names)


BASE = ImageSet("base", samples("a", "b", "c"), samples("t", product="bolt"))
FIRST, SECOND = Addition({1: samples("d", "e")}), Addition({0: samples("f"), 1: samples("g")})


def test_each_addition_is_a_further_stage_of_the_clients_that_got_images():
    images, partition = grow(BASE, Partition.of_clients([[0, 2], [1]]), [FIRST, SECOND])
    assert [sample.name for sample in images.train] == [f"{name}.png" for name in "abcdefg"]
    assert partition.stages == (((0, 2), (5,)), ((1,), (3, 4), (6,)))
    assert partition.clients == ((0, 2, 5), (1, 3, 4, 6))
    assert images.test == BASE.test


def test_stages_of_the_run_come_first():
    _, partition = grow(BASE, Partition.in_stages([[[2], [0]], [[1]]]), [SECOND])
    assert partition.stages == (((2,), (0,), (3,)), ((1,), (4,)))


def test_clients_hold_their_last_stage():
    module = LastStages([], [], [[[], []]])
    assert module.sizes == {0: 0}
    held = LastStages(list(range(7)), [], [[[0, 2], [5]], [[1], [3, 4], [6]], [[]]]).at(9)
    assert held.partition == [[5], [6], []]
    assert held.stages == {0: 1, 1: 2, 2: 0}


def test_the_hash_depends_on_order_product_and_size_and_not_on_the_folder(tmp_path):
    def addition(folder, text="x", product="nut", client=0):
        path = tmp_path / folder / "a.png"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return Addition({client: (Sample(path, product),)})

    one = grown_digest("base", [addition("p")])
    assert one == grown_digest("base", [addition("q")])
    others = [addition("r", text="xy"), addition("r2", product="bolt"), addition("r3", client=1)]
    digests = {one, "base", grown_digest("other", [addition("p")])}
    digests |= {grown_digest("base", [other]) for other in others}
    digests |= {grown_digest("base", pair) for pair in (others[:2], others[1::-1])}
    assert len(digests) == 8
    assert grown_digest("base", []) == "base"
    gone = addition("s")
    gone.images[0][0].path.unlink()
    with pytest.raises(UserError, match=r"image \S+a.png cannot be read: No such file"):
        grown_digest("base", [gone])


@pytest.mark.parametrize("content", [[], {"x": []}, {"0": [{"path": "a"}]}, {"0": [3]}, {"0": 3}])
def test_what_is_no_addition_is_refused(content):
    assert Addition.from_json(SECOND.to_json()) == SECOND
    with pytest.raises(UserError, match="additions: needs path and product"):
        Addition.from_json(content)

"""Attacked examples, and the training sets of shadow models."""

from collections import Counter

import pytest

from lit_fedad.audits.shadow_splits import draw_cells, draw_training_cells, split, trained_on

# Positions 0 to 29 are trained on, 30 to 39 held out; classes alternate.
CLASSES = ["ab"[i % 2] for i in range(40)]
STAGES = [[list(range(16))], [list(range(16, 24))], [list(range(24, 30))]]
HELD_OUT = list(range(30, 40))


@pytest.fixture
def cells():
    return draw_cells(STAGES, CLASSES, HELD_OUT, seed=0)


def test_members_and_non_members_are_of_one_class_and_equally_many(cells):
    for cell in cells:
        assert len(cell.members) == len(cell.others) > 0
        assert len({CLASSES[i] for i in cell.pool}) == 1
        assert set(cell.members) <= set(STAGES[cell.client][0])
        assert set(cell.others) <= set(HELD_OUT)


def test_held_out_images_are_dealt_in_turn_and_to_nobody_twice(cells):
    dealt = [i for cell in cells for i in cell.others]
    assert sorted(dealt) == HELD_OUT
    # Five a class for holders of 8, 4 and 3: 2, 2 and 1.
    assert Counter(cell.client for cell in cells for _ in cell.members) == {0: 4, 1: 4, 2: 2}


def test_everybody_is_attacked_where_there_are_enough():
    cells = draw_cells([[[0, 1]], [[2]]], ["a"] * 9, range(3, 9), seed=0)
    assert [cell.members for cell in cells] == [(0, 1), (2,)]


def test_a_class_without_held_out_images_is_not_attacked():
    assert draw_cells([[[0, 1]]], ["a", "b", "b"], [2], seed=0)[0].members == (1,)
    assert draw_cells([[[0]]], ["a", "b"], [1], seed=0) == []


def test_shadow_models_come_in_complementary_pairs(cells):
    pool = {i for cell in cells for i in cell.pool}
    parts = [split(cells, shadow, seed=0) for shadow in range(6)]
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert first | second == pool
        assert not first & second
    assert parts[0] != parts[2] != parts[4]
    assert split(cells, 0, seed=1) != parts[0]
    halves = Counter(i for part in parts for i in part)
    assert set(halves.values()) == {3}


def test_clients_keep_their_classes_and_the_members_that_are_not_attacked(cells):
    attacked = {i for cell in cells for i in cell.members}
    for shadow in range(4):
        chosen = split(cells, shadow, seed=0)
        held = trained_on(STAGES, cells, chosen)
        for client, (now,) in enumerate(held):
            (then,) = STAGES[client]
            assert Counter(CLASSES[i] for i in now) == Counter(CLASSES[i] for i in then)
            assert set(then) - attacked <= set(now)
            own = {i for cell in cells if cell.client == client for i in cell.pool}
            assert set(now) & own == chosen & own
        assert len({i for own in held for i in own[0]}) == 30


def test_a_held_out_image_comes_in_the_stages_of_the_members_that_it_stands_for():
    stages = [[[0, 1], [1, 2]]]
    cells = draw_cells(stages, ["a"] * 6, [3, 4, 5], seed=0)
    assert [(cell.stages, cell.members) for cell in cells] == [((0,), (0,)), ((0, 1), (1,)), ((1,), (2,))]
    ((first, second),) = trained_on(stages, cells, {i for cell in cells for i in cell.others})
    assert set(first) & set(second) == set(cells[1].others)
    assert set(first) | set(second) == {3, 4, 5}
    assert trained_on(stages, cells, {0, 1, 2}) == (((0, 1), (1, 2)),)


def test_examples_among_the_clients_own_images():
    cells = draw_training_cells(STAGES, CLASSES, 0.5, seed=0)
    for cell in cells:
        assert len(cell.members) == len(cell.others) > 0
        assert len({CLASSES[i] for i in cell.pool}) == 1
        assert set(cell.pool) <= set(STAGES[cell.client][0])
    # Of 8, 4 and 3 images of each of two classes.
    assert [len(cell.pool) for cell in cells] == [4, 4, 2, 2, 2, 2]
    assert draw_training_cells(STAGES, CLASSES, 0.5, seed=1) != cells


def test_shadow_models_leave_half_of_a_clients_examples_out():
    cells = draw_training_cells(STAGES, CLASSES, 1.0, seed=0)
    pool = {i for cell in cells for i in cell.pool}
    for shadow in range(4):
        chosen = split(cells, shadow, seed=0)
        held = trained_on(STAGES, cells, chosen)
        for (now,), (then,) in zip(held, STAGES, strict=True):
            assert set(now) == set(then) - (pool - chosen)
        assert len(chosen) == len(pool) / 2


def test_a_single_image_of_a_class_is_no_example():
    assert draw_training_cells([[[0]], [[1, 2]]], ["a", "b", "a"], 1.0, seed=0) == []


def test_examples_leave_and_come_with_their_stages():
    cells = draw_training_cells([[[0, 1], [1, 2, 3]]], ["a"] * 4, 1.0, seed=0)
    assert [(cell.stages, sorted(cell.pool)) for cell in cells] == [((1,), [2, 3])]
    ((first, second),) = trained_on([[[0, 1], [1, 2, 3]]], cells, {3})
    assert (first, second) == ((0, 1), (1, 3))

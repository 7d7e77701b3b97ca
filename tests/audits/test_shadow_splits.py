"""Attacked examples, and the training sets of shadow models."""

from collections import Counter

from lit_fedad.audits.shadow_splits import draw_cells, split, trained_on

# Classes alternate: of each of two, three clients have 8, 4 and 3 images.
CLASSES = ["ab"[i % 2] for i in range(30)]
STAGES = [[list(range(16))], [list(range(16, 24))], [list(range(24, 30))]]


def test_examples_are_of_one_class_and_an_even_number_of_a_clients_own_images():
    cells = draw_cells(STAGES, CLASSES, 0.5, seed=0)
    for cell in cells:
        assert len({CLASSES[i] for i in cell.examples}) == 1
        assert set(cell.examples) <= set(STAGES[cell.client][0])
    assert [len(cell.examples) for cell in cells] == [4, 4, 2, 2, 2, 2]
    assert draw_cells(STAGES, CLASSES, 0.5, seed=1) != cells


def test_shadow_models_come_in_complementary_pairs():
    cells = draw_cells(STAGES, CLASSES, 1.0, seed=0)
    examples = {i for cell in cells for i in cell.examples}
    parts = [split(cells, shadow, seed=0) for shadow in range(6)]
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert first | second == examples
        assert not first & second
    assert parts[0] != parts[2] != parts[4]
    assert split(cells, 0, seed=1) != parts[0]
    halves = Counter(i for part in parts for i in part)
    assert set(halves.values()) == {3}


def test_shadow_models_leave_half_of_a_clients_examples_out():
    cells = draw_cells(STAGES, CLASSES, 1.0, seed=0)
    examples = {i for cell in cells for i in cell.examples}
    for shadow in range(4):
        chosen = split(cells, shadow, seed=0)
        held = trained_on(STAGES, cells, chosen)
        for (now,), (then,) in zip(held, STAGES, strict=True):
            assert set(now) == set(then) - (examples - chosen)
        assert len(chosen) == len(examples) / 2


def test_a_single_image_of_a_class_is_no_example():
    assert draw_cells([[[0]], [[1, 2]]], ["a", "b", "a"], 1.0, seed=0) == []


def test_examples_leave_and_come_with_their_stages():
    cells = draw_cells([[[0, 1], [1, 2, 3]]], ["a"] * 4, 1.0, seed=0)
    assert [(cell.stages, sorted(cell.examples)) for cell in cells] == [((1,), [2, 3])]
    ((first, second),) = trained_on([[[0, 1], [1, 2, 3]]], cells, {3})
    assert (first, second) == ((0, 1), (1, 3))

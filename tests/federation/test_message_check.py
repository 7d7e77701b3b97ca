"""What a declared form says of values, and what the sizes of values say of their sender."""

import pytest
import torch

from lit_fedad.contracts import Free, TensorSpec, Update, class_list, spec_of
from lit_fedad.core.errors import UserError
from lit_fedad.federation.message_check import check, outliers

ROWS = Free("rows", 3)


@pytest.mark.parametrize(
    ("form", "tensor", "error"),
    [
        (
            TensorSpec((2,)),
            torch.tensor([0.0, 3e38]),
            "values from 0 to 3e\\+38, declared from -1e\\+09 to 1e\\+09; has training diverged",
        ),
        (
            TensorSpec((2,)),
            torch.tensor([-3e38, 0.0]),
            "values from -3e\\+38 to 0, .*; has training diverged",
        ),
        (
            TensorSpec((2,), low=0),
            torch.tensor([1.0, -0.5]),
            "values from -0.5 to 1, declared from 0 to 1e\\+09$",
        ),
        (class_list(4), torch.tensor([0, 4]), "values from 0 to 4, declared from 0 to 3"),
        (class_list(4), torch.tensor([-1, 2]), "values from -1 to 2"),
        (class_list(4), torch.tensor([2, 2]), "a value that occurs twice"),
        (TensorSpec((ROWS, 2)), torch.zeros(4, 2), r"shape \(4, 2\), declared as \(rows <= 3, 2\)"),
        (TensorSpec((2, 2)), torch.zeros(2), r"shape \(2,\), declared as \(2, 2\)"),
        (TensorSpec((1, 2, 2), definite=True), -torch.eye(2)[None], "not symmetric and positive definite"),
        (
            TensorSpec((2, 2, 2), definite=True),
            torch.stack([torch.eye(2), -torch.eye(2)]),
            "not symmetric and positive definite",
        ),
        (
            TensorSpec((1, 2, 2), definite=True),
            torch.tensor([[[2.0, 1.0], [0.0, 2.0]]]),
            "not symmetric and positive definite",
        ),
    ],
)
def test_values_outside_the_declared_form_are_refused(form, tensor, error):
    with pytest.raises(UserError, match=f"client 3 sent 'x'.*{error}"):
        check({"x": tensor}, {"x": form}, "client 3")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (None, "sent a NoneType, not a dictionary of tensors"),
        ({"x": 3.0}, "sent 'x' as a float, no tensor, declared as torch.float32"),
        ({"x": [torch.zeros(2)]}, "sent 'x' as a list, no tensor, declared"),
    ],
)
def test_what_is_no_message_is_refused(message, error):
    with pytest.raises(UserError, match=f"client 3 {error}"):
        check(message, {"x": TensorSpec((2,))}, "client 3")


@pytest.mark.parametrize("shape", [2, [2]])
def test_a_declared_shape_is_a_tuple(shape):
    with pytest.raises(TypeError, match=r"TensorSpec: shape=.* must be a tuple of sizes"):
        TensorSpec(shape)


def test_free_sizes_of_one_name_are_equal_in_all_tensors():
    spec = {"x": TensorSpec((Free("rows"), 2)), "y": TensorSpec((Free("rows"),))}
    check({"x": torch.zeros(3, 2), "y": torch.zeros(3)}, spec, "client 3")
    with pytest.raises(UserError, match="'y' of shape"):
        check({"x": torch.zeros(3, 2), "y": torch.zeros(2)}, spec, "client 3")


def test_empty_tensors_and_covariances_of_rounded_sums_pass():
    half = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    covariance = half.T @ half / 50
    covariance[0, 1] *= 1 + 1e-6
    spec = {"x": TensorSpec((Free("rows"), 4, 4), definite=True), "classes": class_list(5)}
    for classes in ([], [0, 4]):  # none, and the bounds themselves
        check({"x": covariance[None], "classes": torch.tensor(classes, dtype=torch.int64)}, spec, "client 3")


def test_counts_of_given_tensors_are_declared_not_negative():
    spec = spec_of({"steps": torch.tensor(3)})
    with pytest.raises(UserError, match="'steps'"):
        check({"steps": torch.tensor(-3)}, spec, "client 3")


def far(updates, previous):
    return outliers(updates, previous, factor=30, spec={"w": TensorSpec((4,))})


def updates(*values: float) -> dict[int, Update]:
    return {client: Update({"w": torch.full((4,), value)}, 10) for client, value in enumerate(values)}


def test_a_client_far_larger_than_the_others_is_named():
    assert far(updates(1.0, 1.2, -0.9, 100.0, 1.1), {}) == {3: "sent 'w' 91 times as large as what is usual"}


def test_one_large_value_among_many_is_enough():
    many = {client: Update({"w": torch.ones(10_000)}, 10) for client in range(3)}
    many[1].message["w"][77] = -50.0
    assert list(far(many, {})) == [1]


def test_small_values_never_make_others_look_large():
    """A client that sends zeros must not cost the others their round."""
    assert far(updates(0.0, 1.0, 1.1), {}) == {}
    assert far(updates(1e-6, 1e-3, 0.1), {}) == {}
    nothing = {"w": torch.zeros(4)}
    assert far(updates(0.0, 5.0), nothing) == far(updates(0.0, 0.0, 5.0, 4.0), nothing) == {}
    assert list(far(updates(0.0, 1.0, 1.0, 50.0), nothing)) == [3]


def test_two_clients_are_measured_by_the_servers_last_message_too():
    previous = {"w": torch.full((4,), 1.0)}
    assert list(far(updates(0.9, 500.0), previous)) == [1]
    assert far(updates(0.001, 20.0), previous) == {}


def test_a_single_client_without_history_cannot_be_compared():
    assert far(updates(1e6), {}) == {}


def test_a_single_client_is_compared_with_the_servers_last_message():
    assert list(far(updates(1e6), {"w": torch.ones(4)})) == [0]
    assert far(updates(20.0), {"w": torch.ones(4)}) == {}


def test_whole_numbers_and_empty_tensors_are_not_compared():
    spec = {"steps": TensorSpec((1,), torch.int64), "rows": TensorSpec((Free("rows"),))}
    sent = {
        client: Update({"steps": torch.tensor([steps]), "rows": torch.zeros(client)}, 10)
        for client, steps in enumerate((1, 10**6, 2))
    }
    assert outliers(sent, {"steps": torch.tensor([1]), "rows": torch.zeros(0)}, 30, spec) == {}


def test_a_client_with_a_thousand_times_the_images_may_count_a_thousand_times_as_much():
    counts = {
        client: Update({"n": torch.full((4,), 3.0 * size)}, size) for client, size in enumerate((1, 2, 3000))
    }
    assert list(outliers(counts, {}, 30, {"n": TensorSpec((4,))})) == [2]
    assert outliers(counts, {}, 30, {"n": TensorSpec((4,), counted=True)}) == {}

"""Fixed point: sums are exact to the step, whatever the order, and what is out of range is refused."""

import math

import numpy as np
import pytest
import torch

from lit_fedad.contracts import SumSpec
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.fixed_point import FixedPoint, decode, encode

FORMS = {
    "mean": SumSpec((2, 3), 1e9),
    "unit": SumSpec((4,), 1.0),
    "count": SumSpec((), 5_000, whole=True),
    "many": SumSpec((2,), 1e12, whole=True),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "mean": torch.randn(2, 3, generator=generator, dtype=torch.float64) * 100,
        "unit": torch.rand(4, generator=generator, dtype=torch.float64) / 8 - 0.05,
        "count": torch.tensor(7 * seed),
        "many": torch.tensor([seed, 10**11]),
    }


def test_bits_and_steps_follow_from_the_bounds():
    points = {name: FixedPoint.of(name, form) for name, form in FORMS.items()}
    assert {name: point.bits for name, point in points.items()} == {
        "mean": 64,
        "unit": 32,
        "count": 32,
        "many": 64,
    }
    assert points["count"].step == points["many"].step == 1
    assert points["unit"].step == 2**-27
    assert points["mean"].step == 2**-29
    largest = {bound: FixedPoint.of("n", SumSpec((), bound, whole=True)).bits for bound in (2**27, 2**27 + 1)}
    assert list(largest.values()) == [32, 64]
    for point in points.values():  # room for the bound, four bits beyond it, and the sign
        assert point.form.bound * 2**4 <= 2 ** (point.bits - 1) * point.step


def test_sums_are_exactly_those_of_rounded_numbers():
    clients = [drawn(seed) for seed in range(1, 8)]
    words = [encode(client, FORMS) for client in clients]
    total = {name: sum((one[name] for one in words[1:]), words[0][name].copy()) for name in FORMS}
    sums = decode(total, FORMS)
    for name, form in FORMS.items():
        step = FixedPoint.of(name, form).step
        rounded = sum(torch.round(client[name].double() / step) for client in clients) * step
        plain = sum(client[name].double() for client in clients)
        assert sums[name].double().equal(rounded)
        assert (sums[name].double() - plain).abs().max() <= len(clients) * step / 2
    assert sums["count"].dtype == sums["many"].dtype == torch.int64


@pytest.mark.parametrize("bound", [0.25, 1.0, 3e5, 1e9])
def test_the_bound_itself_is_a_number_and_a_sum(bound):
    form = {"unit": SumSpec((2,), bound)}
    values = torch.tensor([bound, -bound / 3], dtype=torch.float64)
    sums = decode(encode({"unit": values}, form), form)
    torch.testing.assert_close(sums["unit"], values, rtol=1e-6, atol=0)


def test_numbers_beyond_the_bound_are_refused():
    values = drawn(1)
    for name, value in (("unit", 1.1), ("mean", math.nan), ("mean", math.inf), ("count", 5_001)):
        spoilt = {**values, name: torch.full(FORMS[name].shape, value, dtype=torch.float64)}
        with pytest.raises(UserError, match=f"'{name}' adds"):
            encode(spoilt, FORMS)
    with pytest.raises(ValueError, match=r"'unit' has shape \(1,\), declared as \(4,\)"):
        encode({**values, "unit": values["unit"][:1]}, FORMS)


def test_sums_beyond_the_bound_are_refused():
    words = encode(drawn(1), FORMS)
    words["unit"] += np.uint32(2**29)
    with pytest.raises(UserError, match="the sum of 'unit' is beyond 1"):
        decode(words, FORMS)


def test_counts_too_large_for_64_bits_are_refused():
    with pytest.raises(UserError, match="no room in 64 bits"):
        FixedPoint.of("count", SumSpec((), 2.0**60, whole=True))

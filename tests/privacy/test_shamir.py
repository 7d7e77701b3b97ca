"""Shamir's shares: enough give the secret back, fewer leave every secret possible."""

from itertools import combinations

import pytest

from lit_fedad.privacy.shamir import PRIME, SHARE_BYTES, join, split

SECRETS = [bytes(32), b"\xff" * 32, bytes(range(32))]


@pytest.mark.parametrize("secret", SECRETS)
def test_any_three_of_five_shares_give_the_secret_back(secret):
    shares = split(secret, 3, range(1, 6))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for chosen in combinations(shares, 3):
        assert join({place: shares[place] for place in chosen}) == secret


def test_two_shares_of_three_are_consistent_with_any_secret():
    shares = split(SECRETS[2], 3, [1, 2, 3])
    # With y_3 free, Lagrange's value at 0, 3 y_1 - 3 y_2 + y_3, takes every value once.
    one, two = (int.from_bytes(shares[place], "big") for place in (1, 2))
    for secret in SECRETS:
        third = (int.from_bytes(secret, "big") - 3 * one + 3 * two) % PRIME
        assert join({1: shares[1], 2: shares[2], 3: third.to_bytes(SHARE_BYTES, "big")}) == secret


def test_shares_are_drawn_anew():
    assert split(SECRETS[0], 2, [1, 2]) != split(SECRETS[0], 2, [1, 2])


def test_the_modulus_is_prime_and_the_smallest_that_holds_all_secrets():
    from sympy import nextprime  # which comes with torch

    assert nextprime(2**256) == PRIME


@pytest.mark.parametrize(("secret", "places"), [(b"short", [1, 2]), (bytes(32), [0, 1]), (bytes(32), [1, 1])])
def test_what_cannot_be_shared_is_refused(secret, places):
    with pytest.raises(ValueError, match="32 bytes"):
        split(secret, 2, places)


def test_shares_of_no_secret_are_refused():
    with pytest.raises(ValueError, match="of no secret"):
        join({1: (PRIME - 1).to_bytes(SHARE_BYTES, "big")})


def test_shares_are_of_the_smallest_prime_above_all_secrets():
    """By Fermat's little theorem, to base 3: the numbers below are composite for certain."""
    assert pow(3, PRIME - 1, PRIME) == 1
    assert all(pow(3, number - 1, number) != 1 for number in range(2**256, PRIME))

"""What clients are called where people read of them."""

import pytest

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError

SITES = ClientNames({0: "north", 2: "7"})


def test_sites_have_names_and_other_clients_numbers():
    assert [SITES.label(client) for client in range(3)] == ["north", "1", "7"]
    assert [SITES.title(client) for client in range(3)] == ["site north", "client 1", "site 7"]
    assert NUMBERS.title(0) == "client 0"


def test_a_name_wins_over_a_number():
    assert [SITES.number(label) for label in ("north", "1", "7", "south", "-1")] == [0, 1, 2, None, None]


def test_names_are_those_of_a_result():
    assert ClientNames.of({"sites": {"north": {"client": 0}, "7": {"client": 2}}}) == SITES
    assert ClientNames.of({}) == NUMBERS


@pytest.mark.parametrize(
    "sites",
    [
        ["north"],
        {"north": 1},
        {"north": {}},
        {"north": {"client": "a"}},
        {"north": {"client": float("inf")}},
        None,
    ],
)
def test_sites_without_numbers_are_refused(sites):
    with pytest.raises(UserError, match=r"^result.json: sites needs the number of each site under its name$"):
        ClientNames.of({"sites": sites})

"""Objects that are built from sections: what is refused where no configuration has been read."""

import pytest

from lit_fedad.core.building import build
from lit_fedad.core.errors import UserError


def test_a_function_that_does_not_take_what_it_is_given_is_refused():
    with pytest.raises(UserError, match="^getcwd._target_ does not go here: .* 'client'$"):
        build({"_target_": "os.getcwd"}, client=None)


def test_a_value_in_place_of_a_section_is_refused_by_its_key():
    with pytest.raises(UserError, match=r"^federation.robust=3 must be a section with _target_$"):
        build(3, "federation.robust")

"""Images of sites that tests of several files look at."""

import pytest
from helpers.class_sites import pack
from helpers.sites import enrol_in_sums, paint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Image files of three sites, with keys for secure sums, and, in ``classes``, labelled images of three others."""
    folder = tmp_path_factory.mktemp("sites")
    paint(folder)
    enrol_in_sums(folder)
    (folder / "classes").mkdir()
    pack(folder / "classes", own_numbers=True)
    return folder

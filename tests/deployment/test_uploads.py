"""What arrives over HTTP, before it is known to be an image."""

import tracemalloc

import pytest

from lit_fedad.deployment.uploads import RefusedError, file_in


def test_a_form_of_millions_of_parts_takes_no_memory_for_them():
    tracemalloc.start()
    with pytest.raises(RefusedError, match="holds no file"):
        file_in(b"---ab" * 1_000_000, "multipart/form-data; boundary=-")
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("boundary", ["*;boundary*0=x", "*=undefined''x", "*=raw-unicode-escape''%5Cud800"])
def test_a_header_that_cannot_be_read_is_one_line(boundary):
    with pytest.raises(RefusedError, match="its Content-Type cannot be read"):
        file_in(b"", f"multipart/form-data; boundary{boundary}")

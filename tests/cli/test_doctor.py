"""The doctor reports on a machine whatever is broken on it."""

from __future__ import annotations

from lit_fedad.cli.doctor import Finding, _run


def test_a_package_that_cannot_be_imported_is_a_finding_beside_others():
    def check():
        yield Finding("cpu", "ok", "2 cores")
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    first, second = _run(check)
    assert first.remark == "2 cores"
    assert second == Finding(
        "check", "trouble", "cannot be checked: libtorch_cpu.so: cannot open shared object file"
    )

"""Where the libraries of CANN are looked for."""

from __future__ import annotations

import platform
from pathlib import Path

from aiodatadist import _cann


def _install(home: Path, *names: str) -> Path:
    folder = home / "lib64"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_what_is_configured_counts_first(tmp_path: Path) -> None:
    named = _install(tmp_path / "named", _cann.HIXL, _cann.METADEF)
    other = _install(tmp_path / "cann", _cann.HIXL, _cann.METADEF, _cann.ACL)
    environ = {"ASCEND_HOME_PATH": str(other.parent)}
    for configured in (str(named), str(named / _cann.HIXL)):
        found = _cann.find_libraries(configured, environ)
        assert found.hixl == str(named / _cann.HIXL)
        assert found.metadef == str(named / _cann.METADEF)
        assert found.acl == str(other / _cann.ACL)
        assert found.found
    missing = _cann.find_libraries(str(tmp_path / "nowhere" / "libx.so"), environ)
    assert missing.hixl == str(tmp_path / "nowhere" / "libx.so")


def test_the_environment_and_what_is_left_to_the_loader(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _install(first, _cann.METADEF)
    arch = second / f"{platform.machine()}-linux" / "lib64"
    arch.mkdir(parents=True)
    (arch / _cann.HIXL).write_bytes(b"")
    environ = {"ASCEND_HOME_PATH": str(first), "ASCEND_TOOLKIT_HOME": str(second), "HOME": str(tmp_path)}
    assert _cann.homes(environ)[:2] == (first, second)
    found = _cann.find_libraries(None, environ)
    assert found.metadef == str(first / "lib64" / _cann.METADEF)
    assert found.hixl == str(arch / _cann.HIXL)
    assert str(arch) in found.searched
    nothing = _cann.find_libraries(None, {"HOME": str(tmp_path)})
    if not nothing.searched:  # no CANN on this machine
        assert (nothing.hixl, nothing.found) == (_cann.HIXL, False)


def test_a_users_own_installation_is_found(tmp_path: Path) -> None:
    folder = _install(tmp_path / "Ascend" / "cann", _cann.HIXL)
    assert _cann.find_libraries(None, {"HOME": str(tmp_path)}).searched[-1] == str(folder)

"""The error tree: shape, statuses, text, pickling, and the map from native statuses."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import errors
from aiodatadist.errors import DataDistError, NativeStatus, Status, error_from_native


def _all_classes() -> list[type[DataDistError]]:
    found: list[type[DataDistError]] = []
    waiting: list[type[DataDistError]] = [DataDistError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ == errors.__name__]


CLASSES = _all_classes()
NATIVE = [status for status in NativeStatus if status not in (NativeStatus.OK, NativeStatus.PENDING)]


def _documented_tree() -> dict[str, tuple[str | None, str | None]]:
    """Read name -> (parent, built-in it also is) from the module's docstring."""
    assert errors.__doc__ is not None
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: |$)(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path = [*path[:depth], match[2]]
        also = re.search(r"\(also (\w+)\)", match[3])
        tree[match[2]] = (path[-2] if depth else None, also[1] if also else None)
    return tree


def test_docstring_shows_the_tree() -> None:
    tree = _documented_tree()
    assert set(tree) == {cls.__name__ for cls in CLASSES}
    for cls in CLASSES:
        parent, also = tree[cls.__name__]
        if parent is not None:
            assert cls.__bases__[0].__name__ == parent
        assert (cls.__bases__[1].__name__ if len(cls.__bases__) > 1 else None) == also


def test_every_public_name_is_exported() -> None:
    assert set(errors.__all__) == {cls.__name__ for cls in CLASSES} | {
        "Status",
        "NativeStatus",
        "error_from_native",
    }


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ArgumentError, ValueError),
        (errors.ArgumentTypeError, TypeError),
        (errors.ConfigError, ValueError),
        (errors.BlockIndexError, ValueError),
        (errors.LinkTimeout, TimeoutError),
        (errors.TransferTimeout, TimeoutError),
        (errors.TransferTimeout, asyncio.TimeoutError),
        (errors.PeerLostError, ConnectionError),
    ],
)
def test_builtin_bases(cls: type[DataDistError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise cls("x")
    with pytest.raises(DataDistError):
        raise cls("x")


def test_cache_not_found_is_no_key_error() -> None:
    assert not issubclass(errors.CacheNotFound, KeyError)
    assert str(errors.CacheNotFound("no cache 7")) == "no cache 7"


def test_status_codes_of_the_original() -> None:
    codes = {
        "SUCCESS": 0,
        "FAILED": 4294967295,
        "KV_CACHE_NOT_EXIST": 1343270914,
        "PARAM_INVALID": 1343270917,
        "NOT_YET_LINK": 1343270919,
        "LINK_FAILED": 1343270921,
        "BLOCKS_OUT_OF_MEMORY": 1343270931,
        "EXIST_LINK": 1343270936,
        "FEATURE_NOT_ENABLED": 1343270937,
        "TIMEOUT": 1343270938,
        "LINK_BUSY": 1343270939,
        "OUT_OF_MEMORY": 1343270940,
        "DEVICE_MEM_ERROR": 507053,
        "SUSPECT_REMOTE_ERROR": 507057,
        "UNKNOWN_ERROR": -1,
    }
    assert {name: Status[name].value for name in codes} == codes


@pytest.mark.parametrize("cls", CLASSES)
def test_no_error_reports_success(cls: type[DataDistError]) -> None:
    error = cls("what happened")
    assert error.status not in (Status.SUCCESS, Status.UNKNOWN_ERROR)
    assert isinstance(error.status, Status)


@pytest.mark.parametrize("cls", CLASSES)
def test_attributes_are_keyword_only(cls: type[DataDistError]) -> None:
    with pytest.raises(TypeError):
        cls("x", Status.FAILED)  # type: ignore[call-arg]
    error = cls("x", status=Status.TIMEOUT, peer=7, transport="tcp", hint="do that")
    assert (error.status, error.peer, error.transport, error.hint) == (Status.TIMEOUT, 7, "tcp", "do that")
    assert error.args == ("x",)
    assert str(error) == "x [cluster 7, tcp]; do that"
    assert repr(error) == f"{cls.__name__}('x [cluster 7, tcp]; do that')"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_text(cls: type[DataDistError]) -> None:
    assert str(cls())


def _same(a: DataDistError, b: DataDistError) -> bool:
    return type(a) is type(b) and a.args == b.args and str(a) == str(b) and vars(a) == vars(b)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy_keep_everything(cls: type[DataDistError], protocol: int) -> None:
    error = cls("x {y} %s", status=Status.TIMEOUT, peer=0, transport="shm", hint="h")
    error.add_note("a note")
    assert _same(error, pickle.loads(pickle.dumps(error, protocol)))
    assert _same(error, copy.copy(error))
    assert _same(error, copy.deepcopy(error))


def test_special_fields_survive_a_pickle() -> None:
    mismatch = errors.CacheMismatch(field="dtype", local="float16", remote="bfloat16", peer=3)
    exposed = errors.MemoryStillExposed(caches=("cache 1", "cache 4"))
    unavailable = errors.TransportUnavailable(reason="libibverbs.so.1 is missing", transport="verbs")
    late = errors.TransferTimeout("late", bytes_done=5, bytes_total=9)
    assert str(mismatch) == "dtype differs: 'float16' here, 'bfloat16' at the other side [cluster 3]"
    assert "2 cache(s): cache 1, cache 4" in str(exposed)
    assert "libibverbs.so.1 is missing" in str(unavailable)
    for error in (mismatch, exposed, unavailable, late):
        assert _same(error, pickle.loads(pickle.dumps(error)))


def test_subclasses_with_their_own_signature_pickle() -> None:
    error = _Odd(1, 2)
    assert _same(error, pickle.loads(pickle.dumps(error)))


class _Odd(errors.LinkTimeout):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}", peer=a)


def test_raise_from_keeps_the_cause() -> None:
    cause = OSError(104, "reset")
    with pytest.raises(errors.PeerLostError) as caught:
        raise errors.PeerLostError("gone", peer=1) from cause
    assert caught.value.__cause__ is cause
    assert caught.value.peer == 1


def test_mixed_os_errors_take_no_errno() -> None:
    # Two positional arguments would make OSError read an errno and a text.
    error = errors.PeerLostError("gone")
    assert error.errno is None
    assert error.args == ("gone",)


# --- native statuses ------------------------------------------------------------------------------

EXPECTED: dict[NativeStatus, type[DataDistError]] = {
    NativeStatus.INVALID: errors.ArgumentError,
    NativeStatus.NOT_FOUND: errors.CacheNotFound,
    NativeStatus.BOUNDS: errors.BlockIndexError,
    NativeStatus.PERMISSION: errors.CacheAccessError,
    NativeStatus.GEOMETRY: errors.CacheMismatch,
    NativeStatus.CANCELLED: errors.TransferAborted,
    NativeStatus.TIMEOUT: errors.TransferTimeout,
    NativeStatus.PEER_LOST: errors.PeerLostError,
    NativeStatus.ABORTED: errors.TransferAborted,
    NativeStatus.CLOSED: errors.ClosedError,
    NativeStatus.UNSUPPORTED: errors.TransportUnavailable,
    NativeStatus.NO_MEMORY: errors.OutOfMemoryError,
    NativeStatus.IO: errors.TransportError,
    NativeStatus.PROTOCOL: errors.ProtocolError,
    NativeStatus.FENCED: errors.TransferAborted,
    NativeStatus.BUSY: errors.BusyError,
    NativeStatus.AGAIN: errors.BusyError,
    NativeStatus.INTERNAL: errors.InternalError,
    NativeStatus.LAYER: errors.LayerFailed,
    NativeStatus.NOT_MAPPED: errors.RegistrationError,
}


def test_every_native_failure_has_a_class() -> None:
    assert set(EXPECTED) == set(NATIVE)


@pytest.mark.parametrize("status", NATIVE, ids=lambda status: status.name)
def test_error_from_native(status: NativeStatus) -> None:
    error = error_from_native(int(status), peer=4, transport="shm", detail="pull of cache 3: {0} %s")
    assert type(error) is EXPECTED[status]
    assert error.peer == 4
    assert error.transport == "shm"
    assert "pull of cache 3: {0} %s" in str(error)
    assert error is not error_from_native(int(status), peer=4)
    assert str(error_from_native(int(status)))
    assert _same(error, pickle.loads(pickle.dumps(error)))


def test_not_mapped_is_the_callers_mistake() -> None:
    assert error_from_native(NativeStatus.NOT_MAPPED).status == Status.PARAM_INVALID


def test_progress_is_kept_where_it_means_something() -> None:
    late = error_from_native(NativeStatus.TIMEOUT, bytes_done=3, bytes_total=8)
    assert isinstance(late, errors.TransferError)
    assert (late.bytes_done, late.bytes_total) == (3, 8)
    assert not hasattr(error_from_native(NativeStatus.PEER_LOST, bytes_done=3), "bytes_done")


def test_failed_work_requests_say_what_it_means() -> None:
    late = error_from_native(-112, peer=3)
    assert type(late) is errors.TransportError
    assert (late.peer, late.transport) == (3, "verbs")
    assert "retry counter exceeded" in str(late)
    assert "rdma_timeout" in (late.hint or "")
    assert "remote access error" in str(error_from_native(-110))


@given(st.integers(-(2**31), 2**31 - 1))
def test_unknown_native_statuses_are_internal_errors(status: int) -> None:
    error = error_from_native(status, detail="d")
    if status in set(NATIVE):
        assert type(error) is EXPECTED[NativeStatus(status)]
    elif -121 <= status < -100:  # of work requests, whose numbers have gaps
        assert isinstance(error, errors.TransportError | errors.InternalError)
    else:
        assert isinstance(error, errors.InternalError)
        assert str(status) in str(error)

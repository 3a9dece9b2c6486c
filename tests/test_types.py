"""The frozen values: integers, dtypes, addresses, keys, descriptions, geometry, paths and events."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import types
from aiodatadist.errors import ArgumentError, ArgumentTypeError, CacheMismatch, Status
from aiodatadist.keys import NO_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from aiodatadist.types import (
    DTYPE_SIZES,
    Address,
    CacheAnnounced,
    CacheDesc,
    CacheGone,
    ClusterInfo,
    Geometry,
    LinkPath,
    LinkState,
    LinkStateChanged,
    Notification,
    Placement,
    Role,
    TransferEnded,
    as_integer,
    dtype_name,
    parse_address,
)

U64 = st.integers(0, 2**64 - 1)
NO_INTEGERS: list[Any] = [None, "1", 1.0, b"1", [1], True, False, np.True_, np.float32(1), object()]


class Index:
    """Nothing but an integer."""

    def __index__(self) -> int:
        return 5


# --- integers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, np.int8(5), np.uint64(5), Index()])
def test_integers_by_index(value: Any) -> None:
    assert as_integer(value, "x") == 5
    assert type(as_integer(value, "x")) is int
    assert BlocksCacheKey(value, value) == (5, 5)
    assert ClusterInfo(value).cluster_id == 5


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_no_integers(value: Any) -> None:
    for call in (
        lambda: as_integer(value, "x"),
        lambda: BlocksCacheKey(value),
        lambda: BlocksCacheKey(1, value),
        lambda: CacheKeyByIdAndIndex(1, value),
        lambda: CacheKey(1, 2, value),
        lambda: ClusterInfo(value),
        lambda: CacheDesc(value, (4,), "int8"),
        lambda: CacheDesc(1, (value,), "int8"),
    ):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert caught.value.hint


@pytest.mark.parametrize("value", [-1, 2**64, -(2**70), 10**400])
def test_integers_out_of_range(value: int) -> None:
    for call in (
        lambda: as_integer(value, "x"),
        lambda: BlocksCacheKey(value),
        lambda: BlocksCacheKey(1, value),
        lambda: CacheKeyByIdAndIndex(value, 1),
        lambda: CacheKeyByIdAndIndex(1, value),
        lambda: CacheKeyByIdAndIndex(1, 1, value),
        lambda: CacheKey(value),
        lambda: CacheKey(1, prefix_id=value),
        lambda: ClusterInfo(value),
    ):
        with pytest.raises(ArgumentError, match=str(value)) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert ".." in str(caught.value)


# --- dtypes ---------------------------------------------------------------------------------------


def test_dtype_sizes_agree_with_numpy() -> None:
    for name, size in DTYPE_SIZES.items():
        if not name.startswith(("bfloat", "float8")):
            assert np.dtype(name).itemsize == size
        assert dtype_name(name) == name


@pytest.mark.parametrize(
    ("given_dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("double", "float64"),
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (np.bool_, "bool"),
        (bool, "bool"),
    ],
)
def test_dtype_names(given_dtype: object, name: str) -> None:
    assert dtype_name(given_dtype) == name


@pytest.mark.parametrize(
    "bad", ["float", "complex64", "float8_e4m3", "", "x" * 1000, np.dtype("c8"), float, np.dtype("O")]
)
def test_unknown_dtypes(bad: object) -> None:
    with pytest.raises(ArgumentError, match="not supported"):
        dtype_name(bad)


def test_foreign_byte_order() -> None:
    foreign = ">" if sys.byteorder == "little" else "<"
    with pytest.raises(ArgumentError, match="byte order"):
        dtype_name(np.dtype(f"{foreign}f4"))


@pytest.mark.parametrize("bad", [None, 4, [], b"int8"])
def test_no_dtypes(bad: object) -> None:
    with pytest.raises(ArgumentTypeError):
        dtype_name(bad)


@pytest.mark.torch
def test_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPE_SIZES.items():
        dtype = getattr(torch, name)
        assert dtype_name(dtype) == name
        assert torch.empty(1, dtype=dtype).element_size() == size
    with pytest.raises(ArgumentError):
        dtype_name(torch.complex64)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:26000", "10.0.0.1", 26000),
        ("[::1]:1", "::1", 1),
        ("[fe80::1%eth0]:26000", "fe80::1%eth0", 26000),
        ("[2001:DB8:0:0:0:0:0:1]:5", "2001:db8::1", 5),
        ("node-1.rack_2.example:65535", "node-1.rack_2.example", 65535),
        ("x" * 63 + ".example.:1", "x" * 63 + ".example.", 1),
        (" localhost:7 ", "localhost", 7),
        (("::1", 9), "::1", 9),
        (("node", np.uint16(9)), "node", 9),
    ],
)
def test_addresses(text: Any, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == (host, port)
    assert parse_address(str(address)) == address
    assert ClusterInfo(1, text).addresses == (address,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":1",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+1",
        "host:1_0",
        "host:\N{ARABIC-INDIC DIGIT THREE}",
        "ho st:1",
        "host/x:1",
        "http://host:1",
        "::1:26000",
        "[::1]",
        "[::g]:1",
        "[10.0.0.1]:1",
        "1:1",
        "127.1:1",
        "10.0.0.256:1",
        "010.0.0.1:1",
        "-host:1",
        "h\N{LATIN SMALL LETTER O WITH DIAERESIS}st:1",
        "x" * 300 + ":1",
        "x" * 64 + ":1",
        "a..b:1",
        ".host:1",
        "host..:1",
        "host-:1",
        "host:1\n:2",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        ClusterInfo(1, text)
    assert caught.value.hint


@pytest.mark.parametrize("bad", [5, b"host:1", {"host": 1}, ("host",), ("host", 1.0), (1, 1), ["h:1", None]])
def test_addresses_of_wrong_type(bad: Any) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentError)):
        ClusterInfo(1, bad)


def test_port_zero_only_to_listen() -> None:
    assert parse_address("0.0.0.0:0", port_zero=True) == ("0.0.0.0", 0)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ArgumentError:
        return
    assert parse_address(str(address)) == address


def test_cluster_info() -> None:
    assert ClusterInfo(1).addresses == ()
    several = ClusterInfo(1, ["10.0.0.1:1", "[::1]:2", ("node", 3)])
    assert several.addresses == (Address("10.0.0.1", 1), Address("::1", 2), Address("node", 3))
    assert ClusterInfo(1, "10.0.0.1:1") == ClusterInfo(1, ("10.0.0.1", 1)) != ClusterInfo(2, "10.0.0.1:1")
    with pytest.raises(ArgumentError, match="empty"):
        ClusterInfo(1, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        several.cluster_id = 2  # type: ignore[misc]


# --- keys -----------------------------------------------------------------------------------------


@given(U64, U64, U64)
def test_keys_of_different_kinds_are_never_equal(a: int, b: int, c: int) -> None:
    keys: list[tuple[int, ...]] = [
        BlocksCacheKey(a, b),
        CacheKey(a, b),
        CacheKey(a, b, c),
        CacheKey(a, prefix_id=b),
    ]
    if 1 <= b < 2**63:
        keys += [CacheKeyByIdAndIndex(a, b), CacheKeyByIdAndIndex(a, b, c % 2**32)]
    for one in keys:
        for other in keys:
            if type(one) is not type(other):
                assert one != other
    table = {key: type(key) for key in keys}
    assert all(table[key] is type(key) for key in keys)


@given(U64, U64)
def test_keys_compare_by_value(a: int, b: int) -> None:
    assert BlocksCacheKey(a, b) == BlocksCacheKey(a, b)
    assert hash(BlocksCacheKey(a, b)) == hash(BlocksCacheKey(np.uint64(a), np.uint64(b)))
    assert BlocksCacheKey(a).model_id == 0
    assert (BlocksCacheKey(a, b) == BlocksCacheKey(b, a)) is (a == b)


def test_keys_hash_and_compare_at_c_speed() -> None:
    for kind in (BlocksCacheKey, CacheKeyByIdAndIndex, CacheKey):
        assert kind.__hash__ is tuple.__hash__
        assert kind.__eq__ is tuple.__eq__
        assert not hasattr(kind(1, 1), "__dict__")


def test_key_fields() -> None:
    by_id = CacheKeyByIdAndIndex(1, 2)
    assert (by_id.cluster_id, by_id.cache_id, by_id.batch_index) == (1, 2, 0)
    key = CacheKey(1, 2, 3)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 2, 3, NO_ID)
    assert not key.is_placeholder
    assert CacheKey(1).is_placeholder
    assert not CacheKey(1, prefix_id=0).is_placeholder
    assert repr(BlocksCacheKey(1)) == "BlocksCacheKey(cluster_id=1, model_id=0)"
    assert repr(key) == "CacheKey(cluster_id=1, req_id=2, model_id=3)"
    assert repr(CacheKey(1, prefix_id=4)) == "CacheKey(cluster_id=1, model_id=0, prefix_id=4)"
    assert repr(CacheKey(1)) == "CacheKey(cluster_id=1, model_id=0)"


def test_cache_ids_begin_at_one() -> None:
    for cache_id in (0, -1, 2**63):
        with pytest.raises(ArgumentError, match="cache_id"):
            CacheKeyByIdAndIndex(1, cache_id)


def test_replaced_keys_are_checked() -> None:
    assert BlocksCacheKey(1)._replace(model_id=4) == BlocksCacheKey(1, 4)
    assert type(CacheKey(1)._replace(req_id=4)) is CacheKey
    with pytest.raises(ArgumentError):
        CacheKeyByIdAndIndex(1, 1)._replace(batch_index=2**32)
    with pytest.raises(ArgumentError):
        BlocksCacheKey._make([1, -1])


# --- descriptions and geometry --------------------------------------------------------------------


def test_cache_desc() -> None:
    desc = CacheDesc(2, [8, np.int64(16), 4], "bf16")
    assert desc.shape == (8, 16, 4)
    assert (desc.num_blocks, desc.itemsize, desc.block_bytes, desc.tensor_bytes) == (8, 2, 128, 1024)
    assert desc.placement is Placement.HOST
    assert CacheDesc(2, (8, 16, 4), "bf16", stride=256).tensor_bytes == 7 * 256 + 128
    assert dataclasses.replace(desc, shape=(4, 16, 4)).num_blocks == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tensors": 0},
        {"num_tensors": 2**32},
        {"shape": ()},
        {"shape": (0,)},
        {"shape": (4, -1)},
        {"shape": (1,) * 32},
        {"shape": (2**62, 2)},
        {"shape": (2**40, 2**40)},
        {"dtype": "float7"},
        {"stride": 15},
        {"stride": 2**63},
        {"stride": 2**62},
        {"placement": 7},
    ],
)
def test_bad_descriptions(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        CacheDesc(**{"num_tensors": 1, "shape": (4, 4), "dtype": "float32", **arguments})
    assert caught.value.hint


@pytest.mark.parametrize("shape", ["44", b"44", 4, None, (4, "4"), (4, 4.0)])
def test_shapes_of_wrong_type(shape: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        CacheDesc(1, shape, "float32")


shapes = st.lists(st.integers(1, 64), min_size=1, max_size=5).map(tuple)
dtypes = st.sampled_from(sorted(DTYPE_SIZES))


@given(shapes, dtypes, st.integers(1, 100), st.integers(0, 1000))
def test_geometry(shape: tuple[int, ...], dtype: str, num_tensors: int, gap: int) -> None:
    plain = Geometry.of(dtype, shape, num_tensors)
    assert plain.is_contiguous
    assert plain.num_blocks * plain.block_bytes == plain.tensor_bytes
    assert CacheDesc(num_tensors, shape, dtype).geometry() == plain
    wide = Geometry.of(dtype, shape, num_tensors, stride=plain.block_bytes + gap)
    assert wide.tensor_bytes == plain.tensor_bytes + (shape[0] - 1) * gap
    assert wide.is_contiguous is (gap == 0)
    plain.require_match(wide)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wide), type=Geometry) == wide


@pytest.mark.parametrize(
    "change", [{"itemsize": 8}, {"num_blocks": 7}, {"block_bytes": 12}, {"stride": 15}, {"num_tensors": 0}]
)
def test_a_geometry_that_contradicts_itself(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        dataclasses.replace(Geometry.of("float32", (8, 4), 2), **change)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (Geometry.of("bfloat16", (8, 4, 4), 2), "dtype"),
        (Geometry.of("float16", (8, 4, 5), 2), "block_shape"),
        (Geometry.of("float16", (8, 16), 2), "block_shape"),
        (Geometry.of("float16", (8, 4, 4), 3), "num_tensors"),
    ],
)
def test_mismatch_names_the_field(other: Geometry, field: str) -> None:
    mine = Geometry.of("float16", (8, 4, 4), 2)
    with pytest.raises(CacheMismatch, match=field) as caught:
        mine.require_match(other, peer=9)
    assert caught.value.field == field
    assert (caught.value.local, caught.value.remote) == (getattr(mine, field), getattr(other, field))
    assert caught.value.peer == 9
    assert caught.value.hint


def test_match_of_chosen_fields() -> None:
    Geometry.of("float16", (8, 4), 2).require_match(Geometry.of("float16", (9, 4), 5), ("dtype", "block_shape"))


# --- the rest -------------------------------------------------------------------------------------


def test_roles() -> None:
    assert [(role.name, role.value) for role in Role] == [("PROMPT", 1), ("DECODER", 2), ("MIX", 3)]
    assert Role["PREFILL"] is Role.PROMPT
    assert Role["DECODE"] is Role.DECODER


def test_link_path_says_why() -> None:
    path = LinkPath("tcp", {"ordinary": "tcp"}, {"shm": "another host"})
    assert str(path) == "tcp (ordinary: tcp; not shm: another host)"
    assert str(LinkPath("tcp")) == "tcp"
    with pytest.raises(TypeError):
        path.reasons["x"] = "y"  # type: ignore[index]
    reasons = {"shm": "a"}
    kept = LinkPath("tcp", {}, reasons)
    reasons["shm"] = "b"
    assert kept.reasons["shm"] == "a"


VALUES: list[Any] = [
    BlocksCacheKey(1, 2),
    CacheKeyByIdAndIndex(1, 2, 3),
    CacheKey(1, prefix_id=2),
    ClusterInfo(1),
    ClusterInfo(1, ["a:1", "b:2"]),
    CacheDesc(1, (4, 4), "fp8", stride=8),
    Geometry.of("float16", (8, 4), 2),
    LinkPath("shm", {"library": "mapped"}, {"tcp": "slower"}),
    LinkStateChanged(1, LinkState.LINKING, LinkState.READY, epoch=2),
    CacheAnnounced(1, 2, BlocksCacheKey(1), Geometry.of("float16", (8, 4), 2)),
    CacheGone(1, 2),
    TransferEnded(1, 2, 3, "push", Status.TIMEOUT, 4),
    Notification(1, b"done"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_values(value: Any) -> None:
    for twin in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert twin == value
        assert type(twin) is type(value)
        assert hash(twin) == hash(value)
        assert repr(twin) == repr(value)
    assert not hasattr(value, "__dict__")


def test_every_public_name_exists() -> None:
    assert all(hasattr(types, name) for name in types.__all__)

"""Maps of arrays for the tensor memory accelerator: what they describe, and which arrays have none."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash import abi, plan, tensormap
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Packed
from cuflash.place import placed
from cuflash.problem import describe
from cuflash.schedules import order
from tests.cases import DTYPES, STRIDES
from tests.test_plan import call_of, contiguous, places

BOX_ROWS = 128


def map_of(name: str, call, array: np.ndarray | None = None) -> tensormap.TensorMap:
    """The map of an array of a call, or of another array in its place."""
    array = getattr(call, name) if array is None else array
    place = placed(array, array.shape, array.__array_interface__["data"][0] // 16 * 16)  # of an aligned allocation
    return tensormap.describe(name, call.problem, place, BOX_ROWS)


def zeros(*shape: int, dtype: str = "float16") -> np.ndarray:
    return np.zeros(shape, DTYPES[dtype])


def call(**options):
    """2 entries, 4 and 2 heads, 33 queries, 45 keys, 24 and 40 columns."""
    return describe(zeros(2, 4, 33, 24), zeros(2, 2, 45, 24), zeros(2, 2, 45, 40), **options)


# ---- what a map says -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("q", (24, 33, 4, 2)),
        ("k", (24, 45, 2, 2)),
        ("v", (40, 45, 2, 2)),
        ("out", (40, 33, 4, 2)),
        ("dout", (40, 33, 4, 2)),
        ("dk", (24, 45, 2, 2)),
        ("dv", (40, 45, 2, 2)),
    ],
)
def test_sizes_are_those_of_the_array(name, sizes):
    columns, rows, heads, batch = sizes
    described = map_of(name, call(), zeros(batch, heads, rows, columns))
    assert described.sizes == sizes
    assert described.strides == (2 * columns, 2 * columns * rows, 2 * columns * rows * heads)
    assert described.box == (64, BOX_ROWS, 1, 1)
    assert described.array == name


@pytest.mark.parametrize(("dtype", "element"), [("float16", 6), ("bfloat16", 9)])
def test_element(dtype, element):
    x = zeros(1, 2, 8, 16, dtype=dtype)
    assert map_of("q", describe(x, x, x)).element == element


def test_strides_are_bytes_between_rows_heads_and_entries():
    fused = zeros(2, 33, 3, 4, 24)  # entry, row, one of q k v, head
    q, k, v = (fused[:, :, i].swapaxes(1, 2) for i in range(3))
    for name, array in {"q": q, "k": k, "v": v}.items():
        described = map_of(name, describe(q, k, v), array)
        assert described.sizes == (24, 33, 4, 2)
        assert described.strides == (2 * 24 * 4 * 3, 2 * 24, 2 * 24 * 4 * 3 * 33)


def test_batch_axes_are_one():
    x = zeros(2, 1, 3, 4, 8, 16)
    assert map_of("q", describe(x, x, x)).sizes == (16, 8, 4, 6)
    assert map_of("q", describe(x, x, x)).strides[2] == 2 * 4 * 8 * 16
    one = zeros(4, 8, 16)
    assert map_of("q", describe(one, one, one)).sizes == (16, 8, 4, 1)


def test_strides_of_axes_of_length_1_do_not_matter():
    x = zeros(1, 1, 8, 16)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (14, -6, *x.strides[2:]))
    with pytest.raises(UnsupportedError):
        map_of("q", describe(odd, odd, odd))  # 14 and 6 are no multiples of 16
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (0, -16, *x.strides[2:]))
    assert map_of("q", describe(odd, odd, odd)).strides == (32, 16, 16)


def test_rows_of_one_query_do_not_matter():
    x = zeros(2, 4, 1, 16)
    assert map_of("q", describe(x, x, x)).strides[0] == 16


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dk"])
def test_rows_of_a_packed_sequence(name):
    """A row past a sequence's end is outside, every other at its place: what the kernels' coordinates reach."""
    totals, heads, columns = {"q": 33, "out": 33}.get(name, 45), {"q": 4, "out": 4}.get(name, 2), 24
    q, k = zeros(33, 4, columns), zeros(45, 2, columns)
    packed = Packed(np.array([0, 33], np.int32), np.array([0, 45], np.int32), 1)
    made = describe(q, k, k, packed=packed, layout="bshd")
    described = map_of(name, made, zeros(totals, heads, columns).swapaxes(0, 1))
    row, head = 2 * columns * heads, 2 * columns
    assert described.sizes == (columns, totals, heads, totals + 1)
    assert described.strides == (row, head, row)
    for begin, end in ((0, totals), (0, 7), (7, 7), (7, 20), (20, totals), (totals, totals)):
        for at in range(end - begin + 3):
            coordinate = totals - (end - begin) + at  # attention/index.cuh, `described`
            assert end < described.sizes[3]
            if 0 <= at < end - begin:
                assert coordinate < described.sizes[1]
                assert described.origin + coordinate * row + end * row == (begin + at) * row
            else:
                assert coordinate >= described.sizes[1]


# ---- what has none ---------------------------------------------------------------------------------------------------
ALIGNMENT = "rows of q are not contiguous, or do not start at multiples of 16 bytes"
REFUSED = {
    "every second": ALIGNMENT,
    "last axis first": ALIGNMENT,
    "padded": ALIGNMENT,
    "reversed": ALIGNMENT,
    "stride 0": "q has a stride of 0 bytes along its heads axis; TMA takes positive ones below 2",
}


@pytest.mark.parametrize("strides", REFUSED)
def test_strides_without_a_map(strides):
    x = zeros(2, 4, 33, 24)
    with pytest.raises(UnsupportedError, match=REFUSED[strides]):
        map_of("q", call(), STRIDES[strides](x))


@pytest.mark.parametrize(("axis", "name"), [(0, "batch"), (1, "heads"), (2, "seq")])
def test_backward_axes_have_no_map(axis, name):
    x = np.flip(zeros(2, 4, 33, 24), axis)
    with pytest.raises(UnsupportedError, match=rf"q has a stride of -\d+ bytes along its {name} axis"):
        map_of("q", call(), x)


def test_strides_beyond_the_hardware():
    made, place = call(), contiguous((2, 4, 33, 24), 2)
    far = replace(place, strides=(1 << 40, *place.strides[1:]))
    with pytest.raises(UnsupportedError, match="q has a stride of 1099511627776 bytes along its batch axis"):
        tensormap.describe("q", made.problem, far, BOX_ROWS)
    near = replace(place, strides=((1 << 40) - 16, *place.strides[1:]))
    assert tensormap.describe("q", made.problem, near, BOX_ROWS).strides[2] == (1 << 40) - 16


@pytest.mark.parametrize("misalignment", [2, 8])
def test_an_address_between_pieces_has_no_map(misalignment):
    with pytest.raises(UnsupportedError, match=ALIGNMENT):
        tensormap.describe("q", call().problem, contiguous((2, 4, 33, 24), 2, misalignment), BOX_ROWS)


def test_rows_that_are_no_whole_pieces_have_no_map():
    x = zeros(2, 4, 33, 12)
    with pytest.raises(UnsupportedError, match=ALIGNMENT):
        map_of("q", describe(x, x, x))
    wide = zeros(2, 4, 33, 16)[..., :12]
    assert map_of("q", describe(wide, wide, wide)).sizes[0] == 12


def test_batch_axes_that_are_not_one_have_no_map():
    x = zeros(2, 3, 4, 8, 16)
    crossed = zeros(3, 2, 4, 8, 16).swapaxes(0, 1)
    with pytest.raises(UnsupportedError, match=r"the batch axes \(2, 3\) of q cannot be merged into one"):
        map_of("q", describe(x, x, x), crossed)


# ---- the record ------------------------------------------------------------------------------------------------------
def encoded(tensor_map: tensormap.TensorMap, address: int) -> bytes:
    """What stands for the driver's encoding: the array's name and its address."""
    return f"{tensor_map.array} at {address}".encode().ljust(abi.MAP_BYTES, b".")


def test_maps_lie_in_the_record():
    """Each at its place, aligned, for the array's own address; nothing else in the record moves."""
    made = call_of(causal=True)
    planned = plan.plan_forward(made.problem, described_device(90), places(made), "wgmma")
    (step,) = planned.steps
    record = abi.record("forward", step.variant.modifiers, "float32", step.variant.maps)
    addresses = {name: 4096 * i for i, name in enumerate(("q", "k", "v", "out"), 1)}
    packed = np.frombuffer(planned.arguments(addresses, encoded), record)[0]
    assert step.argument_bytes == record.itemsize
    assert step.variant.maps == ("q", "k", "v", "out")
    for name, address in addresses.items():
        assert packed[f"{name}_map"].tobytes().rstrip(b".") == f"{name} at {address}".encode()
        assert record.fields[f"{name}_map"][1] % abi.MAP_ALIGNMENT == 0
    plain = abi.record("forward", step.variant.modifiers, "float32")
    for name in plain.names:
        assert record.fields[name][1] == plain.fields[name][1]
    other = plan.plan_forward(made.problem, described_device(90), places(made), "mma")
    for name in ("seq_q", "scale", "causal_diagonal", "batch_sizes"):
        np.testing.assert_array_equal(packed[name], np.frombuffer(other.arguments({}), plain)[0][name])
    assert packed["section"] == order.section(made.problem, 0)


def test_boxes_are_those_of_the_tile():
    planned = plan.plan_forward(call_of().problem, described_device(90), places(call_of()), "wgmma")
    (step,) = planned.steps
    boxes = {tensor_map.array: tensor_map.box_rows for tensor_map in planned.maps}
    assert boxes == {"q": step.config.block_q, "k": step.config.block_k, "v": step.config.block_k, "out": 64}
    assert max(boxes.values()) <= 256, "TMA copies at most 256 rows at once"


def test_a_map_is_encoded_once_for_an_address():
    made = call()
    planned = plan.plan_forward.__wrapped__(made.problem, described_device(90), places(made), "wgmma")
    encoded = []

    def encode(tensor_map, address):
        encoded.append((tensor_map.array, address))
        return bytes([len(encoded)]) * abi.MAP_BYTES

    pointers = {"q": 16, "k": 32, "v": 48, "out": 64}
    first = planned.arguments(pointers, encode)
    assert planned.arguments(pointers, encode) == first
    assert encoded == list(pointers.items())
    other = planned.arguments({**pointers, "k": 1 << 20}, encode)
    assert encoded[4:] == [("k", 1 << 20)]
    at = planned.offsets["k_map"]
    assert first[at : at + abi.MAP_BYTES] == bytes([2]) * abi.MAP_BYTES
    assert other[at : at + abi.MAP_BYTES] == bytes([5]) * abi.MAP_BYTES


def test_a_map_that_the_driver_refuses(monkeypatch):
    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments):  # noqa: N802 - the driver's name
            return 1

    monkeypatch.setattr(tensormap, "_driver", Driver)
    with pytest.raises(UnsupportedError, match=r"the driver refuses a tensor map.*backend='mma'"):
        tensormap.encode(map_of("q", call()), 2 << 20)

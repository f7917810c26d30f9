"""Plans: how the batch is walked, what is aligned, what fits the grid, and what a plan depends on."""

import ctypes
import importlib
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from cuflash import abi, plan
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.gradients import gradient_sums
from cuflash.modifiers import ALiBi, BlockMask, Documents, KeyLengths
from cuflash.place import Placed, merged_batch, placed
from cuflash.problem import MAX_SEQ, Call, describe
from cuflash.schedules import order, wgmma
from tests.cases import DTYPES, STRIDES
from tests.test_errors import device_array

DEVICE = described_device(100)


def call_of(shape_q=(2, 4, 33, 64), seq_k=45, heads_k=2, dtype="float16", head_dim_v=None, **options) -> Call:
    """A call whose arrays are views of one number: shapes may be as large as they like."""
    *batch, _, _, head_dim = shape_q
    number = np.zeros((), DTYPES[dtype])
    shapes = (
        shape_q,
        (*batch, heads_k, seq_k, head_dim),
        (*batch, heads_k, seq_k, head_dim_v or head_dim),
    )
    return describe(*(np.broadcast_to(number, shape) for shape in shapes), **options)


def contiguous(shape: tuple[int, ...], itemsize: int, misalignment: int = 0) -> Placed:
    strides = [itemsize]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    return Placed(tuple(reversed(strides)), itemsize, misalignment)


def places(call: Call, direction: str = "forward", **others: Placed) -> tuple[tuple[str, Placed], ...]:
    """Places of contiguous arrays, but for those that are given."""
    problem = call.problem
    itemsize = call.q.dtype.itemsize
    real = np.dtype(problem.accumulator).itemsize
    found = {name: contiguous(getattr(call, name).shape, itemsize) for name in ("q", "k", "v")}
    found["out"] = contiguous(problem.out_shape, itemsize)
    found["lse"] = contiguous(problem.lse_shape, real)
    if direction == "backward":
        found["dout"] = found["out"]
        found.update({f"d{name}": found[name] for name in ("q", "k", "v")})
    for name, x in call.operands.items():
        own = contiguous(x.shape, x.dtype.itemsize)
        strides = tuple(0 if n == 1 else s for n, s in zip(x.shape, own.strides, strict=True))
        found[name] = replace(own, strides=strides)
        if direction == "backward" and name == "bias":
            found["dbias"] = replace(found[name], strides=tuple(s // itemsize * real for s in strides), itemsize=real)
    return tuple({**found, **others}.items())


def forward(call: Call, device=DEVICE, **others: Placed) -> plan.Plan:
    return plan.plan_forward(call.problem, device, places(call, **others))


def backward(call: Call, device=DEVICE, deterministic=False, **others: Placed) -> plan.Plan:
    return plan.plan_backward(call.problem, device, places(call, "backward", **others), deterministic)


def record_of(made: plan.Plan, **pointers: int) -> np.void:
    """The packed arguments, to be read by field name."""
    direction = "forward" if len(made.steps) == 1 else "backward"
    names = made.steps[0].variant.modifiers
    return np.frombuffer(made.arguments(pointers), abi.record(direction, names, made.problem.accumulator))[0]


# ---- batch axes ------------------------------------------------------------------------------------------------------
def offsets(sizes, strides) -> np.ndarray:
    """Offset of every batch entry, in the order in which the entries are counted."""
    at = np.zeros(tuple(sizes), np.int64)
    for index in np.ndindex(*sizes):
        at[index] = sum(i * s for i, s in zip(index, strides, strict=True))
    return at.ravel()


def test_merged_batch_walks_the_same_entries():
    rng = np.random.default_rng(0)
    merged_somewhere = refused = 0
    for _ in range(1500):
        axes = int(rng.integers(0, 6))
        sizes = tuple(int(n) for n in rng.integers(1, 4, axes))
        strides = {name: random_strides(rng, sizes) for name in "abc"[: rng.integers(1, 4)]}
        try:
            got_sizes, got = merged_batch(sizes, strides)
        except UnsupportedError:
            refused += 1
            assert fewest_axes(sizes, strides) > abi.BATCH_AXES
            continue
        assert len(got_sizes) == abi.BATCH_AXES
        assert np.prod(got_sizes) == np.prod(sizes)
        for name in strides:
            np.testing.assert_array_equal(offsets(got_sizes, got[name]), offsets(sizes, strides[name]))
        merged_somewhere += sum(n > 1 for n in got_sizes) < sum(n > 1 for n in sizes)
    assert merged_somewhere > 50, "the strides are too random: nothing was merged"
    assert refused > 5, "nothing was refused"


def random_strides(rng: np.random.Generator, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous, partly broadcast or reordered array."""
    strides, step = [], int(rng.integers(1, 4))
    for n in reversed(sizes):
        strides.append(step)
        step *= n * (1 if rng.random() < 0.85 else 2)
    strides.reverse()
    kind = rng.random()
    if kind < 0.2:
        strides = [0] * len(sizes)
    elif kind < 0.3 and sizes:
        strides[int(rng.integers(len(sizes)))] = 0
    elif kind < 0.4:
        strides = [-s for s in strides]
    return tuple(strides)


def fewest_axes(sizes: tuple[int, ...], strides: dict[str, tuple[int, ...]]) -> int:
    """Axes that are left when every two neighbours that can be merged are."""
    kept = [axis for axis, n in enumerate(sizes) if n > 1]
    cuts = sum(any(strides[n][a] != strides[n][b] * sizes[b] for n in strides) for a, b in pairwise(kept))
    return cuts + 1 if kept else 0


def test_refused_batch_names_the_remedy():
    sizes = (2, 2, 2, 2)
    with pytest.raises(UnsupportedError, match="contiguous"):
        merged_batch(sizes, {"q": (8, 4, 2, 1), "k": (1, 2, 4, 8)})


def test_broadcast_operands_keep_stride_0():
    """An operand without batch axes must not stop the others from being merged into one."""
    call = call_of((2, 3, 2, 2, 4, 33, 64), mask=np.ones((33, 45), bool))
    record = record_of(forward(call))
    assert record["batch_sizes"].tolist() == [1, 1, 24]
    assert record["mask"]["batch"].tolist() == [0, 0, 0]
    assert record["q"]["batch"].tolist() == [0, 0, 4 * 33 * 64]


# ---- places ----------------------------------------------------------------------------------------------------------
ROWS = np.zeros((2, 3, 8, 16), np.float16)


@pytest.mark.parametrize(
    ("strides", "misalignment", "aligned"),
    [
        ((768, 256, 32, 2), 0, True),
        ((0, 0, 0, 2), 0, True),
        ((-768, -256, -32, 2), 0, True),
        ((768, 256, 32, 2), 2, False),
        ((768, 256, 32, 2), 8, False),
        ((768, 256, 34, 2), 0, False),
        ((768, 250, 32, 2), 0, False),
        ((776, 256, 32, 2), 0, False),
        ((768, 256, 32, -2), 0, False),
        ((768, 256, 64, 4), 0, False),
        ((768, 256, 2, 16), 0, False),
    ],
    ids=str,
)
def test_alignment(strides, misalignment, aligned):
    place = Placed(strides, 2, misalignment)
    assert place.aligned(16, 4) is aligned
    call = call_of((2, 3, 8, 16), seq_k=8, heads_k=3)
    for name in ("q", "k", "v"):
        assert forward(call, **{name: place}).steps[0].config.aligned is aligned
    for name in ("q", "k", "v", "dout"):
        assert backward(call, **{name: place}).steps[1].config.aligned is aligned
    for name in ("out", "dout"):
        assert backward(call, **{name: place}).steps[0].config.aligned is aligned
    assert forward(call, out=place).steps[0].config.aligned


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors(dtype):
    """Results are written 16 bytes at a time where their rows begin at multiples of 16."""
    for head_dim, misaligned in product((8, 7), (0, 1)):
        call = call_of((2, 3, 8, head_dim), seq_k=8, heads_k=3, dtype=dtype)
        itemsize = call.q.dtype.itemsize
        place = contiguous(call.q.shape, itemsize, misaligned * itemsize)
        expected = int(head_dim == 8 and not misaligned)
        assert record_of(forward(call, out=place))["out_vectors"] == expected
        for name in ("dq", "dk", "dv"):
            record = record_of(backward(call, **{name: place}))
            assert record[f"{name}_vectors"] == expected
            assert sum(int(record[f"{n}_vectors"]) for n in ("dq", "dk", "dv")) == expected + 2 * (head_dim == 8)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_strides_of_arrays(strides, dtype):
    """Element (b, h, row, column) lies where the record says."""
    x = STRIDES[strides](np.arange(2 * 3 * 5 * 8).reshape(2, 3, 5, 8).astype(DTYPES[dtype]))
    place = placed(x, x.shape, x.__array_interface__["data"][0])
    call = describe(x, x, x)
    view = record_of(forward(call, q=place))["q"]
    low = np.lib.array_utils.byte_bounds(x)[0]
    base = (x.__array_interface__["data"][0] - low) // x.itemsize
    for b, h, row, column in np.ndindex(*x.shape):
        at = b * view["batch"][2] + h * view["head"] + row * view["row"] + column * view["column"]
        shifted = np.ndarray((), x.dtype, memory_of(x), int(base + at) * x.itemsize)
        assert shifted == x[b, h, row, column]


def memory_of(x: np.ndarray) -> ctypes.Array:
    """All bytes between the first and the last element."""
    low, high = np.lib.array_utils.byte_bounds(x)
    return (ctypes.c_ubyte * (high - low)).from_address(low)


@pytest.mark.parametrize(
    "shape", [(2, 4, 33, 45), (1, 4, 33, 45), (33, 45), (33, 1), (45,), (1, 1, 1, 1), (2, 1, 1, 45)]
)
def test_operands_are_broadcast_by_stride_0(shape):
    bias = np.arange(np.prod(shape)).reshape(shape).astype(np.float16)
    call = call_of(bias=bias)
    full = np.broadcast_to(bias, call.problem.score_shape)
    at = plan.places_of(call.problem, {"bias": call.operands["bias"]})
    view = record_of(forward(call, bias=dict(at)["bias"]))["bias"]
    index = (1, 3, 30, 41)
    offset = 1 * view["batch"][2] + 3 * view["head"] + 30 * view["row"] + 41 * view["column"]
    assert np.ascontiguousarray(bias).ravel()[offset] == full[index]


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_addresses_go_where_they_belong():
    call = call_of(bias=np.zeros((33, 45), np.float16), causal=True)
    made = backward(call)
    names = list(made.offsets)
    record = record_of(made, **{name: 1000 + i for i, name in enumerate(names)})
    for i, name in enumerate(names):
        assert int(record[name]["data"] if record[name].dtype.names else record[name]) == 1000 + i
    assert int(record_of(made)["dlse"]["data"]) == 0, "an array that is not given is a null pointer"
    assert set(names) >= {"q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "bias", "dbias", "statistics"}


def test_scalars():
    call = call_of((2, 6, 33, 24), heads_k=2, head_dim_v=40, scale=0.25, softcap=3.0, window=(5, 2), causal=True)
    record = record_of(forward(call))
    for name, value in {
        "batch_size": 2, "heads_q": 6, "heads_k": 2, "group": 3, "seq_q": 33, "seq_k": 45, "head_dim": 24, "head_dim_v": 40,
        "causal_diagonal": 12, "window_first": 7, "window_last": 14, "scale": 0.25, "softcap": 3.0,
    }.items():  # fmt: skip
        assert record[name] == value, name
    assert record["softmax_scale"] == np.float32(1 / np.log(2)), "a score modifier sees scores, not products"
    assert record_of(forward(call_of(scale=0.25)))["softmax_scale"] == np.float32(0.25 / np.log(2))


@pytest.mark.parametrize(("scale", "chain"), [(1.0, ()), (-1.0, ("scaled",)), (0.0, ("scaled",))])
def test_products_are_scores_while_the_scale_is_positive(scale, chain):
    assert forward(call_of(scale=scale)).steps[0].variant.modifiers == chain
    assert forward(call_of(scale=scale, softcap=1.0)).steps[0].variant.modifiers == ("softcap",)


# ---- the variant and the plan ----------------------------------------------------------------------------------------
OPERANDS = (KeyLengths(np.array([1, 2], np.int32)), ALiBi(np.ones(4, np.float32)))
OPTIONS = {
    "plain": lambda sq, sk: {},
    "causal": lambda sq, sk: {"causal": True},
    "window": lambda sq, sk: {"window": (3, 5), "softcap": 2.0},
    "mask": lambda sq, sk: {"mask": np.ones((sq, sk), bool)},
    "bias": lambda sq, sk: {"bias": np.zeros((sk,), np.float16), "modifiers": OPERANDS},
    "sparse": lambda sq, sk: {
        "modifiers": (
            Documents(np.zeros(sq, np.int32), np.zeros(sk, np.int32)),
            BlockMask(np.ones((-(-sq // 64), -(-sk // 64)), bool), 64),
        )
    },
}
SHORT = 64  # queries: fewer fill no large tile


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", [80, 86, 90])
def test_lengths_do_not_change_the_variant(option, dtype, arch):
    """A new length plans anew and compiles nothing, but on Hopper from certain lengths on."""
    device = described_device(arch)
    for few in (False, True):
        forwards, backwards = set(), set()
        for seq_q, seq_k in product((1, 2, 33, SHORT) if few else (SHORT + 1, 100, 777, 8192), (1, 64, 200, 5000)):
            options = OPTIONS[option](seq_q, seq_k)
            if "bias" in options:
                options["bias"] = options["bias"].astype(DTYPES[dtype])
            call = call_of((2, 4, seq_q, 64), seq_k=seq_k, dtype=dtype, **options)
            forwards.add(tuple(s.variant for s in forward(call, device).steps))
            backwards.add(tuple(s.variant for s in backward(call, device).steps))
        # Hopper's forward has one tile for few queries, and others for few keys and for many; blocks of its backward stay where
        # a tile of keys has few steps
        assert len(forwards) <= (3 if arch == 90 else 1)
        assert len(backwards) <= (2 if arch == 90 else 1)


def test_batch_heads_and_numbers_do_not_change_the_variant():
    first = forward(call_of((2, 4, 100, 64), scale=0.5, softcap=1.0, window=(3, 5))).steps[0].variant
    second = forward(call_of((7, 3, 8, 100, 64), heads_k=8, scale=2.0, softcap=9.0, window=(0, None))).steps[0].variant
    assert first == second


def test_same_problem_same_plan():
    one, two = call_of(causal=True), call_of(causal=True)
    assert forward(one) is forward(two)
    assert backward(one) is backward(two)
    assert forward(one) is not forward(call_of())
    assert forward(one) is not forward(one, described_device(80))
    odd = contiguous(one.q.shape, 2, 2)
    assert forward(one) is not forward(one, q=odd)


def test_operands_values_are_no_part_of_the_plan():
    masks = (np.ones((33, 45), bool), np.zeros((33, 45), bool))
    first, second = (forward(call_of(mask=mask)) for mask in masks)
    assert first is second


# ---- limits ----------------------------------------------------------------------------------------------------------
def test_grid_holds_every_block_or_the_call_is_refused():
    fits = call_of((2**24, 1, 1, 16), seq_k=1, heads_k=1)
    assert forward(fits).steps[0].blocks == 2**24
    for large in ((2**30, 2, 1, 16), (2**31, 1, 1, 16)):
        for direction in (forward, backward):
            with pytest.raises(UnsupportedError, match="split the batch"):
                direction(call_of(large, seq_k=1, heads_k=large[1]))


def step_of(made: plan.Plan, kernel: str) -> plan.Step:
    return next(step for step in made.steps if step.variant.kernel == kernel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_cover_every_row(dtype):
    for seq_q, seq_k in product((1, 63, 64, 65, 300), (1, 63, 64, 65, 300)):
        call = call_of((2, 4, seq_q, 32), seq_k=seq_k, dtype=dtype)
        step = forward(call).main
        assert step.blocks * step.config.block_q >= 8 * seq_q
        assert (step.blocks - 8) * step.config.block_q < 8 * seq_q
        made = backward(call)
        delta, main = step_of(made, "backward_delta"), made.main
        assert main.blocks * main.config.block_k >= 4 * seq_k
        assert (main.blocks - 4) * main.config.block_k < 4 * seq_k
        assert delta.blocks * delta.config.threads * delta.config.passes // delta.config.lanes >= 8 * seq_q


@pytest.mark.parametrize("empty", [{"shape_q": (0, 4, 33, 64)}, {"shape_q": (2, 4, 0, 64)}, {"seq_k": 0}])
def test_nothing_to_do_launches_nothing_that_would_fail(empty):
    call = call_of(**empty)
    for step in (*forward(call).steps, *backward(call).steps):
        assert step.blocks >= 0
    if not empty.get("seq_k", 1):
        assert forward(call).steps[0].blocks, "the output is written: zeros"


@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace(dtype):
    call = call_of((3, 4, 70, 40), dtype=dtype)
    made = backward(call)
    delta, main, _ = made.steps
    rows = 3 * 4 * (-(-70 // main.config.block_q) * main.config.block_q)
    real = np.dtype(call.problem.accumulator).itemsize
    assert made.statistics_bytes == rows * 2 * real
    assert made.dq_sum_bytes == rows * real * main.config.head_dim
    assert main.config.head_dim >= 40
    assert delta.config.block_q == main.config.block_q
    assert record_of(made)["dq_width"] == main.config.head_dim
    assert record_of(made)["rows_padded"] == rows // 12
    assert forward(call).statistics_bytes == forward(call).dq_sum_bytes == 0


# ---- a backward whose blocks take turns ------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [40, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_turns(dtype, head_dim):
    """A counter for each tile of queries, head and chunk of dq, and one that numbers the blocks; without turns nothing changes."""
    call = call_of((3, 4, 300, head_dim), dtype=dtype)
    plain, turns = backward(call), backward(call, deterministic=True)
    assert "turns" not in plain.workspace()
    assert int(record_of(plain)["turns"]) == 0
    (delta, main, convert), (delta_plain, main_plain, convert_plain) = turns.steps, plain.steps
    assert main.config == replace(main_plain.config, deterministic=True)
    assert convert == convert_plain
    assert (delta.blocks, main.blocks) == (delta_plain.blocks, main_plain.blocks)
    chunks = main.config.head_dim // getattr(main.config, "chunk", main.config.head_dim)
    assert (chunks > 1) == (head_dim == 200 and dtype in ("float16", "bfloat16"))
    tiles = -(-300 // main.config.block_q)
    assert turns.workspace()["turns"] == 4 * (1 + 3 * 4 * tiles * chunks)
    assert (delta.config.key_tile, delta.config.turns) == (main.config.block_k, chunks)
    assert {**turns.workspace(), "turns": 0} == {**plain.workspace(), "turns": 0}


@pytest.mark.parametrize("empty", [{"shape_q": (0, 4, 33, 64)}, {"shape_q": (2, 4, 0, 64)}])
def test_without_a_query_there_are_no_turns(empty):
    """Nothing would set the counters."""
    made = backward(call_of(**empty), deterministic=True)
    assert not made.turns_bytes
    assert not made.steps[1].config.deterministic


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("shape", [(1, 4, 33, 45), (2, 1, 33, 45), (33, 45), (45,), (2, 4, 33, 1), (2, 4, 1, 45), (1,)])
def test_gradients_of_a_bias_that_is_broadcast_are_summed_in_fixed_point(shape, dtype):
    """By kernels before and behind the others, in some words for each element of the bias; without turns nothing of it is there."""
    call = call_of(dtype=dtype, bias=np.zeros(shape, dtype))
    made = {flag: backward_with_sums(call, deterministic=flag) for flag in (False, True)}
    words = 2 if dtype == "float16" else 3
    assert gradient_sums(call.problem, call.operands, True)["bias"] == ((*call.operands["bias"].shape, words), np.int64)
    kernels = {flag: [step.variant.kernel for step in plan.steps] for flag, plan in made.items()}
    assert kernels[True] == ["backward_bounds", *kernels[False], "backward_sums"]
    assert [plan.main.config.sum_digits for plan in made.values()] == [0, words]
    assert made[True].workspace()["bounds"] == 16 * 3
    assert made[True].zeroed == {"bounds": (0, 16 * 3)}
    extra = set(made[True].workspace()) - set(made[False].workspace())
    assert extra == {"bounds", "turns"}
    assert all(step.blocks for step in made[True].steps)


def backward_with_sums(call: Call, deterministic: bool) -> plan.Plan:
    """The plan of arrays as the library allocates them."""
    problem = call.problem
    sums = {f"d{n}": np.zeros(*of) for n, of in gradient_sums(problem, call.operands, deterministic).items()}
    out, lse = np.zeros(problem.out_shape, call.q.dtype), np.zeros(problem.lse_shape, problem.accumulator)
    arrays = plan.backward_arrays(call, out=out, lse=lse, dout=out, dq=call.q, dk=call.k, dv=call.v, **sums)
    return plan.plan_backward(problem, DEVICE, plan.places_of(problem, arrays), deterministic)


def test_gradients_of_single_terms_are_numbers():
    """Axes of length 1 are no broadcast; an array in fixed point beside them has both in it."""
    for call in (
        call_of(bias=np.zeros((2, 4, 33, 45), np.float16)),
        call_of((1, 1, 33, 64), heads_k=1, bias=np.zeros((33, 45), np.float16)),
    ):
        made = backward_with_sums(call, deterministic=True)
        assert made.turns_bytes
        assert "bounds" not in made.workspace()
        assert not made.main.config.sum_digits
    assert backward_with_sums(call_of((0, 4, 33, 64), bias=np.zeros((45,), np.float16)), deterministic=True).steps


@pytest.mark.parametrize(
    ("arch", "dtype"), [x for x in product((75, 80, 86, 90, 120), DTYPES) if x != (75, "bfloat16")], ids=str
)
def test_blocks_fit_the_device(arch, dtype):
    device = described_device(arch)
    for head_dim in (1, 16, 40, 64, 96, 128, 192, 256):
        call = call_of((1, 2, 100, head_dim), dtype=dtype)
        steps = list(forward(call, device).steps)
        if not (arch == 75 and dtype == "float64" and head_dim > 128):  # no tile of its backward fits 64 KiB
            steps += backward(call, device).steps
        for step in steps:
            itemsize = call.q.dtype.itemsize
            assert step.config.shared_bytes(itemsize) <= device.shared_limit
            assert step.config.threads % 32 == 0
            assert step.config.threads <= 1024


def test_positions_stay_below_32_bits():
    """The longest sequences, whose offsets need 64 bits, and window bounds that would overflow."""
    call = call_of((1, 1, MAX_SEQ, 64), seq_k=MAX_SEQ, heads_k=1, window=(2**62, 2**62), causal=True)
    record = record_of(forward(call))
    for q, k in product((0, MAX_SEQ - 1), (0, MAX_SEQ - 1)):
        assert q + int(record["window_last"]) + 1 < 2**31
        assert q + int(record["window_first"]) <= 0
        assert k - int(record["window_first"]) + 1 < 2**31
        assert k - int(record["window_last"]) <= 0


@pytest.mark.parametrize("module", ["replay", "decode_launch"])
def test_numbers_that_print_alike_share_no_plan(module):
    """Calls are replayed by the text of their options, in which arrays leave digits out."""
    x = device_array((1, 1, 1, 1))
    launch = importlib.import_module(f"cuflash.{module}")

    def signature(scale):
        options = (scale, False, None, None, "bhsd", None, None, False)
        if module == "decode_launch":
            return launch.signature({"q": x}, options)
        return launch.signature((x, x, x, None, None, None), launch.options_of(*options))[0]

    near = 0.1, 0.1 + 1e-12
    assert repr(np.array(near[0])) == repr(np.array(near[1]))
    assert [signature(np.array(scale)) for scale in near] == [None, None]
    for kind in (float, np.float64):
        assert signature(kind(near[0])) not in (None, signature(kind(near[1])))
        assert signature(kind(near[0])) == signature(kind(near[0]))


@pytest.mark.parametrize(
    ("shape", "width_v", "causal", "section", "late"),
    [
        ((1, 8, 16384, 256), 256, True, 2, 64),  # two of its heads fit 36 MB
        ((1, 16, 8192, 192), 128, True, 4, 32),
        ((1, 4, 8192, 192), 128, True, 4, 0),  # as many heads as fit
        ((1, 16, 8192, 192), 128, False, 8, 0),  # all tiles take the same time
        ((4, 16, 4096, 128), 128, True, 32, 0),  # many fit
        ((16, 16, 1024, 128), 128, True, 64, 0),
    ],
)
def test_short_tiles_of_few_long_heads_come_last(shape, width_v, causal, section, late):
    arrays = (np.zeros((*shape[:3], width), np.float16) for width in (shape[3], shape[3], width_v))
    problem = describe(*arrays, causal=causal).problem
    config = wgmma.forward(problem, 227 << 10, True)
    assert order.of_forward(problem, config, 60 << 20) == {"section": section, "late": late}

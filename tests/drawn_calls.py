"""Calls that nobody wrote down: shapes, dtypes, strides and options drawn by hypothesis, which shrinks what fails.

What is drawn are the cases that other tests write down, so that a failure can be written down as one: a `Drawn` is a `Case`
and a place in memory for each of its arrays; packed calls are `Pack`s, decode calls `DecodeCase`s.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import cuflash
from cuflash import problem
from cuflash.modifiers import ALiBi, KeyLengths, Modifier, Written
from cuflash.problem import canonical
from tests import written_cases
from tests.cases import DOCUMENTS, DTYPES, STRIDES, Case
from tests.decode_cases import DecodeCase
from tests.packs import Pack
from tests.tolerance import Expectation, assert_close

#: how many times as many calls as a plain run of the tests makes, each run others; a plain run repeats
FACTOR = int(os.environ.get("CUFLASH_DRAWN_CALLS", "0"))


def drawn_calls(examples: int) -> settings:
    """Settings of a test that runs so many calls, unless more are asked for."""
    return settings(
        max_examples=examples * max(FACTOR, 1),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


# ---- places in memory ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where an array lies: in which order its axes, in what larger array, and how far into a buffer that begins.

    Along axis `order[i]` an element lies `steps[i]` from the next, and `gaps[i]` elements in front of the first.  The first element
    of an axis that is `repeated` stands for all of it.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    gaps: tuple[int, ...]
    repeated: tuple[int, ...] = ()
    shift: int = 0  # elements
    odd_bytes: int = 0  # so that elements do not lie at multiples of their size

    def __call__(self, x: np.ndarray) -> np.ndarray:
        first = x[tuple(slice(0, 1) if axis in self.repeated else slice(None) for axis in range(x.ndim))]
        inner = first.transpose(self.order)
        sizes = zip(inner.shape, self.steps, self.gaps, strict=True)
        extents = [n * abs(step) + gap for n, step, gap in sizes]
        count = self.shift + math.prod(extents)
        raw = np.empty(count * x.itemsize + self.odd_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64 + self.odd_bytes
        buffer = raw[start : start + count * x.itemsize].view(x.dtype)
        buffer[...] = True if x.dtype == bool else np.nan
        forward = tuple(slice(gap, None, abs(step)) for step, gap in zip(self.steps, self.gaps, strict=True))
        signs = tuple(slice(None, None, -1 if step < 0 else 1) for step in self.steps)
        view = buffer[self.shift :].reshape(extents)[forward][signs]
        view[...] = inner
        view = view.transpose(np.argsort(self.order))
        return np.broadcast_to(view, x.shape) if self.repeated else view


@st.composite
def places(draw: Any, axes: int, repeats: bool = True, odd_bytes: bool = True) -> Place | None:
    """Any place of an array of so many axes; None is where it is."""
    if not draw(st.booleans()):
        return None

    def each(values: tuple[int, ...]) -> tuple[int, ...]:
        """A value for each axis, for two at most another one than the first: larger arrays would be large ones."""
        others = draw(st.dictionaries(st.integers(0, axes - 1), st.sampled_from(values), max_size=2))
        return tuple(others.get(axis, values[0]) for axis in range(axes))

    order = tuple(draw(st.permutations(range(axes))))
    steps, gaps = each((1, 2, -1, -3)), each((0, 1, 8))
    repeated = draw(st.sets(st.integers(0, axes - 1), max_size=2)) if repeats and axes else ()
    shift = draw(st.sampled_from((0, 1, 8)))
    return Place(order, steps, gaps, tuple(sorted(repeated)), shift, draw(st.sampled_from((0, 1))) if odd_bytes else 0)


# ---- cases -----------------------------------------------------------------------------------------------------------
MAX_SCORES = 1 << 16
LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from((15, 16, 17, 31, 32, 33, 64, 65, 130)))
HEAD_DIMS = st.one_of(st.integers(1, 9), st.sampled_from((15, 16, 24, 33, 64, 80)))
BOUNDS = st.one_of(st.none(), st.integers(0, 20), st.sampled_from((-1, 2**40)))
CAUSAL = st.sampled_from((True, "bottom_right", "top_left"))
SCALES = st.sampled_from((0.7, -0.3, 0.0, 4.0))
CAPS = st.sampled_from((0.5, 3.0, 50.0))
#: those that the tolerance is made for, whatever the shape
VALUE_KINDS = st.sampled_from(("normal", "x3", "dominant key late", "logits about -200"))


#: chains of expressions, none of which name a gradient as another one does
WRITTEN = (
    (),
    *((name,) for name in written_cases.NAMES),
    ("slopes", "masks"),
    ("table", "slopes"),
    ("masks", "composed"),
)


def letters(batch: tuple[int, ...], names: str) -> Any:
    """Axes of an array that broadcasts to those of these names: each its own or 1, from some axis on."""

    def chosen(kept: list[bool]) -> str:
        return "".join(name if keep else "1" for name, keep in zip(names[-len(kept) :], kept, strict=True))

    names = names if batch else names.replace("b", "")  # "1" in place of no axis would be one too many
    return st.lists(st.booleans(), min_size=1, max_size=len(names)).map(chosen)


@st.composite
def cases(draw: Any, dtypes: tuple[str, ...] = tuple(DTYPES), lengths: Any = LENGTHS) -> Case:
    """Any call of `attention`."""
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    heads_k = draw(st.integers(1, 3))
    heads_q = heads_k * draw(st.integers(1, 3))
    longest = max(3, math.isqrt(MAX_SCORES // max(math.prod(batch) * heads_q, 1)))
    shape: dict[str, Any] = {
        "dtype": draw(st.sampled_from(dtypes)),
        "batch": batch,
        "heads_k": heads_k,
        "heads_q": heads_q,
        "seq_q": min(draw(lengths), longest),
        "seq_k": min(draw(lengths), longest),
        "head_dim": draw(HEAD_DIMS),
        "head_dim_v": draw(st.one_of(st.none(), HEAD_DIMS)),
        "layout": draw(st.sampled_from(("bhsd", "bshd"))),
    }
    sizes = st.sampled_from((1, 2, 7, 16, 33, 1 << 40))
    of_heads = letters(batch, "bh")
    options = {
        "scale": SCALES,
        "causal": CAUSAL,
        "window": st.tuples(BOUNDS, BOUNDS),
        "softcap": CAPS,
        "mask": letters(batch, "bhqk"),
        "bias": letters(batch, "bhqk"),
        "alibi": st.sampled_from(("h", "bh", "1")),
        "lengths": st.just("random"),
        "documents": st.sampled_from(sorted(DOCUMENTS)),
        "blocks": letters(batch, "bhqk"),
        "sinks": of_heads,
        "dropout": st.sampled_from((0.3, 0.75, 2**-16, 0.0)),
        "dlse": st.just(True),
        "values": VALUE_KINDS,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(options)), max_size=5))
    shape |= {name: draw(options[name]) for name in sorted(chosen)}
    density = st.sampled_from((0.6, 0.0, 0.05, 1.0))
    shape |= {"mask_density": draw(density)} if "mask" in chosen else {}
    shape |= {"block_size": draw(st.tuples(sizes, sizes)), "block_density": draw(density)} if "blocks" in chosen else {}
    return Case("drawn", **shape)


@st.composite
def variations(draw: Any, base: Case, longest: int) -> Case:
    """A case with other lengths, batch, groups, values and numbers: all for which no other kernel is compiled."""
    heads_k = draw(st.integers(1, 2))
    batch = draw(st.sampled_from(((), (1,), (2,), (2, 1), (0, 2))))
    changes: dict[str, Any] = {
        "batch": batch,
        "heads_k": heads_k,
        "heads_q": heads_k * draw(st.integers(1, 3)),
        "seq_q": draw(st.integers(1, longest)),
        "seq_k": draw(st.integers(1, longest)),
        "values": draw(VALUE_KINDS),
        "layout": draw(st.sampled_from(("bhsd", "bshd"))),
        "dlse": draw(st.booleans()),
    }
    if base.causal:
        changes["causal"] = draw(st.sampled_from((True, "top_left")))
    if base.window:
        changes["window"] = tuple(n if n is None else draw(st.integers(0, longest)) for n in base.window)
    if base.mask:
        changes |= {"mask": draw(letters(batch, "bhqk")), "mask_density": draw(st.sampled_from((0.6, 0.1)))}
    if base.bias:
        changes["bias"] = draw(letters(batch, "bhqk"))
    if base.lengths:
        changes["lengths"] = "random"
    if base.alibi:
        changes["alibi"] = draw(st.sampled_from(("h", "bh", "1")))
    return replace(base, **changes)


@st.composite
def placed(draw: Any, base: Case, longest: int) -> Drawn:
    """The same with every array of the call anywhere in memory."""
    case = draw(variations(base, longest))
    names = [name for name in axes_of(case) if name not in ("out", "lse", "dlse")]
    at = {name: draw(places(axes_of(case)[name], odd_bytes=False)) for name in names}
    return Drawn(case, draw(st.integers(0, 99)), tuple((name, place) for name, place in at.items() if place))


@dataclass(frozen=True)
class Drawn:
    """One call of `attention`, and how it is made."""

    case: Case
    seed: int = 0
    places: tuple[tuple[str, Place], ...] = ()
    written: tuple[str, ...] = ()  # chains of written_cases.py
    respelled: bool = False  # options in other words of the same meaning
    gives_out: bool = False
    deterministic: bool | None = None
    batch_invariant: bool = False

    def make(self) -> dict[str, Any]:
        """As a case makes them, each array in its place."""
        made, options = self.case.make(self.seed), {}
        at = dict(self.places)
        for name in ("q", "k", "v", "dout", "dlse"):
            if name in at and made[name] is not None:
                made[name] = at[name](made[name])
        for name in ("mask", "bias"):
            if name in at and made["options"][name] is not None:
                options[name] = at[name](made["options"][name])
        options["modifiers"] = made["options"]["modifiers"] + self.chain()
        return {**made, "options": {**made["options"], **options}}

    def chain(self) -> tuple[Modifier, ...]:
        """The modifiers that are expressions."""
        case = self.case
        real = np.float64 if case.dtype == "float64" else np.float32
        sizes = (math.prod(case.batch), case.heads_q, case.seq_q, case.seq_k)
        return tuple(m for name in self.written for m in written_cases.chains(sizes, real)[name])


def axes_of(case: Case) -> dict[str, int]:
    """Numbers of axes of a call's arrays, by name."""
    full = len(case.batch) + 3
    found = {**dict.fromkeys(("q", "k", "v", "dout", "out"), full), "lse": full - 1}
    found |= {"dlse": full - 1} if case.dlse else {}
    return found | {n: len(case.axes(getattr(case, n))) for n in ("mask", "bias") if getattr(case, n)}


@st.composite
def drawn(draw: Any, dtypes: tuple[str, ...] = tuple(DTYPES), odd_bytes: bool = True) -> Drawn:
    """Any call of `attention` with everything about it."""
    case = draw(cases(dtypes))
    at = {n: draw(places(axes, n not in ("out", "lse"), odd_bytes)) for n, axes in axes_of(case).items()}
    written: tuple[str, ...] = ()
    if min(case.seq_q, case.seq_k, *case.batch, 1) > 0:
        written = draw(st.sampled_from(WRITTEN))
    invariant = draw(st.booleans())
    return Drawn(
        case,
        draw(st.integers(0, 1 << 20)),
        tuple((name, place) for name, place in at.items() if place),
        written,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((None, True) if invariant else (None, True, False))),
        invariant,
    )


def respelled(options: dict[str, Any], case: Case) -> dict[str, Any]:
    """Options that mean the same."""
    found = dict(options)
    causal = {False: None, True: "bottom_right", "bottom_right": np.True_, "top_left": "top_left"}
    found["causal"] = causal[options["causal"]]
    if options["window"]:
        found["window"] = [-1 if n is None else np.int64(n) for n in options["window"]]
    if options["scale"] is not None:
        found["scale"] = np.float64(options["scale"])
    if options["softcap"] is not None:
        found["softcap"] = np.array(options["softcap"])
    chain = []
    for m in options["modifiers"]:
        if isinstance(m, KeyLengths) and m.lengths.size:
            m = replace(m, lengths=m.lengths.tolist())
        elif isinstance(m, ALiBi) and m.slopes.size:  # a list of nothing has one axis
            m = replace(m, slopes=m.slopes.tolist())
        chain.append(m)
    found["modifiers"] = iter(chain[::-1]) if not any(isinstance(m, Written) for m in chain) else chain
    return found


# ---- where a call runs -----------------------------------------------------------------------------------------------
class Host:
    """Arrays where they are; what `tests/gpu/device.py` has for a device."""

    def __init__(self) -> None:
        self.inputs: list[tuple[np.ndarray, bytes]] = []

    def put(self, x: np.ndarray | None) -> np.ndarray | None:
        """The array, whose memory and surroundings `check_inputs` looks after."""
        if x is not None:
            self.inputs.append((root(x), root(x).tobytes()))
        return x

    def get(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def place(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The array, the bytes that it lies in, what they hold, and where in them it starts."""
        whole = root(x).reshape(-1).view(np.uint8)
        return x, whole, whole.copy(), x.ctypes.data - whole.ctypes.data

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        yield

    def check_inputs(self) -> None:
        """Fail if a byte of an array given to `put`, or beside it, has changed."""
        assert all(x.tobytes() == kept for x, kept in self.inputs), "an input was written"
        self.inputs.clear()


def root(x: np.ndarray) -> np.ndarray:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def host_modifiers(_: Any, options: dict[str, Any]) -> dict[str, Any]:
    return options


# ---- checks ----------------------------------------------------------------------------------------------------------
def check(at: Any, call: Drawn, backend: str = "numpy", *, moved: Any = host_modifiers) -> None:
    """Run a call forward and backward and judge all results.

    `at` is a `Host` or a `Device`, and `moved(at, options)` moves the options there.
    """
    from tests.gpu.device import allow_reference_error, taken

    made, case, strided = call.make(), call.case, dict(call.places)
    described, expectation = expected(made, case)
    if case.dtype == "float64":
        allow_reference_error(expectation)
    q, k, v, dout, dlse = (at.put(made[name]) for name in ("q", "k", "v", "dout", "dlse"))
    options = moved(at, made["options"])

    def worded() -> dict[str, Any]:  # anew: modifiers may be an iterator
        return {**(respelled(options, case) if call.respelled else options), "backend": backend}

    invariant = {"batch_invariant": call.batch_invariant}
    target = None
    if call.gives_out:
        blank = np.full(made["dout"].shape, np.nan, DTYPES[case.dtype])
        blank = strided["out"](blank) if "out" in strided else blank
        target, memory, before, first = at.place(blank)
    with at.poisoned():
        out, lse = cuflash.attention(q, k, v, return_lse=True, out=target, **invariant, **worded())
    assert type(out) is type(q)
    if target is None:
        assert out.flags.c_contiguous
    else:
        assert out is target
        free = ~taken(before, blank, first)
        assert (at.get(memory)[free] == before[free]).all(), "bytes between or around the elements of out changed"
    expectation.check_forward(at.get(canonical(out, case.layout)), at.get(lse))
    if target is None and "out" in strided:
        out = at.put(strided["out"](at.get(out)))
    if "lse" in strided:
        lse = at.put(strided["lse"](at.get(lse)))
    with at.poisoned():
        gradients = cuflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=call.deterministic, **invariant, **worded()
        )
    check_gradients(described, expectation, {n: at.get(x) for n, x in gradients._asdict().items()})
    at.check_inputs()


def expected(made: dict[str, Any], case: Case) -> tuple[problem.Call, Expectation]:
    """The call of compact copies, and what it must return."""
    options = made["options"]
    copies = {name: options[name].copy() for name in ("mask", "bias") if options[name] is not None}
    given = (made[name].copy() for name in ("q", "k", "v"))
    described = problem.describe(*given, **{**options, **copies})
    return described, Expectation(described, canonical(made["dout"].copy(), case.layout), made["dlse"])


def check_gradients(call: problem.Call, expectation: Expectation, found: dict[str, np.ndarray]) -> None:
    """Judge the gradients that a user gets, on the host: those of expressions by array, all others as they are."""
    from cuflash import reference

    want = reference.backward(call, expectation.dout, expectation.dlse)
    shown = dict(found)
    for name in ("dq", "dk", "dv"):
        shown[name] = canonical(found[name], call.problem.layout)
    names = {"dq", "dk", "dv", *(f"d{n}" for m in call.problem.modifiers for n in user_names(m))}
    assert set(found) == names, f"gradients are {sorted(found)}: must be {sorted(names)}"
    for m in call.problem.modifiers:
        fields = {name: f"d{name}" for name in m.differentiable}
        if not isinstance(m, Written):
            for name, field in fields.items():
                shown[field] = found[field].reshape(call.operands[name].shape)
            continue
        for array in m.gradients:
            sums = [
                m.gradient(array, {n: np.asarray(source(f), np.float64) for n, f in fields.items()})
                for source in (lambda f: getattr(want, f), lambda f: expectation.plain[f])
            ]
            floor = sum(float(np.max(expectation.floors[f], initial=0)) for f in fields.values())
            got = shown.pop(f"d{array}")
            matrices = [x.reshape(1, -1) for x in (got, sums[0], sums[1].astype(got.dtype))]
            assert_close(*matrices, f"d{array}", floor)
        # What no user sees is what is wanted.
        shown |= {f: getattr(want, f).astype(expectation.plain[f].dtype) for f in fields.values()}
    expectation.check_backward(type(want)(**{name: shown[name] for name in want._fields}))


def user_names(m: Modifier) -> tuple[str, ...]:
    return m.gradients if isinstance(m, Written) else tuple(m.differentiable)


# ---- packed and decode calls -----------------------------------------------------------------------------------------
@st.composite
def packs(draw: Any, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Pack:
    """Any call of `attention_varlen`."""
    lengths = st.one_of(st.integers(0, 5), st.sampled_from((16, 33, 65)))
    pairs = draw(st.lists(st.tuples(lengths, lengths), max_size=5))
    heads_k = draw(st.integers(1, 2))
    optional = {
        "scale": SCALES,
        "causal": CAUSAL,
        "window": st.tuples(BOUNDS, BOUNDS),
        "softcap": CAPS,
        "alibi": st.just(True),
        "sinks": st.just(True),
        "dropout": st.sampled_from((0.3, 0.75)),
        "dlse": st.just(True),
        "strides": st.sampled_from([name for name in STRIDES if name != "stride 0"]),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(optional)), max_size=4))
    return Pack(
        tuple(q for q, _ in pairs),
        tuple(k for _, k in pairs),
        behind=draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        dtype=draw(st.sampled_from(dtypes)),
        heads_q=heads_k * draw(st.integers(1, 3)),
        heads_k=heads_k,
        head_dim=draw(HEAD_DIMS),
        head_dim_v=draw(st.one_of(st.none(), HEAD_DIMS)),
        **{name: draw(optional[name]) for name in sorted(chosen)},
    )


@st.composite
def decode_cases(draw: Any, dtypes: tuple[str, ...] = tuple(DTYPES)) -> DecodeCase:
    """Any call of `attention_decode`."""
    page_size = draw(st.sampled_from((0, 1, 3, 16)))
    capacity = max(page_size, 1) * draw(st.integers(1, 9)) if page_size else draw(st.integers(1, 70))
    seq_new = draw(st.integers(0, min(3, capacity)))
    lengths = draw(st.lists(st.integers(0, capacity - seq_new), max_size=4))
    heads_k = draw(st.integers(1, 2))
    optional = {
        "scale": SCALES,
        "window": st.tuples(BOUNDS, BOUNDS),
        "softcap": CAPS,
        "alibi": st.sampled_from(("h", "bh")),
        "sinks": st.sampled_from(("h", "bh")),
        "strides": st.sampled_from([name for name in STRIDES if name != "stride 0"]),
        "values": st.sampled_from((3.0, 0.0)),
        "full": st.just(True),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(optional)), max_size=4))
    if "full" in chosen:  # without lengths a cache holds as many keys as it has places
        seq_new, lengths = 0, [capacity] * len(lengths)
    return DecodeCase(
        "drawn",
        draw(st.sampled_from(dtypes)),
        tuple(lengths),
        heads_q=heads_k * draw(st.integers(1, 4)),
        heads_k=heads_k,
        seq_q=draw(st.integers(1, 5)),
        seq_new=seq_new,
        head_dim=draw(HEAD_DIMS),
        head_dim_v=draw(st.one_of(st.none(), HEAD_DIMS)),
        capacity=capacity,
        page_size=page_size,
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(("bhsd", "bshd"))),
        **{name: draw(optional[name]) for name in sorted(chosen)},
    )

"""Arrays: what a caller passes becomes NumPy or CuPy, and results go back as the caller's own kind.

No array library is imported for this, CuPy only once an array on a device is met: whoever holds an array of a library
has it in `sys.modules`.  Inputs are never written.  On a device, DLPack orders the producer's stream before CuPy's
current one on the way in, and CuPy's before the consumer's on the way out
(https://dmlc.github.io/dlpack/latest/python_spec.html).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash.errors import ArgumentError, ShapeError, UnsupportedError
from cuflash.modifiers import ALiBi, BlockMask, Documents, Dropout, KeyLengths, Modifier, Packed, Scales, Sinks, Written
from cuflash.modifiers.base import device_of
from cuflash.modifiers.dropout import word_pair
from cuflash.problem import DTYPES, NARROW, OUT_DTYPES, dtype_name, finite, operand_title, user_modifiers

# DLDeviceType of dlpack.h
HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged

#: libraries whose arrays never change; CuPy drops DLPack's read-only flag, so their names have to tell
IMMUTABLE = ("jax",)


@dataclass(frozen=True)
class Home:
    """Where a call's arrays live, and the library whose kind its results take."""

    library: str
    device: int | None
    namespace: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """How messages name it, such as "a torch array on cuda:0"."""
        return f"a {self.library} array on {'the host' if self.device is None else f'cuda:{self.device}'}"

    def give(self, x: Any) -> Any:
        """A native array as the caller's kind; it shares the memory."""
        return x if self.namespace is None else exported(x, self.namespace)

    def wait(self, x: Any) -> None:
        """Make the current stream of the caller's library wait until CuPy's current stream has written `x`."""
        if self.namespace is not None and self.device is not None:
            self.namespace.from_dlpack(x)


HOST = Home("numpy", None)


@functools.cache
def device_home(device: int) -> Home:
    return Home("cupy", device)


def gather(arguments: Mapping[str, Any]) -> tuple[Home, dict[str, Any]]:
    """Native arrays of all arguments by name, and the one place where they live."""
    homes, natives = {}, {}
    for name, x in arguments.items():
        homes[name], natives[name] = native(name, x)
    home = next(iter(homes.values()))
    if any(other != home for other in homes.values()):
        found = ", ".join(f"{name} is {where}" for name, where in homes.items())
        raise ArgumentError(
            f"the arguments must be of one kind in one place, found: {found}; move or convert them first"
        )
    return home, natives


def native(name: str, x: Any) -> tuple[Home, Any]:
    """Home of one argument, and the NumPy or CuPy array that shares its memory."""
    if type(x) is np.ndarray:
        return HOST, x
    cupy_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    if cupy_array is not None and isinstance(x, cupy_array):
        return device_home(x.data.device_id), aligned(name, x)
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name} is a masked array, whose mask would be ignored; pass its .data, and mask= of the call"
        )
    if isinstance(x, np.ndarray):
        return HOST, np.asarray(x)
    try:
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            return imported(name, x)
        if hasattr(x, "__cuda_array_interface__"):
            return imported_by_interface(name, x)
    except (ArgumentError, UnsupportedError):
        raise
    except Exception as error:  # producers raise what they like
        raise ArgumentError(
            f"{name} ({described(x)}) cannot be read through DLPack or __cuda_array_interface__: {error}; detach it "
            "from automatic differentiation, keep it on one device, or convert it to NumPy or CuPy"
        ) from error
    raise ArgumentError(
        f"{name} is {x!r:.80} of type {type(x).__name__}: must be a NumPy or CuPy array or export DLPack or "
        "__cuda_array_interface__; make it one with numpy.asarray or cupy.asarray"
    )


def described(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__} of dtype {getattr(x, 'dtype', 'unknown')}"


def imported(name: str, x: Any) -> tuple[Home, Any]:
    """One DLPack exporter."""
    kind, ordinal = x.__dlpack_device__()
    namespace = namespace_of(x)
    if NARROW in str(getattr(x, "dtype", "")) and hasattr(namespace, "uint8"):
        # Neither NumPy nor CuPy takes such an array, so its bytes come in.
        home, array = imported(name, x.view(namespace.uint8))
        return home, array.view(narrow_dtype())
    if kind in CUDA_DEVICES:
        array = aligned(name, load_cupy(name, x).from_dlpack(x))
        plain = device_home(array.data.device_id)
    elif kind in HOST_DEVICES:
        array, plain = imported_to_host(x, namespace), HOST
    else:
        raise ArgumentError(
            f"{name} ({described(x)}) lies on DLPack device ({int(kind)}, {ordinal}): only the host (1) and CUDA "
            "devices (2) are supported; move it there"
        )
    if namespace is None:
        return plain, array
    return Home(namespace.__name__.partition(".")[0], plain.device, namespace), array


def imported_to_host(x: Any, namespace: Any) -> Any:
    # NumPy has no bfloat16 of its own to give a DLPack array of it, so the bits come in as int16.
    if "bfloat16" not in str(getattr(x, "dtype", "")):
        return np.from_dlpack(x)
    if hasattr(namespace, "int16"):
        return np.from_dlpack(x.view(namespace.int16)).view(bfloat16())
    array = np.asarray(x)
    if array.dtype != bfloat16():
        raise TypeError(f"bfloat16 became {array.dtype} on the way to NumPy")
    return array


def imported_by_interface(name: str, x: Any) -> tuple[Home, Any]:
    """One exporter that knows __cuda_array_interface__ only (Numba)."""
    cupy = load_cupy(name, x)
    pointer = x.__cuda_array_interface__["data"][0]
    # An empty array may have pointer 0, which no device owns.
    device = cupy.cuda.runtime.pointerGetAttributes(pointer).device if pointer else cupy.cuda.Device().id
    with cupy.cuda.Device(device):  # cupy.asarray copies an array of any other device
        return device_home(device), aligned(name, cupy.asarray(x))


def exported(x: Any, namespace: Any) -> Any:
    """A native array as the kind of array that `namespace.from_dlpack` makes."""
    if not x.flags.c_contiguous:  # JAX takes compact arrays only
        x = compact(x)
    if isinstance(x, np.ndarray) and x.dtype == bfloat16():
        return namespace.from_dlpack(x.view(np.int16)).view(namespace.bfloat16)
    return namespace.from_dlpack(x)


def compact(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x)
    with x.device:
        return x.copy(order="C")


def namespace_of(x: Any) -> Any:
    """The exporter's own module with `from_dlpack`, if it has one."""
    if hasattr(type(x), "__array_namespace__"):
        found = [x.__array_namespace__()]
    else:
        found = [sys.modules.get(c.__module__.partition(".")[0]) for c in type(x).__mro__]
    return next((m for m in found if callable(getattr(m, "from_dlpack", None))), None)


def bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def narrow_dtype() -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
    return dtype


def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def in_dtype(x: Any, name: str) -> Any:
    """A native array in the dtype of that name."""
    with device_of(x):
        return x.astype(named_dtype(name), copy=False)


# ---- the device ------------------------------------------------------------------------------------------------------
def load_cupy(name: str, x: Any) -> Any:
    try:
        import cupy
    except (ImportError, OSError) as error:  # OSError: its cache folder cannot be made
        raise UnsupportedError(
            f"{name} ({described(x)}) is on a CUDA device, and CuPy, which computes there, cannot be imported "
            f"({error}); install it with: pip install 'cuflash[cuda13]'"
        ) from error
    return cupy


def missing_gpu() -> str | None:
    """Why nothing can run on a GPU here; None where it can."""
    try:
        import cupy
    except (ImportError, OSError) as error:
        return f"CuPy cannot be imported ({error}); install it with: pip install 'cuflash[cuda13]'"
    return None if cupy.cuda.is_available() else "CuPy finds no CUDA driver or no device"


@functools.cache
def require_gpu() -> None:
    """Raise an `UnsupportedError` where no GPU can be used; asks once."""
    if why := missing_gpu():
        raise UnsupportedError(f"the arrays are CUDA arrays, but this process has no usable GPU: {why}")


def aligned(name: str, x: Any) -> Any:
    """The array, if kernels can read its elements: they load each with one instruction."""
    size = x.dtype.itemsize
    if x.data.ptr % size or any(s % size for s in x.strides):
        raise ArgumentError(
            f"{name} starts at byte {x.data.ptr % size} of an element or has strides {x.strides} that are no multiples "
            f"of its {size} bytes; make it in a buffer that is aligned to them"
        )
    return x


# ---- out= ------------------------------------------------------------------------------------------------------------
def check_out(out: Any, home: Home, inputs: Mapping[str, Any]) -> None:
    """Raise unless a native `out` can be written without changing an input or itself."""
    if home.library in IMMUTABLE:
        raise ArgumentError(f"out is {home}, and such arrays cannot be written; leave out= away and take the result")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ArgumentError("out is read-only; pass an array with flags.writeable=True, such as numpy.empty_like(q)")
    if overlaps_itself(out):
        raise ArgumentError(
            f"out of shape {out.shape} and strides {out.strides} bytes has elements that share memory; pass an array "
            "that was not broadcast"
        )
    for name, x in inputs.items():
        if overlaps(out, x):
            (a, b), (c, d) = extent(out), extent(x)
            raise ArgumentError(
                f"out overlaps {operand_title(name)}: bytes [{a:#x}, {b:#x}) and [{c:#x}, {d:#x}); pass an array "
                "of its own memory, or none"
            )


def extent(x: Any) -> tuple[int, int]:
    """First byte and the byte after the last one that an array's elements take."""
    first = last = address(x)
    if x.size == 0:
        return first, first
    for n, stride in zip(x.shape, x.strides, strict=True):
        reach = (n - 1) * stride
        first, last = first + min(reach, 0), last + max(reach, 0)
    return first, last + x.dtype.itemsize


def overlaps(a: Any, b: Any) -> bool:
    """Whether two arrays share a byte; slices of one buffer that interleave do not."""
    (a_first, a_end), (b_first, b_end) = extent(a), extent(b)
    if max(a_first, b_first) >= min(a_end, b_end):
        return False
    try:
        return np.shares_memory(footprint(a), footprint(b), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def footprint(x: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of the same addresses, only to be compared: on a device it must not be read."""
    interface = {
        "version": 3,
        "shape": x.shape,
        "strides": x.strides,
        "typestr": f"|V{x.dtype.itemsize}",
        "data": (address(x), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def address(x: Any) -> int:
    pointer: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return pointer


def overlaps_itself(x: Any) -> bool:
    """Whether two elements of an array may share memory: True unless each axis steps over all that is inside it."""
    if x.size == 0:
        return False
    reach = x.dtype.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


# ---- the modifiers' arrays -------------------------------------------------------------------------------------------
def native_modifiers(modifiers: Any, home: Home, dtype: str, seq_k: int) -> tuple[Modifier, ...]:
    """The user's modifiers with native arrays, of the dtypes that the backends read, where the call's arrays are."""
    accumulator = "float64" if dtype == "float64" else "float32"
    chain: list[Modifier] = []
    for m in user_modifiers(modifiers):
        if isinstance(m, KeyLengths):
            lengths = native_lengths(m, home, seq_k)
            m = replace(m, lengths=lengths, wide=lengths.dtype.itemsize == 8)
        elif isinstance(m, ALiBi):
            m = replace(m, slopes=native_slopes(m, home, accumulator))
        elif isinstance(m, Documents):
            m = replace(m, ids_q=native_ids("ids_q", m, home), ids_k=native_ids("ids_k", m, home))
        elif isinstance(m, BlockMask):
            m = replace(m, blocks=native_blocks(m, home))
        elif isinstance(m, Written):
            m = m.with_arrays({name: native_operand(m, name, home, accumulator) for name in m.named_arrays()})
        elif isinstance(m, Sinks):
            m = native_sinks(m, home, accumulator)
        elif isinstance(m, Dropout):
            m = replace(m, seed=native_number("seed", m.seed, home), offset=native_number("offset", m.offset, home))
        chain.append(m)
    return tuple(chain)


def native_lengths(modifier: KeyLengths, home: Home, seq_k: int) -> Any:
    name = "lengths of KeyLengths"
    x = modifier_array(name, modifier.lengths, home)
    plain = not hasattr(modifier.lengths, "dtype")
    if str(x.dtype) not in ("int32", "int64"):
        if not (plain and x.size == 0):
            raise ArgumentError(f"{name} has dtype {x.dtype}: must be int32 or int64; convert it with astype")
        x = x.astype(np.int32)
    if not isinstance(x, np.ndarray):
        return x
    if x.size and (x.min() < 0 or x.max() > seq_k):
        wrong = x[(x < 0) | (x > seq_k)].flat[0]
        raise ArgumentError(f"{name} contains {wrong}: each must be from 0 to {seq_k}, the seq of k and v")
    return placed(modifier, x.astype(np.int32) if plain else x, home)


def native_slopes(modifier: ALiBi, home: Home, accumulator: str) -> Any:
    name = "slopes of ALiBi"
    x = modifier_array(name, modifier.slopes, home)
    if str(x.dtype) not in DTYPES and x.dtype.kind not in "iu":
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be real numbers; convert it with astype")
    if not isinstance(x, np.ndarray):
        with x.device:
            return x.astype(accumulator, copy=False)
    with np.errstate(over="ignore"):
        converted = x.astype(accumulator, copy=False)
    if not np.isfinite(converted).all():
        wrong = x[~np.isfinite(converted)].flat[0]
        raise ArgumentError(f"{name} contains {wrong}: each must be finite in {accumulator}")
    return placed(modifier, converted, home)


def native_ids(side: str, modifier: Documents, home: Home) -> Any:
    name = f"{side} of Documents"
    x = modifier_array(name, getattr(modifier, side), home)
    if x.dtype == np.int32:
        return placed(modifier, x, home, side) if isinstance(x, np.ndarray) else x
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be int32; convert it with astype")
    limits = np.iinfo(np.int32)
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        wrong = x[(x < limits.min) | (x > limits.max)].flat[0]
        raise ArgumentError(f"{name} contains {wrong}: each must fit in int32; number the documents from 0")
    return placed(modifier, x.astype(np.int32), home, side)


def native_blocks(modifier: BlockMask, home: Home) -> Any:
    name = "blocks of BlockMask"
    x = modifier_array(name, modifier.blocks, home)
    if x.dtype != bool:
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be bool (True = visible); convert it with astype")
    return placed(modifier, x, home) if isinstance(x, np.ndarray) else x


def native_operand(modifier: Written, name: str, home: Home, accumulator: str) -> Any:
    """One array of an expression: real numbers as the sums' dtype, whole ones as int32, bool as it is."""
    given, title = modifier.given[name], f"{name} of {modifier.title}"
    x = modifier_array(title, given.value, home)
    if given.type == "real":
        with device_of(x):
            x = x.astype(accumulator, copy=False)
    elif given.type == "int" and x.dtype != np.int32:
        if not isinstance(x, np.ndarray):
            raise ArgumentError(f"{title} has dtype {x.dtype}: must be int32 on a device; convert it with astype")
        limits = np.iinfo(np.int32)
        if x.size and (x.min() < limits.min or x.max() > limits.max):
            wrong = x[(x < limits.min) | (x > limits.max)].flat[0]
            raise ArgumentError(f"{title} contains {wrong}: each must fit in int32")
        x = x.astype(np.int32)
    return placed(modifier, x, home, name) if isinstance(x, np.ndarray) else x


def native_sinks(modifier: Sinks, home: Home, accumulator: str) -> Sinks:
    """Logits in the accumulator's dtype; their gradient gets the dtype in which they came."""
    name = "logits of Sinks"
    x = modifier_array(name, modifier.logits, home)
    if str(x.dtype) not in DTYPES and x.dtype.kind not in "iu":
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be real numbers; convert it with astype")
    of_gradient = str(x.dtype) if hasattr(modifier.logits, "dtype") and str(x.dtype) in DTYPES else accumulator
    with device_of(x), np.errstate(over="ignore"):
        converted = x.astype(accumulator, copy=False)
    logits = placed(modifier, converted, home) if isinstance(x, np.ndarray) else converted
    return replace(modifier, logits=logits, dtype=of_gradient)


def native_scales(q_scale: Any, k_scale: Any, v_scale: Any, out_dtype: Any, home: Home, dtype: str) -> Scales | None:
    """What the elements of 8-bit arrays count, with native arrays; None for arrays of other dtypes."""
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    asked = None if out_dtype is None else out_dtype_name(out_dtype)
    if dtype != NARROW:
        for name, x in given.items():
            if x is not None:
                raise ArgumentError(f"{name} goes with {NARROW} arrays; q has dtype {dtype}, use scale, or multiply v")
        if asked not in (None, dtype):
            raise ArgumentError(f"out_dtype={out_dtype!r}: must be None or {dtype}, the dtype of q; convert the result")
        return None
    if asked is None:
        asked = OUT_DTYPES[0]
    elif asked not in OUT_DTYPES:
        raise ArgumentError(f"out_dtype={out_dtype!r}: must be {' or '.join(OUT_DTYPES)} for {NARROW} arrays")
    numbers, views = dict.fromkeys(given, 1.0), {}
    for name, x in given.items():
        if isinstance(x, (Real, np.generic, str)):
            numbers[name] = finite(name, x, dtype)
            if numbers[name] <= 0:
                raise ArgumentError(f"{name}={x!r}: must be greater than 0")
        elif x is not None:
            views[name] = native_scale(name, x, home)
    return Scales(
        out_dtype=asked, value_scale=numbers["v_scale"], logit_scale=numbers["q_scale"] * numbers["k_scale"], **views
    )


def out_dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype_name(np.dtype(dtype))
    except TypeError:
        raise ArgumentError(f"out_dtype={dtype!r:.80}: must be the name of a dtype, or a dtype of NumPy") from None


def native_scale(name: str, x: Any, home: Home) -> Any:
    """Scales of the heads as float32 where the call's arrays are; those of a device are not read."""
    array = modifier_array(name, x, home)
    if not hasattr(x, "dtype"):
        array = array.astype(np.float32)
    if dtype_name(array.dtype) != "float32":
        raise ArgumentError(f"{name} has dtype {array.dtype}: must be float32; convert it with astype")
    if not isinstance(array, np.ndarray):
        return array
    if home.device is not None:
        raise ArgumentError(f"{name} is on the host, but q is {home}; pass a number, or an array beside q")
    if not ((array > 0) & np.isfinite(array)).all():
        wrong = array[~((array > 0) & np.isfinite(array))].flat[0]
        raise ArgumentError(f"{name} contains {wrong}: each must be finite and greater than 0")
    return array


def native_number(name: str, x: Any, home: Home) -> Any:
    """A seed or offset of Dropout: a number, or where the call's arrays are an array of one element."""
    if not (hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")):
        return word_pair(name, x)
    array = modifier_array(f"{name} of Dropout", x, home)
    if isinstance(array, np.ndarray):
        return word_pair(name, array)
    if str(array.dtype) not in ("int64", "uint64") or array.size != 1:
        raise ArgumentError(
            f"{name} of Dropout has shape {array.shape} and dtype {array.dtype}: on a device it must be one int64 or uint64; "
            "pass an integer, or make it such an array"
        )
    return array.reshape(())


def native_packed(
    offsets_q: Any, offsets_k: Any, longest_q: Any, longest_k: Any, total_q: int, total_k: int, home: Home
) -> Packed:
    """The segments of packed sequences with native offsets, checked as far as the host knows their values."""
    packed = Packed()
    native_q, _ = native_offsets("q", offsets_q, maximum("max_seqlen_q", longest_q), total_q, home, packed)
    native_k, longest = native_offsets("k", offsets_k, maximum("max_seqlen_k", longest_k), total_k, home, packed)
    if native_q.shape != native_k.shape:
        raise ShapeError(
            f"cu_seqlens_q has shape {native_q.shape} and cu_seqlens_k {native_k.shape}: both must be (segments + 1,); a "
            "segment without queries or without keys has two equal offsets"
        )
    return Packed(offsets_q=native_q, offsets_k=native_k, count=native_q.size - 1, longest_k=rounded_length(longest))


def rounded_length(longest: int) -> int:
    """A length that is at least so much, one of few: plans and signatures depend on it."""
    return 1 << max(longest - 1, 0).bit_length()


def maximum(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r:.80}: must be an integer of at least 0, or None to have the offsets read")
    return number


def native_offsets(side: str, x: Any, longest: int | None, total: int, home: Home, packed: Packed) -> tuple[Any, int]:
    """Offsets of one side as int32 where the call's arrays are, and the rows of the longest segment.

    Those of a device are read where `longest` is None.
    """
    name = f"cu_seqlens_{side}"
    x = modifier_array(name, x, home)
    if x.ndim != 1 or not x.size:
        raise ShapeError(f"{name} has shape {x.shape}: must be (segments + 1,), the first of them 0")
    on_host = isinstance(x, np.ndarray)
    if x.dtype != np.int32 and not (on_host and x.dtype.kind in "iu"):
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be int32; convert it with astype")
    if on_host or longest is None:
        with device_of(x):
            values = x if on_host else x.get()  # waits for the device
        longest = check_offsets(name, values, total, longest, side)
    return placed(packed, x.astype(np.int32), home, side) if on_host else x, longest or 0


def check_offsets(name: str, offsets: np.ndarray[Any, Any], total: int, longest: int | None, side: str) -> int:
    """The rows of the longest segment; raises for offsets that mean nothing."""
    values = offsets.astype(np.int64)
    if values[0] != 0:
        raise ArgumentError(f"{name} starts with {values[0]}: must start with 0, the first row of the first segment")
    lengths = np.diff(values)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ArgumentError(
            f"{name} falls from {values[at]} to {values[at + 1]} at index {at + 1}: must not decrease; pass cumulative "
            "lengths, such as numpy.cumsum gives"
        )
    if values[-1] > total:
        raise ArgumentError(f"{name} ends with {values[-1]}: must be at most {total}, the first axis of {side}")
    if longest is not None and lengths.max(initial=0) > longest:
        raise ArgumentError(
            f"max_seqlen_{side}={longest}: the longest segment of {name} has {lengths.max()} rows; pass at least that, or None"
        )
    return int(lengths.max(initial=0))


def modifier_array(name: str, x: Any, home: Home) -> Any:
    """A modifier's array or sequence: NumPy, or where the call's arrays are."""
    if isinstance(x, (int, float, list, tuple, range, np.generic)):
        try:
            return np.asarray(x)
        except ValueError as error:
            raise ArgumentError(f"{name}={x!r:.80} is no array: {error}") from error
    where, array = native(name, x)
    if where.device is not None and where != home:
        raise ArgumentError(f"{name} is {where}, but q is {home}; pass a sequence, a NumPy array or an array beside q")
    return array


class Uploads(dict[tuple[int, str, str], tuple[Any, Any]]):
    """Copies of one modifier's arrays by device, dtype and attribute: what was copied, and the copy.

    A pickle of it is empty.
    """

    def __reduce__(self) -> tuple[type[Uploads], tuple[()]]:
        return Uploads, ()


def placed(modifier: Modifier, x: np.ndarray[Any, Any], home: Home, attribute: str = "") -> Any:
    """The array where the call's arrays are; a device gets it once, until its values change.

    So later calls copy nothing and may be captured in a CUDA graph.
    """
    if home.device is None:
        return x
    uploads = modifier.__dict__.setdefault("_uploads", Uploads())
    key = (home.device, x.dtype.str, attribute)
    if key in uploads and np.array_equal(uploads[key][0], x):
        return uploads[key][1]
    require_gpu()
    import cupy

    kept = x.copy()
    with cupy.cuda.Device(home.device):
        copy = cupy.asarray(kept)
        # Calls on other streams will read it without waiting for this one.
        cupy.cuda.get_current_stream().synchronize()
    uploads[key] = kept, copy
    return copy

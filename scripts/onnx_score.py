"""Run the node tests that the onnx package generates for the operator Attention, and count how many pass.

    python scripts/onnx_score.py                                                # the NumPy backend
    python scripts/onnx_score.py --out scripts/results/cpu-onnx.json            # and write it down
    python scripts/onnx_score.py --backend cupy --out scripts/results/h200-onnx.json    # each backend of a GPU

A case passes if shapes and dtypes of all its outputs are those expected, and their values as near as ONNX's own runner asks
for.  What the package expects in 16 bits was rounded to them at every step, and may be off by more than that tolerance: a
result beyond it that is nearer than the expected one to the same call in float64 is counted as nearer.  A case that a backend
refuses, such as float32 on tensor cores, is counted as refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package of this checkout

import cuflash.onnx
from cuflash import UnsupportedError, backends
from cuflash.cli.machine import stamp, this_machine

Row = dict[str, Any]
Array = Any

VERDICTS = ("passed", "nearer", "refused", "failed")
BFLOAT16_RTOL = 2**-6  # what onnx.backend.test.runner allows at least where a result is bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", choices=("numpy", "cupy"), default="numpy", help="the host, or all backends of the GPU"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    machine = this_machine()
    if arguments.backend == "cupy" and not machine.devices:
        sys.exit(f"no GPU to run on ({machine.no_gpu}); --backend numpy needs none")
    found = cases()
    rows: list[Row] = []
    for backend in ["numpy"] if arguments.backend == "numpy" else ["chosen", *(b.name for b in backends.BACKENDS)]:
        rows += score(backend, found)
        print(f"{backend:8s} {summary(rows, backend)}", flush=True)
    for row in rows:
        if row["verdict"] in ("nearer", "failed"):
            print(f"{row['verdict']} {row['backend']} {row['case']}: {row['why']}")
    if arguments.out is not None:
        result = stamp(machine, rows)
        result["versions"] |= {"onnx": metadata.version("onnx")}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(row["verdict"] == "failed" for row in rows))


def summary(rows: Sequence[Row], backend: str) -> str:
    """How many rows of each verdict there are."""
    counted = Counter(row["verdict"] for row in rows if row["backend"] == backend)
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS)


def cases() -> list[Any]:
    """All node tests of the operator, without those of the graphs that it can be expanded to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' tests overflow on purpose
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases("Attention")
    whole = [c for c in found if c.model is not None and {n.op_type for n in c.model.graph.node} == {"Attention"}]
    return [case for case in whole if not case.name.endswith("_expanded")]


def score(backend: str, found: Sequence[Any]) -> list[Row]:
    """A row for each case: "numpy" computes on the host, "chosen" on the device by the backend that cuflash chooses."""
    if backend == "numpy":
        return [judged(case, backend, None, np.asarray, np.asarray) for case in found]
    asked = None if backend == "chosen" else backend
    return [judged(case, backend, asked, to_device, from_device) for case in found]


def to_device(x: np.ndarray) -> Array:
    """The array on the GPU; bfloat16 goes there as its bits."""
    import cupy

    return cupy.asarray(x.view(f"u{x.dtype.itemsize}")).view(x.dtype)


def from_device(x: Array) -> np.ndarray:
    """The array on the host."""
    bits: np.ndarray = x.view(f"u{x.dtype.itemsize}").get()
    return bits.view(x.dtype)


def judged(
    case: Any,
    backend: str,
    asked: str | None,
    put: Callable[[np.ndarray], Array],
    get: Callable[[Array], np.ndarray],
) -> Row:
    """Run one case."""
    (node,) = case.model.graph.node
    (imported,) = (x.version for x in case.model.opset_import if x.domain in ("", "ai.onnx"))
    ((given, wanted),) = case.data_sets
    row = {
        "topic": "onnx processor" if backend == "numpy" else "onnx",
        "system": "cuflash",
        "backend": backend,
        "case": case.name,
        "opset": imported,
        "dtype": str(given[0].dtype),
    }
    outputs: list[np.ndarray] = []
    try:
        outputs = [get(x) for x in run(node, [put(x) for x in given], asked)]
        compare(outputs, wanted, case.rtol, case.atol)
    except AssertionError as difference:
        return row | {
            "verdict": "nearer" if is_nearer(node, given, outputs, wanted) else "failed",
            "why": told(difference),
        }
    except UnsupportedError as refusal:
        return row | {"verdict": "refused", "why": " ".join(str(refusal).split())}
    except Exception as failure:
        return row | {"verdict": "failed", "why": told(failure)}
    return row | {"verdict": "passed", "error": largest_error(outputs, wanted)}


def told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"


def is_nearer(
    node: Any, given: Sequence[np.ndarray], outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
) -> bool:
    """Whether outputs of 16 bits are nearer than the expected ones to what the host computes in float64."""
    if [(x.shape, x.dtype) for x in outputs] != [(x.shape, x.dtype) for x in wanted]:
        return False
    narrow = given[0].dtype
    exact = run(node, [x.astype(np.float64) if x.dtype == narrow else x for x in given], None)
    return narrow.itemsize == 2 and all(
        largest_error([own], [x]) <= largest_error([other], [x]) and (np.isfinite(own) == np.isfinite(x)).all()
        for own, other, x in zip(outputs, wanted, exact, strict=True)
    )


def run(node: Any, given: Sequence[Array], backend: str | None) -> list[Array]:
    """The outputs that the node names; an input that it leaves out has an empty name there."""
    from onnx.helper import get_attribute_value

    arrays = iter(given)
    inputs = [next(arrays) if name else None for name in node.input]
    attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    with_scores = len(node.output) > 3 and bool(node.output[3])
    found = cuflash.onnx.attention(*inputs, **attributes, return_qk_matmul_output=with_scores, backend=backend)
    return [output for name, output in zip(node.output, found, strict=False) if name]


def compare(outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray], rtol: float, atol: float) -> None:
    """What onnx.backend.test.runner asks of outputs."""
    np.testing.assert_equal(len(outputs), len(wanted))
    for output, reference in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(output.shape, reference.shape)
        np.testing.assert_equal(output.dtype, reference.dtype)
        if output.dtype.name == "bfloat16":
            compare([output.astype(np.float32)], [reference.astype(np.float32)], max(rtol, BFLOAT16_RTOL), atol)
        else:
            np.testing.assert_allclose(output, reference, rtol=rtol, atol=atol)


def largest_error(outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest difference of finite numbers."""
    largest = 0.0
    for output, reference in zip(outputs, wanted, strict=True):
        a, b = output.astype(np.float64), reference.astype(np.float64)
        both = np.isfinite(a) & np.isfinite(b)
        largest = max(largest, float(np.abs(a[both] - b[both]).max(initial=0)))
    return largest


if __name__ == "__main__":
    sys.exit(main())

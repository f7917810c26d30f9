"""Streams, graphs, devices, threads, processes and the kernel cache: the call does what it says wherever it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ALiBi, ArgumentError, KeyLengths
from tests.cases import DTYPES
from tests.gpu.cold_start import OPTIONS

ROOT = Path(__file__).parent.parent.parent
SHAPES = {"q": (2, 4, 200, 64), "k": (2, 2, 300, 64), "v": (2, 2, 300, 64), "dout": (2, 4, 200, 64)}
HALF_A_SECOND = 10**9  # clock cycles; the clocks of GPUs are at most 2 to 3 GHz

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def spin(cupy: Any) -> Any:
    """A function that keeps the current stream busy for a number of cycles."""
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))  # compiles
    return lambda cycles: kernel((1,), (1,), (np.int64(cycles),))


def host_arrays(seed: int = 0, dtype: str = "float16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in SHAPES.items()}


def on_host(x: Any) -> np.ndarray:
    bits: np.ndarray = x.view(f"u{x.dtype.itemsize}").get()
    return bits.view(x.dtype)


def step(arrays: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Forward and backward; every result by name."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    return {"out": out, "lse": lse, **gradients._asdict()}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The same bits, but for sums whose order is left to the GPU: dq, and the gradient of a bias."""
    for name, x in want.items():
        a, b = on_host(got[name]), on_host(x)
        if name in ("dq", "dbias"):
            a, b = a.astype(np.float64), b.astype(np.float64)
            assert abs(a - b).max() <= 1e-2 * abs(b).max(), name
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def expected(cupy: Any, host: dict[str, np.ndarray], **options: Any) -> dict[str, Any]:
    """The results on the default stream, with nothing else going on; they are compared with the host's own."""
    results = step({name: cupy.asarray(x) for name, x in host.items()}, **options)
    cupy.cuda.Device().synchronize()
    return results


def test_the_results_are_those_of_the_host(cupy: Any) -> None:
    """What the other tests here compare with."""
    host = host_arrays(dtype="float32")
    got, want = expected(cupy, host, causal=True), step(host, causal=True)
    for name, x in want.items():
        np.testing.assert_allclose(on_host(got[name]), x, atol=2e-4, err_msg=name)


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_side_stream_with_a_delayed_producer(cupy: Any, spin: Any, dtype: str, blocking: bool) -> None:
    """Producer, attention, its backward and a consumer follow each other on one stream, and the host waits for none."""
    host = host_arrays(dtype=dtype)
    want = expected(cupy, host, causal=True)
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    source = {name: cupy.asarray(x) for name, x in host.items()}
    with stream:
        arrays = {name: cupy.full_like(x, np.nan) for name, x in source.items()}
        step(arrays, causal=True)  # compiles, and leaves memory in the stream's pool
        copies = {name: cupy.empty_like(x) for name, x in want.items()}
    cupy.cuda.Device().synchronize()
    with stream:
        spin(HALF_A_SECOND)
        for name, x in source.items():
            arrays[name].data.copy_from_device_async(x.data, x.nbytes)
        results = step(arrays, causal=True)
        for name, x in results.items():
            copies[name].data.copy_from_device_async(x.data, x.nbytes)
        for x in results.values():
            x.data.memset_async(0xFF, x.nbytes)  # a kernel that ran later than here would undo it
        assert not stream.done, "the call waited for the device"
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
    stream.synchronize()
    assert_same(copies, want)
    for x in results.values():
        assert bool((x.view(np.uint8) == 0xFF).all()), "something was written after the call's place in the stream"


def test_two_streams_at_once(cupy: Any, spin: Any) -> None:
    """A call on one stream neither waits for another stream nor shares memory with its call."""
    hosts = [host_arrays(1), host_arrays(2)]
    wants = [expected(cupy, host, causal=True) for host in hosts]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in hosts]
    arrays = [{name: cupy.asarray(x) for name, x in host.items()} for host in hosts]
    for stream, one in zip(streams, arrays, strict=True):
        with stream:
            kept = [step(one, causal=True) for _ in range(2)]  # leaves memory for two results in the stream's pool
            del kept
    cupy.cuda.Device().synchronize()
    with streams[0]:
        spin(HALF_A_SECOND)
    results: list[dict[str, Any]] = [{}, {}]
    for _ in range(3):
        for i, stream in enumerate(streams):
            with stream:
                results[i] = step(arrays[i], causal=True)
    streams[1].synchronize()
    assert not streams[0].done
    streams[0].synchronize()
    for got, want in zip(results, wants, strict=True):
        assert_same(got, want)


def test_the_hosts_work_does_not_wait(cupy: Any, spin: Any) -> None:
    """On the default stream as well a call returns before the device has finished."""
    arrays = {name: cupy.asarray(x) for name, x in host_arrays().items()}
    bias = cupy.zeros((200, 300), np.float16)
    modifiers = (KeyLengths(np.array([100, 300])), ALiBi(np.ones(4)))
    options = {"causal": True, "bias": bias, "modifiers": modifiers}
    step(arrays, **options)
    cupy.cuda.Device().synchronize()
    spin(HALF_A_SECOND)
    step(arrays, **options)
    assert not cupy.cuda.get_current_stream().done
    cupy.cuda.Device().synchronize()


# ---- graphs ----------------------------------------------------------------------------------------------------------

GRAPH_OPTIONS = ["plain", "causal", "mask", "bias", "modifiers"]


def graph_options(cupy: Any, what: str) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": cupy.asarray(rng.random((200, 300)) < 0.7)},
        "bias": {"bias": cupy.asarray(rng.standard_normal((4, 200, 300)).astype(np.float16))},
        "modifiers": {"modifiers": (ALiBi(np.full(4, 0.25)), KeyLengths(np.array([250, 100])))},
    }
    return options[what]


@pytest.mark.parametrize("what", GRAPH_OPTIONS)
def test_graph_replayed_with_new_data(cupy: Any, what: str) -> None:
    """Forward and backward, captured after a first call, give the right results for what the inputs hold at replay."""
    options = graph_options(cupy, what)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = {name: cupy.asarray(x) for name, x in host_arrays(0).items()}
        out = cupy.empty(SHAPES["dout"], np.float16)
        step(arrays, **options)
        stream.synchronize()
        stream.begin_capture()
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        same, lse = cuflash.attention(q, k, v, return_lse=True, out=out, **options)
        gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
        graph = stream.end_capture()
    assert same is out
    got = {"out": out, "lse": lse, **gradients._asdict()}
    hosts = [host_arrays(seed) for seed in (1, 2, 3)]
    for host in hosts:
        for name, x in host.items():
            arrays[name].set(x, stream=stream)
        graph.launch(stream)
        stream.synchronize()
        found = {name: on_host(x) for name, x in got.items()}
        assert_same({name: cupy.asarray(x) for name, x in found.items()}, expected(cupy, host, **options))


def test_graph_of_several_layers(cupy: Any) -> None:
    """The output of one call is the query of the next, and freed workspace is used again inside the graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    shape = (2, 4, 200, 64)
    host = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed in (0, 1, 2)]

    def layers(x: Any, k: Any, v: Any) -> Any:
        pulls = []
        for _ in range(3):
            x, vjp = cuflash.attention_vjp(x, k, v, causal=True)
            pulls.append(vjp)
        g, dk, dv = x, 0, 0
        for vjp in reversed(pulls):
            gradients = vjp(g)
            g, dk, dv = gradients.dq, gradients.dk + dk, gradients.dv + dv
        return x, g, dk, dv

    with stream:
        arrays = [cupy.zeros(shape, np.float32) for _ in host]
        layers(*arrays)
        stream.synchronize()
        stream.begin_capture()
        results = layers(*arrays)
        graph = stream.end_capture()
        for array, x in zip(arrays, host, strict=True):
            array.set(x, stream=stream)
        graph.launch(stream)
        stream.synchronize()
        found = [x.get(stream=stream) for x in results]
    for got, want in zip(found, layers(*host), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3 * abs(want).max())


# ---- devices ---------------------------------------------------------------------------------------------------------


def second_device(cupy: Any) -> int:
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {count}")
    return 1


def test_the_current_device_and_stream_are_left_alone(cupy: Any) -> None:
    arrays = {name: cupy.asarray(x) for name, x in host_arrays().items()}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        device = cupy.cuda.Device().id
        step(arrays)
        assert cupy.cuda.Device().id == device
        assert cupy.cuda.get_current_stream() == stream
        with pytest.raises(ArgumentError):
            cuflash.attention(arrays["q"], arrays["k"], arrays["v"], window=(-5, 0))
        assert cupy.cuda.Device().id == device
        assert cupy.cuda.get_current_stream() == stream
    cupy.cuda.Device().synchronize()


def test_arrays_on_another_device_than_the_current_one(cupy: Any) -> None:
    other = second_device(cupy)
    host = host_arrays()
    want = expected(cupy, host, causal=True)
    with cupy.cuda.Device(other):
        arrays = {name: cupy.asarray(x) for name, x in host.items()}
        cupy.cuda.Device().synchronize()
    assert cupy.cuda.Device().id != other
    lengths = KeyLengths(np.array([100, 300]))
    got = step(arrays, causal=True)
    assert all(x.device.id == other for x in got.values())
    assert cupy.cuda.Device().id != other
    with cupy.cuda.Device(other):
        cupy.cuda.Device().synchronize()
        found = {name: x.get() for name, x in got.items()}
    assert_same({name: cupy.asarray(x) for name, x in found.items()}, want)
    for place in (other, cupy.cuda.Device().id):  # one modifier on both devices
        with cupy.cuda.Device(place):
            moved = {name: cupy.asarray(x) for name, x in host.items()}
            assert step(moved, modifiers=(lengths,))["out"].device.id == place


def test_arrays_on_two_devices_are_refused(cupy: Any) -> None:
    other = second_device(cupy)
    q = cupy.zeros((1, 4, 8), np.float32)
    with cupy.cuda.Device(other):
        k = cupy.zeros((1, 4, 8), np.float32)
    with pytest.raises(ArgumentError, match=f"cuda:0.*cuda:{other}"):
        cuflash.attention(q, k, k)


def test_arrays_on_host_and_device_are_refused(cupy: Any) -> None:
    q, k = cupy.zeros((1, 4, 8), np.float32), np.zeros((1, 4, 8), np.float32)
    with pytest.raises(ArgumentError, match="one kind in one place"):
        cuflash.attention(q, k, k)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_on_streams_of_their_own(cupy: Any) -> None:
    """Eight threads, each with its stream and data, ten calls each."""
    hosts = [host_arrays(seed) for seed in range(8)]
    wants = [expected(cupy, host, causal=True) for host in hosts]

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            arrays = {name: cupy.asarray(x) for name, x in hosts[i].items()}
            for _ in range(10):
                got = step(arrays, causal=True)
            stream.synchronize()
            assert_same(got, wants[i])

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(work, range(8)):
            pass  # raises what a thread raised


# ---- processes and the kernel cache ----------------------------------------------------------------------------------


@contextmanager
def started(cache: Path | str, processes: int, threads: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of cold_start.py that have imported everything and wait."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "cold_start.py"), str(threads)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(processes)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def cold_start(cache: Path | str, processes: int = 1, threads: int = 1) -> list[dict[str, Any]]:
    """What processes say that all begin to compute at once."""
    with started(cache, processes, threads) as running:
        for process in running:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != "ready\n":
                raise AssertionError(f"{line}{process.communicate()[1]}")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate(timeout=120) for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in said]


def one_result(reports: list[dict[str, Any]], warnings: int = 0) -> str:
    """The digest that the first threads of all processes agree on."""
    results = {report["results"][0] for report in reports}
    assert len(results) == 1, results
    for report in reports:
        assert len(report["warnings"]) == warnings, report["warnings"]
    (result,) = results
    assert len(result) == 64, result  # anything else is an error's text
    return str(result)


def cubins(cache: Path) -> dict[Path, int]:
    """The files of a cache, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache folder with the kernels of one cold start, and its digest."""
    cache = tmp_path_factory.mktemp("warm")
    return cache, one_result(cold_start(cache))


def test_eight_threads_use_the_library_first_at_once(tmp_path: Path, warm: tuple[Path, str]) -> None:
    (report,) = cold_start(tmp_path / "cache", threads=8)
    assert not report["warnings"]
    results = report["results"]
    assert all(len(result) == 64 for result in results), results
    by_options: dict[str, set[str]] = {}
    for i, result in enumerate(results):
        by_options.setdefault(str(OPTIONS[i % len(OPTIONS)]), set()).add(result)
    assert all(len(found) == 1 for found in by_options.values())
    assert len({*results}) == len(by_options)
    assert results[0] == warm[1]


def test_eight_processes_start_cold_at_once(tmp_path: Path, warm: tuple[Path, str]) -> None:
    cache = tmp_path / "cache"
    assert one_result(cold_start(cache, processes=8)) == warm[1]
    assert {path.name for path in cubins(cache)} == {path.name for path in cubins(warm[0])}


def test_the_next_process_compiles_nothing(warm: tuple[Path, str]) -> None:
    cache, digest = warm
    before = cubins(cache)
    assert before
    assert one_result(cold_start(cache)) == digest
    assert cubins(cache) == before


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "noise"])
def test_a_damaged_cache_file_is_compiled_again(tmp_path: Path, warm: tuple[Path, str], damage: str) -> None:
    for path in cubins(warm[0]):
        content = bytearray(path.read_bytes())
        if damage == "truncated":
            del content[len(content) // 2 :]
        elif damage == "emptied":
            content.clear()
        elif damage == "changed":
            content[len(content) // 2] ^= 0xFF
        else:
            content[:] = np.random.default_rng(0).bytes(len(content))
        (tmp_path / path.name).write_bytes(content)
    damaged = {path: path.read_bytes() for path in cubins(tmp_path)}
    assert one_result(cold_start(tmp_path)) == warm[1]
    assert all(path.read_bytes() != content for path, content in damaged.items())


def test_a_cache_folder_that_cannot_be_written(warm: tuple[Path, str], tmp_path: Path) -> None:
    """The process warns once, names the variable, and computes; /proc takes no file, whoever asks."""
    if not Path("/proc/self").is_dir():
        pytest.skip("needs /proc, a folder in which not even root can make a file")
    (report,) = cold_start("/proc")
    assert one_result([report], warnings=1) == warm[1]
    assert "CUPY_CACHE_DIR" in report["warnings"][0]


def test_a_cache_folder_that_is_lost_after_the_import(warm: tuple[Path, str], tmp_path: Path) -> None:
    """CuPy itself refuses to be imported where it cannot make the folder; this one becomes a file later."""
    cache = tmp_path / "cache"
    with started(cache, 1) as (process,):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        cache.rmdir()
        cache.write_text("not a folder")
        output, errors = process.communicate("go\n", timeout=120)
        assert process.returncode == 0, errors
    report = json.loads(output)
    assert one_result([report], warnings=1) == warm[1]
    assert "CUPY_CACHE_DIR" in report["warnings"][0]

"""The command line: what it prints, its exit codes, and that its verdict can be FAIL."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import cli, inspection, picture, problem, reference
from cuflash.cli import bench, machine, measure, plain, selfcheck, text
from cuflash.cli.shape import Shape, parse

ROOT = Path(__file__).parents[1]
SMALL = selfcheck.Scope(Shape(1, 4, 2, 17, 23, 8, 8), Shape(1, 1, 1, 32, 32, 8, 8), ("float32",), 1)
DTYPES = list(problem.DTYPES)


@pytest.fixture
def on_cpu(monkeypatch):
    """A machine without a GPU, whatever this one has, and little to compute."""
    bare = machine.this_machine()
    bare = machine.Machine(**{**vars(bare), "devices": (), "no_gpu": "no NVIDIA driver"})
    for module in (machine, selfcheck, bench):
        monkeypatch.setattr(module, "this_machine", lambda: bare)
    monkeypatch.setattr("cuflash.cli.info.this_machine", lambda: bare)
    monkeypatch.setattr("cuflash.cli.explain.this_machine", lambda: bare)
    monkeypatch.setattr("cuflash.cli.weights.this_machine", lambda: bare)
    monkeypatch.setattr(selfcheck, "ON_CPU", SMALL)
    monkeypatch.setattr(bench, "ON_CPU", (SMALL.times,))


def run(capsys, *arguments):
    """Exit code, stdout and stderr of one command."""
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- self-check ----
def test_the_whole_self_check_in_a_process_of_its_own():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "cuflash"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert len(done.stderr.splitlines()) <= 4, f"too much on stderr: {done.stderr}"


@pytest.mark.usefixtures("on_cpu")
def test_self_check_prints_what_a_reader_wants_to_know(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for word in (
        *DTYPES,
        "numpy",
        "not mma",
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
        "forward",
        "backward",
        "whole step",
        "plain",
    ):
        assert word in out, f"{word!r} is missing in:\n{out}"


@pytest.mark.usefixtures("on_cpu")
def test_self_check_as_json(capsys):
    code, out, _ = run(capsys, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["verdict"] == "PASS"
    assert [check["dtype"] for check in report["errors"]] == DTYPES
    assert all(set(check["errors"]) == {"out", "lse", "dq", "dk", "dv"} for check in report["errors"])
    assert {(row["system"], row["direction"]) for row in report["rows"]} == {
        (system, direction) for system in ("cuflash", "plain") for direction in ("forward", "backward", "step")
    }
    assert all(row["ms"] > 0 and row["peak_bytes"] > 0 for row in report["rows"])
    assert report["versions"]["cuflash"] == cuflash.__version__
    assert {"gpu", "driver", "date", "versions", "command", "rows"} <= set(report)


@pytest.mark.parametrize("output", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.usefixtures("on_cpu")
def test_self_check_fails_on_a_wrong_result(monkeypatch, capsys, output):
    forward, backward = cuflash.attention, cuflash.attention_backward

    def slightly(x):
        return (x * np.float32(1.1)).astype(x.dtype)

    def wrong_forward(*arrays, **options):
        out, lse = forward(*arrays, **options)
        return (slightly(out) if output == "out" else out), (slightly(lse) if output == "lse" else lse)

    def wrong_backward(dout, q, k, v, out, lse, **options):
        grads = backward(dout, q, k, v, *forward(q, k, v, causal=True, return_lse=True), **options)
        return grads._replace(**{output: slightly(getattr(grads, output))}) if output[0] == "d" else grads

    monkeypatch.setattr(cuflash, "attention", wrong_forward)
    monkeypatch.setattr(cuflash, "attention_backward", wrong_backward)
    code, out, _ = run(capsys)
    assert code == 1
    assert out.splitlines()[-1].startswith("FAIL")
    assert f"float64 {output} beyond tolerance" in out.splitlines()[-1]
    others = [name for name in selfcheck.OUTPUTS if name != output]
    assert not any(f"float64 {name} beyond" in out for name in others)


@pytest.mark.usefixtures("on_cpu")
def test_self_check_fails_on_nan_and_on_what_breaks(monkeypatch, capsys):
    forward = cuflash.attention

    def broken(q, k, v, **options):
        if q.dtype == np.float32:
            raise cuflash.CompileError("entry did not compile:\nline 3")
        out, lse = forward(q, k, v, **options)
        if q.dtype == np.float64:
            out[0, 0, 0, 0] = np.nan
        return out, lse

    monkeypatch.setattr(cuflash, "attention", broken)
    code, out, _ = run(capsys)
    assert code == 1
    assert "float32: FAIL: CompileError: entry did not compile: line 3" in out
    assert "float64 out beyond tolerance" in out.splitlines()[-1]


@pytest.mark.usefixtures("on_cpu")
def test_a_dtype_that_is_refused_is_no_failure(monkeypatch, capsys):
    forward = cuflash.attention

    def refusing(q, k, v, **options):
        if str(q.dtype) == "bfloat16":
            raise cuflash.UnsupportedError("bfloat16 needs compute capability 8.0")
        return forward(q, k, v, **options)

    monkeypatch.setattr(cuflash, "attention", refusing)
    code, out, _ = run(capsys)
    assert code == 0
    assert "bfloat16: not offered here: bfloat16 needs compute capability 8.0" in out


# ---- the other commands ----
@pytest.mark.usefixtures("on_cpu")
def test_info(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert f"cuflash         {cuflash.__version__}" in out
    for line in (
        "gpu             none: no NVIDIA driver",
        "backend numpy   available",
        "backend mma     no NVIDIA driver",
    ):
        assert line in out
    code, out, _ = run(capsys, "info", "--json")
    assert code == 0
    assert json.loads(out)["backends"]["numpy"] == ""


def test_info_without_cupy(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libnothing.so: cannot open shared object file')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "info"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "none: CuPy cannot be imported: libnothing.so" in done.stdout


@pytest.mark.usefixtures("on_cpu")
def test_explain(capsys):
    code, out, _ = run(
        capsys, "explain", "1,8,2,4096,4096,64,128", "--causal", "--window", "none", "3", "--softcap", "20"
    )
    assert code == 0
    assert "numpy" in out
    code, out, err = run(capsys, "explain", "1,8,3,16,16,64")
    assert (code, out) == (2, "")
    assert "heads of q (8)" in err


def test_explain_measures_what_it_explains(capsys):
    code, out, _ = run(capsys, "explain", "1,2,1,40,50,16", "--dtype", "float32", "--causal", "--measure")
    assert code == 0
    assert float(re.search(r"^measured: +([0-9.e-]+) ms\b", out, re.MULTILINE)[1]) > 0
    code, _, err = run(capsys, "explain", "1,2,1,40,50,16", "--capability", "90", "--measure")
    assert code == 2
    assert "only described" in err


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("capability", [[], ["--capability", "80"]], ids=["here", "described"])
def test_explain_draws_what_it_explains(monkeypatch, capsys, tmp_path, capability):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    painted = {}
    for name in ("attention", "tiles", "recurrence", "costs"):
        paint = getattr(picture, f"paint_{name}")
        monkeypatch.setattr(
            picture,
            f"paint_{name}",
            lambda *given, name=name, paint=paint: (painted.update({name: given}), paint(*given)),
        )
    file = tmp_path / "explained.png"
    words = ["1,2,1,100,130,16", "--causal", "--window", "40", "none", "--dtype", "float16", *capability]
    code, out, err = run(capsys, "explain", *words, "--picture", str(file))
    assert code == 0, err
    assert err.splitlines()[-1] == f"drawn into {file}"
    assert file.read_bytes().startswith(b"\x89PNG")
    q, k, v, _ = Shape(1, 1, 1, 100, 130, 16, 16).arrays("float16")
    options = {"causal": True, "window": (40, None)}
    _, states, block_q, block_k = painted["tiles"]
    call = problem.describe(q, k, v, **options)
    np.testing.assert_array_equal(states, inspection.tile_states(call, (0, 0), block_q, block_k))
    if capability:
        assert f"{block_q} x {block_k}" in next(line for line in out.splitlines() if "cuflash_forward" in line)
    _, weights, _, rows, _ = painted["attention"]
    np.testing.assert_array_equal(weights, cuflash.attention_weights(q, k, rows, **options)[0])
    assert rows[0] == 0
    assert rows[-1] == 99
    _, _, seen, block = painted["recurrence"]
    assert block == block_k
    assert (np.flatnonzero(seen) == np.arange(99 + 30 - 40, 130)).all()
    assert {(row["system"], row["seq_k"]) for row in painted["costs"][1]} == {
        (system, n) for system in ("cuflash", "plain") for n in (16, 32, 64, 128)
    }


@pytest.mark.usefixtures("on_cpu")
def test_explain_says_what_it_cannot_draw(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    code, _, err = run(capsys, "explain", "1,1,1,8,8,4", "--picture", str(tmp_path / "x.nonsense"))
    assert code == 2
    assert "x.nonsense: Format 'nonsense' is not supported" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(capsys, "explain", "1,1,1,8,8,4", "--picture", "x.png")
    assert (code, out) == (2, "")
    assert "--picture needs matplotlib: pip install 'cuflash[plot]'" in err


@pytest.mark.parametrize(
    ("capability", "dtype", "backend", "kernel"),
    [
        (75, "float16", "mma", "mma"),
        (75, "float32", "simt", "simt"),
        (80, "float32", "mma", "split"),
        (90, "float32", "wgmma", "split"),
    ],
)
def test_explain_describes_a_gpu_that_is_not_there(capsys, capability, dtype, backend, kernel):
    shape = "2,8,2,1000,1001,64"
    code, out, _ = run(capsys, "explain", shape, "--capability", str(capability), "--dtype", dtype, "--causal")
    assert code == 0
    assert f"backend     {backend}\n" in out
    assert f"compute capability {capability / 10}" in out
    assert f"cuflash_forward_{kernel}{'_wgmma' * (backend == 'wgmma')}_d64_" in out
    assert re.search(f"cuflash_backward_{kernel}(_wgmma)?_d64_", out)
    assert "workspace of the backward: " in out


def test_explain_counts_tiles_where_blocks_are_as_many_as_a_device_holds(capsys):
    def lines(*words: str) -> list[str]:
        code, out, _ = run(capsys, "explain", *words, "--capability", "90", "--backend", "wgmma")
        assert code == 0
        return [next(x for x in out.splitlines() if f"cuflash_{d}_wgmma" in x) for d in ("forward", "backward")]

    forward, backward = lines("2,8,2,1000,1001,128")
    assert f"{2 * 8 * -(-1000 // 128)} tiles" in forward
    assert f"{2 * 2 * -(-1001 // 128)} tiles" in backward
    forward, backward = lines("1,1,1,16384,16384,128", "--causal")  # where blocks of the backward end with their tile
    assert "tiles" in forward
    assert "tiles" not in backward


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        (["--packed"], "q (4, 120, 16), k (2, 150, 16), v (2, 150, 24), scale 0.25, Causal(), Packed(count=3)"),
        (["--decode"], "q (3, 4, 40, 16), k (3, 2, 50, 16), v (3, 2, 50, 24), scale 0.25, Causal(), bottom_right"),
        (["--decode", "--page-size", "8"], "v (3, 2, 56, 24), scale 0.25, Causal(), bottom_right, bhsd, 21 pages of 8"),
    ],
    ids=str,
)
def test_explain_takes_packed_sequences_and_caches(capsys, words, shapes):
    shape = ["3,4,2,40,50,16,24", "--causal", "--dtype", "float16"]
    code, out, err = run(capsys, "explain", *shape, *words, "--measure")
    assert code == 0, err
    assert shapes in out
    assert float(re.search(r"^measured: +([0-9.e-]+) ms\b", out, re.MULTILINE)[1]) > 0
    code, out, err = run(capsys, "explain", *shape, *words, "--capability", "90")
    assert code == 0, err
    assert shapes in out
    lines = out.splitlines()
    directions = ("forward", "backward") if "--packed" in words else ("decode",)
    assert [line.partition(":")[0] for line in lines[-len(directions) :]] == [
        f"workspace of the {d}" for d in directions
    ]
    kernels = [line.split() for line in lines if line.startswith("cuflash_")]
    main = {d: next(k for k in kernels if k[0].startswith(f"cuflash_{d}_") and "x" in k) for d in directions}
    if "--decode" in words:
        assert main["decode"][2] == "x"
        assert main["decode"][5:7] == ["a", "multiprocessor"]
        assert ("tensor maps" in out) == ("--page-size" not in words)
        assert lines[-1].endswith("for each block")
    else:
        assert all("packed" in k[0] for k in kernels)
        assert "whatever their lengths" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--page-size", "8"], "--page-size 8"),
        (["--packed", "--page-size", "8"], "--page-size 8"),
        (["--decode", "--page-size", "0"], "at least 1"),
        (["--packed", "--picture", "x.png"], "leave out --packed"),
        (["--decode", "--picture", "x.png"], "leave out --decode"),
        (["--decode", "--packed"], "not allowed with argument"),
        (["--decode", "--causal", "top_left"], "causal='top_left'"),
    ],
    ids=str,
)
def test_explain_refuses_what_does_not_go_together(capsys, words, reason):
    code, out, err = run(capsys, "explain", "1,2,1,8,8,8", *words)
    assert (code, out) == (2, "")
    assert reason in err


def test_explain_says_why_no_backend_takes_a_call(capsys):
    code, _, err = run(capsys, "explain", "1,1,1,8,8,8", "--capability", "75", "--dtype", "bfloat16")
    assert code == 2
    assert "bfloat16 needs compute capability 8.0" in err
    code, _, err = run(capsys, "explain", "1,1,1,8,8,8", "--capability", "42")
    assert code == 2
    assert "capability=42" in err


@pytest.mark.usefixtures("on_cpu")
def test_weights_of_random_arrays(capsys):
    code, out, _ = run(capsys, "weights", "2,3,1,20,30,8", "--causal", "--entry", "1", "--window", "9", "none")
    assert code == 0
    q, k, _, _ = parse("2,3,1,20,30,8").arrays("float32")
    want = cuflash.attention_statistics(q[1], k[1], k[1], causal=True, window=(9, None))
    lines = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert len(lines) == 3
    for head, (name, largest, entropy, least, most, favourite, share) in enumerate(lines):
        assert name == f"{head}"
        assert float(largest) == pytest.approx(want.maximum[head].max(), rel=1e-3)
        figures = want.entropy[head]
        assert [float(x) for x in (entropy, least, most)] == pytest.approx(
            [figures.mean(), figures.min(), figures.max()], abs=1e-3
        )
        assert int(favourite) == want.column_sums[head].argmax()
        assert share == f"{want.column_sums[head].max() / 20:.1%}"
    assert "all 30 keys alike have 3.401" in out


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_files_are_drawn(capsys, tmp_path, dtype):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    q, k, _, _ = parse("1,2,2,9,11,8").arrays(dtype)
    files = [str(tmp_path / f"{name}.npy") for name in "qk"]
    for file, x in zip(files, (q, k), strict=True):
        np.save(file, x)
    picture = tmp_path / "weights.png"
    code, out, err = run(capsys, "weights", "--arrays", *files, "--rows", "0", "-1", "--plot", str(picture))
    assert (code, err) == (0, f"drawn into {picture}\n")
    assert f"{files[0]} and {files[1]}, {dtype}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(capsys, "weights", "1,1,1,5,5,4", "--plot", str(picture))[0] == 0


@pytest.mark.usefixtures("on_cpu")
def test_weights_refuses_what_it_cannot_read(capsys, tmp_path):
    file = tmp_path / "text.npy"
    file.write_text("no array")
    flat = tmp_path / "flat.npy"
    np.save(flat, np.zeros((3, 4), np.float32))
    for arguments, message in (
        ((), "give either a shape, for random arrays, or --arrays"),
        (("1,1,1,2,2,4", "--arrays", "q.npy", "k.npy"), "give either a shape"),
        (("--arrays", str(file), str(file)), "text.npy"),
        (("--arrays", str(flat), str(flat)), "(..., heads, seq, head_dim) is needed"),
        (("--arrays", str(tmp_path / "none.npy"), str(file)), "none.npy"),
        (("2,1,1,2,2,4", "--entry", "2"), "--entry 2: the batch has 2 entries"),
        (("1,1,1,2,2,4", "--rows", "5", "--plot", "x.png"), "rows contains 5"),
    ):
        code, _, err = run(capsys, "weights", *arguments)
        assert code == 2
        assert message in err


@pytest.mark.usefixtures("on_cpu")
def test_bench_prints_and_writes_rows(capsys, tmp_path):
    file = tmp_path / "rows.json"
    shapes = ("1,2,1,9,11,8", "1,1,1,8,8,4,6")
    code, out, _ = run(
        capsys, "bench", "--shapes", *shapes, "--repeat", "1", "--plain", "--causal", "--json", str(file)
    )
    assert code == 0
    assert "batch 1, heads 2/1, seq 9/11, head_dim 8" in out
    result = json.loads(file.read_text())
    assert {"gpu", "driver", "date", "versions", "command", "rows"} <= set(result)
    assert len(result["rows"]) == 2 * 2 * 3
    row = result["rows"][0]
    named = {"system", "backend", "direction", "dtype", "causal", "ms", "tflops", *Shape.__dataclass_fields__}
    assert named <= set(row)
    assert row["backend"] == "numpy"
    assert row["tflops"] == pytest.approx(Shape(1, 2, 1, 9, 11, 8, 8).operations("forward", True) / row["ms"] / 1e9)


@pytest.mark.usefixtures("on_cpu")
def test_bench_takes_one_direction_and_dtype(capsys):
    code, out, _ = run(capsys, "bench", "--directions", "backward", "--dtypes", "float64", "--repeat", "1")
    assert code == 0
    assert "backward" in out
    assert "float64" in out
    assert "forward" not in out


@pytest.mark.usefixtures("on_cpu")
def test_bench_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    file = tmp_path / "bars.png"
    code, _, _ = run(capsys, "bench", "--repeat", "1", "--plot", str(file))
    assert code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("on_cpu")
def test_bench_says_how_to_get_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "bench", "--plot", "x.png")
    assert code == 2
    assert "pip install 'cuflash[plot]'" in err


@pytest.mark.usefixtures("on_cpu")
def test_bench_keeps_the_other_rows_when_plain_attention_has_no_memory(monkeypatch, capsys):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(plain.PlainAttention, "forward", full)
    code, out, _ = run(capsys, "bench", "--repeat", "1", "--plain")
    assert code == 0
    assert "plain: MemoryError" in out
    assert "numpy" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["bench", "--shapes", "1,2"], "'1,2' is no shape"),
        (["bench", "--shapes", "1,2,3,4,5,0"], "'1,2,3,4,5,0' is no shape"),
        (["bench", "--directions", "sideways"], "--directions sideways: must be some of forward,backward,step"),
        (["bench", "--repeat", "0"], "--repeat 0: must be at least 1"),
        (["bench", "--dtypes", "int8"], "invalid choice: 'int8'"),
        (["bench", "--backend", "mma"], "backend='mma' computes on an NVIDIA GPU"),
        (["bench", "--repeat", "1", "--json", "/nonexistent/rows.json"], "No such file or directory"),
        (["explain"], "the following arguments are required"),
        (["explain", "1,1,1,4,4,4", "--window", "x", "1"], "'x' must be an integer or none"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_errors_are_one_line_and_code_2(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("cuflash: ")
    assert message in last
    assert len(err.splitlines()) <= 2, err  # at most the progress line before it


def test_version_and_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"cuflash {cuflash.__version__}\n")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


# ---- what it measures with ----
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 9), (9, 5), (6, 6)])
def test_plain_attention_is_attention(causal, seq_q, seq_k):
    q, k, v, dout = (x.astype(np.float64) for x in Shape(2, 6, 2, seq_q, seq_k, 8, 5).arrays("float64"))
    call = problem.describe(q, k, v, causal=causal)
    dense = plain.PlainAttention(np, causal)
    out, lse, p = dense.forward(q, k, v)
    grads = dense.backward(dout, q, k, v, out, p)
    wanted = (*reference.forward(call), *reference.backward(call, dout))
    for found, exact in zip((out, lse, *grads), wanted, strict=True):
        assert found.shape == exact.shape
        assert plain.error(found, exact) < 1e-14


def test_error_tells_finite_from_not():
    exact = np.array([1.0, -np.inf])
    assert plain.error(np.array([1.5, -np.inf]), exact) == 0.5
    for wrong in ([np.nan, -np.inf], [1.0, np.inf], [1.0, 0.0], [np.inf, -np.inf]):
        assert plain.error(np.array(wrong), exact) == np.inf


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(4, 4), (3, 7), (7, 3)])
def test_operations_count_visible_pairs(causal, seq_q, seq_k):
    count = sum(
        0.5 if causal and j == i + seq_k - seq_q else float(not causal or j < i + seq_k - seq_q)
        for i in range(seq_q)
        for j in range(seq_k)
    )
    shape = Shape(2, 3, 3, seq_q, seq_k, 8, 5)
    assert shape.operations("forward", causal) == 2 * 3 * count * 2 * (8 + 5)
    assert shape.operations("backward", causal) == 2 * 3 * count * 2 * (3 * 8 + 2 * 5)
    whole = shape.operations("forward", causal) + shape.operations("backward", causal)
    assert shape.operations("step", causal) == whole


def test_clock_sees_the_peak_and_not_what_was_there_before():
    kept = np.ones(1 << 20)
    clock = measure.Clock(np)

    def call():
        np.ones(1 << 18)  # 2 MiB, gone again
        return np.ones(1 << 17)  # 1 MiB

    assert 2 << 20 <= clock.peak_bytes(call) < (2 << 20) + 50_000
    assert kept.nbytes > clock.peak_bytes(call)


def test_clock_reports_the_median():
    waits = iter([0.0, 0.5, 0.02, 0.0])  # the first is the warm-up
    clock = measure.Clock(np)
    import time

    assert 19 < clock.milliseconds(lambda: time.sleep(next(waits)), repeat=3) < 400


def test_shapes_are_read():
    assert parse("1,2,1,3,4,5") == Shape(1, 2, 1, 3, 4, 5, 5)
    assert parse("1,2,1,3,4,5,6") == Shape(1, 2, 1, 3, 4, 5, 6)
    for words in ("", "1,2,3,4,5", "1,2,3,4,5,6,7,8", "a,2,1,3,4,5", "1,2,1,3,4,-5"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(words)


def test_numbers_keep_the_digits_that_matter():
    assert [text.milliseconds(x) for x in (0.01234, 12.34, 1234.5, None)] == ["0.012 ms", "12.3 ms", "1234 ms", "-"]
    assert [text.size(x) for x in (5, 2048, 20 << 20, 3 << 30, None)] == ["5 B", "2.0 KiB", "20 MiB", "3.0 GiB", "-"]
    assert [text.rate(x) for x in (0.0123, 612.3, None)] == ["12.3 GFLOP/s", "612 TFLOP/s", "-"]
    assert [text.ratio(3, 2), text.ratio(None, 2), text.ratio(3, None)] == ["1.50x", "-", "-"]


def test_progress_is_quiet_away_from_a_terminal():
    stream = io.StringIO()
    progress = text.Progress(stream)
    for detail in "abc":
        progress("checking", detail)
    progress("timing", "d")
    progress.done()
    assert stream.getvalue() == "checking ...\ntiming ...\n"


def test_two_cupy_packages_are_noticed(monkeypatch):
    class Distribution:
        def __init__(self, name):
            self.metadata = {"Name": name}

    found = [Distribution("cupy-cuda12x"), Distribution("cupy-cuda13x"), Distribution("numpy")]
    monkeypatch.setattr(machine.metadata, "distributions", lambda: found)
    assert machine.doubled_cupy() == ("more than one CuPy is installed (cupy-cuda12x, cupy-cuda13x): keep one",)
    monkeypatch.setattr(machine.metadata, "distributions", lambda: found[1:])
    assert machine.doubled_cupy() == ()

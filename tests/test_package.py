"""What is shipped: the wheel, the entry points, and documents whose examples and tables are true."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import problem, reference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/hopper.md"]
SHELL_SCRIPTS = [".ci/run", "scripts/run.sh", "scripts/test.sh", "scripts/environment.sh"]
SOURCES = {str(path.relative_to(ROOT)) for path in (ROOT / "cuflash").rglob("*.cu*")}


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


tables = load_script("tables")
bench = load_script("bench")
environments = load_script("environments")


# ---- the wheel ----
@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as pip builds it, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "scripts")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(checkout)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_is_pure_python_and_small(wheel):
    assert wheel.name == f"cuflash-{cuflash.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "cuflash").rglob("*.py")}
    assert SOURCES, "no CUDA source was found in the checkout"
    assert modules | SOURCES | {"cuflash/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"cuflash", f"cuflash-{cuflash.__version__}.dist-info"}


def test_the_wheel_asks_for_what_the_package_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"cuflash-{cuflash.__version__}.dist-info/METADATA").decode()
    wanted = {
        "Requires-Python: >=3.10",
        "Requires-Dist: numpy>=2.2.5",
        "Requires-Dist: ml-dtypes>=0.5",
        "Requires-Dist: cupy-cuda12x>=14.0; extra == 'cuda12'",
        "Requires-Dist: cuda-toolkit[cudart,nvrtc]<13,>=12.9; extra == 'cuda12'",
        "Requires-Dist: cupy-cuda13x>=14.0; extra == 'cuda13'",
        "Requires-Dist: cuda-toolkit[cudart,nvrtc]==13.*; extra == 'cuda13'",
        "Requires-Dist: jax<0.12,>=0.6.2; extra == 'jax'",
    }
    assert wanted <= set(metadata.splitlines())
    always = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert len(always) == 2, f"more is required than NumPy and ml_dtypes: {always}"


def test_the_wheel_computes(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import numpy, cuflash; assert cuflash.__file__.startswith(__import__('sys').argv[1])\n"
        "from cuflash import source; assert 'mma' in source.read('forward_mma.cu')\n"
        "x = numpy.ones((1, 2, 3)); assert (cuflash.attention(x, x, x) == 1).all()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_source_distribution_makes_the_same_wheel(tmp_path):
    made, sdist = environments.build(ROOT, tmp_path / "dist")
    environments.check_wheel(made)
    environments.check_sdist(sdist, made, tmp_path)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("cuflash/more.py", "")
    with pytest.raises(SystemExit, match=r"makes another wheel; these files differ: cuflash/more\.py"):
        environments.check_sdist(sdist, made, tmp_path / "again")


def test_a_wheel_that_no_registry_takes(wheel, tmp_path, monkeypatch):
    bad = tmp_path / wheel.name
    for old, new in ((b"Metadata-Version: ", b"Metadata-Version: x"), (b"text/markdown", b"text/plain")):
        with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(bad, "w") as to:
            for name in archive.namelist():
                to.writestr(
                    name, archive.read(name).replace(old, new) if name.endswith("METADATA") else archive.read(name)
                )
        with pytest.raises(SystemExit, match=r"^error: "):
            environments.check_wheel(bad)
    monkeypatch.setattr(environments, "LARGEST", 1000)
    with pytest.raises(SystemExit, match="must have less than 1000"):
        environments.check_wheel(wheel)


def test_fresh_environments_have_the_oldest_and_the_newest_libraries():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert environments.oldest(project) == ["numpy==2.2.5", "ml_dtypes==0.5"]
    plans = list(environments.plans([10, 12]))
    assert [plan[:2] for plan in plans] == [
        ("oldest libraries", 10),
        ("newest libraries", 10),
        ("newest libraries", 12),
    ]
    assert [bool(plan[2]) for plan in plans] == [True, False, False]
    with pytest.raises(SystemExit, match="name>=version"):
        environments.oldest('dependencies = ["numpy>=2.0", "other"]')
    assert sys.version_info[1] in environments.interpreters()


# ---- entry points ----
@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_parse_and_are_strict(script):
    path = ROOT / script
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if script != "scripts/environment.sh":  # which is sourced by strict ones
        assert "set -euo pipefail" in path.read_text().splitlines()
        assert path.stat().st_mode & 0o100, f"{script} cannot be executed"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    done = subprocess.run(["shellcheck", "-x", *SHELL_SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("version", "devices", "extra"),
    [
        (13000, 1, "cuda13"),
        (13020, 8, "cuda13"),
        (12080, 1, "cuda12"),
        (12000, 1, "cuda12"),
        (11080, 1, ""),
        (13000, 0, ""),
    ],
)
def test_the_driver_decides_the_extra(monkeypatch, capsys, version, devices, extra):
    cupy_extra = load_script("cupy_extra")

    class Driver:
        def cuInit(self, _flags):  # noqa: N802
            return 0

        def cuDriverGetVersion(self, to):  # noqa: N802
            to._obj.value = version
            return 0

        def cuDeviceGetCount(self, to):  # noqa: N802
            to._obj.value = devices
            return 0

    monkeypatch.setattr(cupy_extra.sys, "platform", "linux")
    monkeypatch.setattr(cupy_extra.ctypes, "CDLL", lambda _name: Driver())
    cupy_extra.main()
    captured = capsys.readouterr()
    assert captured.out.strip() == extra
    assert captured.err


def test_no_driver_means_no_extra(monkeypatch, capsys):
    cupy_extra = load_script("cupy_extra")

    def missing(_name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cupy_extra.ctypes, "CDLL", missing)
    cupy_extra.main()
    assert capsys.readouterr().out == ""


ENVIRONMENT = """
set -euo pipefail
source scripts/environment.sh
python3() { echo "python3 $*" >>calls; if [[ $* == "-m venv"* ]]; then make_fake_venv; else command python3 "$@"; fi; }
PYTHON=python3
make_fake_venv() {
  mkdir -p .venv/bin
  printf '#!/bin/sh\\necho "venv python $*" >>%s/calls\\n' "$PWD" >.venv/bin/python
  chmod +x .venv/bin/python
}
prepare_environment "$@"
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which interpreters only write down that they were called."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def prepared(checkout, *extras):
    """Calls of pip that preparing the environment for these extras makes."""
    calls = checkout / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["bash", "-c", ENVIRONMENT, "prepare", *extras], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.rpartition("--editable ")[2] for line in calls.read_text().splitlines() if "pip install" in line]


def test_the_environment_is_made_once(checkout):
    assert prepared(checkout) == [str(checkout)]
    assert prepared(checkout) == []
    assert prepared(checkout, "cuda13", "test") == [f"{checkout}[cuda13,test]"]
    assert prepared(checkout, "cuda13", "test") == []
    assert prepared(checkout, "test") == []
    assert prepared(checkout) == []


def test_the_environment_follows_the_requirements(checkout):
    prepared(checkout, "test")
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text() + "\n[tool.other]\nx = 1\n")
    assert prepared(checkout, "test") == []
    project.write_text(project.read_text().replace("numpy>=2.2.5", "numpy>=2.3"))
    assert prepared(checkout, "test") == [f"{checkout}[test]"]


def test_another_cupy_means_another_environment(checkout):
    prepared(checkout, "cuda12")
    (checkout / ".venv" / "old").write_text("")
    assert prepared(checkout, "cuda13") == [f"{checkout}[cuda13]"]
    assert not (checkout / ".venv" / "old").exists()


@pytest.mark.parametrize("script", ["scripts/run.sh", "scripts/test.sh"])
def test_a_missing_interpreter_is_told_in_one_line(checkout, script):
    for name in ("run.sh", "test.sh", "cupy_extra.py"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts")
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nonexistent/python"}
    done = subprocess.run(
        ["bash", str(checkout / script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.10 or newer was found at PYTHON=/nonexistent/python")
    assert len(done.stderr.splitlines()) == 1
    assert not (checkout / ".venv").exists()


# ---- documents ----
def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_readme_examples_run():
    examples = blocks("python")
    assert len(examples) >= 5
    namespace = {}
    for example in examples:  # in order, as a reader would type them
        exec(compile(example, "README.md", "exec"), namespace)
    assert namespace["grads"].dbias.shape == namespace["bias"].shape


def test_the_picture_of_the_diagonals_is_true():
    (picture,) = [block for block in blocks("text") if "bottom_right" in block]
    lines = picture.splitlines()
    starts = [found.start() for found in re.finditer(r"\S+", lines[0])]
    columns = list(zip(starts, [*starts[1:], 200], strict=True))
    shapes = [(3, 5), (3, 5), (5, 3), (5, 3)]
    for (start, stop), alignment, (seq_q, seq_k) in zip(columns, lines[0].split(), shapes, strict=True):
        drawn = [line[start:stop].split() for line in lines[2:] if line[start:stop].strip()]
        q, k = np.zeros((1, seq_q, 1)), np.zeros((1, seq_k, 1))
        seen = reference.visible(problem.describe(q, k, k, causal=alignment))[0]
        assert drawn == [["#" if x else "." for x in row] for row in seen], alignment


def test_readme_tables_are_what_the_results_say():
    assert tables.filled(README, ROOT / "scripts" / "results") == README
    assert README.count("<!-- table: ") == README.count("<!-- end of table -->") > 0


def test_a_table_follows_its_results(tmp_path):
    document = "a\n<!-- table: some-gpu speed -->\nold\n<!-- end of table -->\nb\n"
    assert "Not measured yet" in tables.filled(document, tmp_path)
    sizes = dict.fromkeys(("batch", "heads_q", "seq_q", "head_dim"), 7)
    row = {"topic": "speed", "dtype": "bfloat16", "direction": "forward", "causal": True, **sizes}
    rows = [
        row | {"system": "cuflash", "ms": 2.0, "tflops": 300.0},
        row | {"system": "fa2", "ms": 3.0, "tflops": 200.0},
    ]
    rows.append(row | {"system": "cudnn", "failure": "out of luck"})
    result = {"gpu": "G", "driver": "1.2", "date": "today", "versions": {"cupy": "14"}, "command": "cmd", "rows": rows}
    (tmp_path / "some-gpu.json").write_text(json.dumps(result))
    filled = tables.filled(document, tmp_path)
    assert "| bfloat16 | 7 x 7 x 7 x 7 | causal | forward | 300.0 | 200.0 | 1.50x |" in filled
    assert "*cuDNN: out of luck*" in filled
    assert "G, driver 1.2; cupy 14; today; `scripts/results/some-gpu.json`, by `cmd`" in filled
    assert filled.startswith("a\n")
    assert filled.endswith("<!-- end of table -->\nb\n")
    assert tables.filled(filled, tmp_path) == filled


def test_the_table_of_methods_follows_its_results(tmp_path):
    """Methods are the package's; figures come from the files, of the case that is asked for, and are left out otherwise."""
    table = tables.methods(tmp_path)
    assert "<sub>" not in table
    lines = table.splitlines()
    assert lines[2] == "| float16 | `wgmma` | sm_90 | tensor cores by wgmma | - | - |"
    dtypes = {line.split("|")[1].strip() for line in lines[2:]}
    assert dtypes == {*problem.DTYPES, problem.NARROW, '`"tf32"`', "all"}
    case = {"system": "cuflash", "dtype": "float32", "backend": "simt", "direction": "backward", "causal": False}
    case |= {"topic": "float32", "head_dim": 128, "head_dim_v": 128, "heads_q": 8, "heads_k": 8, "seq_q": 4096}
    row = case | {"tflops": 33.4, "error": 1.2e-6}
    others = [{**row, "tflops": 99.0, name: x} for name, x in (("causal", True), ("seq_q", 1), ("precision", "tf32"))]
    result = {"gpu": "G", "date": "today", "rows": [*others, {**row, "heads_k": 2, "error": 1.0}, row]}
    (tmp_path / "h200-precision.json").write_text(json.dumps(result))
    table = tables.methods(tmp_path)
    assert (
        "| float32 | `simt` | sm_75 and later | multiply-adds, without tensor cores | - / 1.2e-06 | - / 33 |" in table
    )
    assert "99" not in table
    assert table.splitlines()[-1].startswith("<sub>G; head size 128, 4096 queries and keys")
    assert "`scripts/results/h200-precision.json` of today" in table


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_contributing_runs_a_kernel():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'^```bash\n\.venv/bin/python -c "\n(.*?)"\n```$', text, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def test_every_commands_file_exists():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for path in re.findall(r"\b(?:scripts|cuflash|tests)/[\w/]+\.(?:sh|py|cu|cuh)\b", text):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_changelog_has_room_for_what_is_next():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changelog, re.MULTILINE)


# ---- the measuring script, as far as it runs without a GPU ----
def test_bench_measures_the_processor(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results" / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--cpu", "--quick", "--out", str(out)])
    assert bench.main() == 0
    result = json.loads(out.read_text())
    assert {(row["system"], row["direction"]) for row in result["rows"]} >= {("cuflash", "step"), ("plain", "forward")}
    assert not [row for row in result["rows"] if row.get("failure")]
    assert "plain NumPy" in tables.table(out, "processor")
    assert "processor" in capsys.readouterr().out


def test_bench_measures_sparsity(tmp_path, monkeypatch):
    out = tmp_path / "cpu-sparse.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--suite", "sparse", "--cpu", "--quick", "--out", str(out)])
    assert bench.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert not [row for row in rows if row.get("failure")]
    assert {(row["pattern"], row["visible"]) for row in rows} >= {("dense", 1.0), ("documents", 0.1)}
    lines = tables.table(out, "sparse processor").splitlines()
    assert lines[0].count("% visible") == 4
    assert sum("| forward | blocks of 128 |" in line for line in lines) == 1


def test_bench_measures_packed_sequences(tmp_path, monkeypatch):
    out = tmp_path / "cpu-packed.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--suite", "packed", "--cpu", "--quick", "--out", str(out)])
    assert bench.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert not [row for row in rows if row.get("failure")]
    assert all(sum(lengths) == 32768 for lengths in bench.mixes(32768).values())
    assert {(row["system"], row["lengths"]) for row in rows} >= {("cuflash", "skewed"), ("cuflash batch", "8 equal")}
    lines = tables.table(out, "packed processor").splitlines()
    assert sum("| skewed | forward |" in line for line in lines) == 1


@pytest.mark.parametrize("suite", ["bias", "written"])
def test_bench_measures_modifiers(suite, monkeypatch):
    """What a GPU is to be asked for, on the host: every call runs, and every row has its place."""
    shape = bench.Shape(2, 4, 4, 24, 24, 16, 16)
    monkeypatch.setattr(bench, "modified_shapes", lambda _: [shape])
    monkeypatch.setattr(bench, "MODIFIED_BACKENDS", ("numpy",))
    monkeypatch.setattr(
        bench, "rotate", lambda calls, _: {name: 1.0 + bool(call() is None) for name, call in calls.items()}
    )
    monkeypatch.setattr(bench.Data, "make", lambda shape, dtype, **_: bench.Data(shape, dtype, shape.arrays(dtype), ()))
    session = bench.Session(quick=True, peers=False)
    for part in bench.SUITES[suite][0]:
        part(session)
    assert not [row for row in session.rows if row.get("failure")]
    assert len(session.rows) == {"bias": 2 * 16, "written": 2 * 4}[suite]
    lines = tables.TOPICS[suite](session.rows).splitlines()
    assert 2 * (len(lines) - 2) == len(session.rows), "a line has both directions"
    assert all(line.endswith("| 1.00 | 1.00 |") for line in lines[2:])


def test_the_table_of_inputs_has_a_column_for_each_backend_and_direction():
    row = {"head_dim": 64, "inputs": "normal", "direction": "forward"}
    rows = [{**row, "backend": "simt", "error": 1e-7}, {**row, "backend": "mma", "error": 2e-7}]
    rows.append({**row, "backend": "mma", "direction": "backward", "error": 3e-7})
    lines = tables.TOPICS["inputs"](rows).splitlines()
    assert lines[0] == "| head size | inputs | forward, `simt` | forward, `mma` | backward, `simt` | backward, `mma` |"
    assert lines[2:] == ["| 64 | normal | 1.0e-07 | 2.0e-07 | - | 3.0e-07 |"]


def test_pictures_are_drawn_from_what_is_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    results = tmp_path / "lengths.json"
    words = ["--measure", "--lengths", "16", "32", "--results", str(results), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pictures.py", *words])
    assert load_script("pictures").main() == 0
    rows = json.loads(results.read_text())["rows"]
    assert {(row["system"], row["seq_q"]) for row in rows} == {(s, n) for s in ("cuflash", "plain") for n in (16, 32)}
    drawn = {path.name for path in tmp_path.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    shown = re.findall(r"!\[[^]]+\]\(docs/([^)]+)\)", README)
    assert set(shown) == drawn == {path.name for path in (ROOT / "docs").glob("*.png")}
    assert all((ROOT / "docs" / name).stat().st_size < 60_000 for name in shown), "the repository is to stay small"


def test_bench_measures_jax(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu-jax.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--suite", "jax", "--cpu", "--quick", "--out", str(out)])
    assert bench.main() == 0
    result = json.loads(out.read_text())
    assert not [row for row in result["rows"] if row.get("failure")]
    assert "jax" in result["versions"]
    (ours,) = [row for row in result["rows"] if row["topic"] == "jax masked rows" and row["system"] == "cuflash"]
    assert (ours["out"], ours["dq"], ours["finite"]) == (0, 0, True)
    assert "| causal | backward |" in tables.table(out, "jax processor")
    assert "| XLA |" in tables.table(out, "jax masked rows")
    assert re.search(r"^row that sees no key, cuflash: out 0, dq 0", capsys.readouterr().out, re.MULTILINE)


def test_bench_keeps_going_after_a_failure(capsys):
    session = bench.Session(quick=True, peers=False)
    with session.part("speed", "fa2", dtype="bfloat16"):
        raise RuntimeError("no kernel\nat all")
    assert session.rows == [
        {"topic": "speed", "system": "fa2", "dtype": "bfloat16", "failure": "RuntimeError: no kernel at all"}
    ]
    assert "no kernel at all" in capsys.readouterr().out
    assert "FAILED speed fa2: RuntimeError: no kernel at all" in bench.summary(session.rows)


def test_bench_judges_targets():
    sizes = dict.fromkeys(bench.Shape.__dataclass_fields__, 7)
    row = {"topic": "speed", "dtype": "bfloat16", "direction": "forward", "causal": False, **sizes}
    peer = row | {"system": "fa2", "ms": 3.0, "tflops": 200.0}
    for ms, verdict in ((2.9, "PASS"), (3.1, "MISS")):
        lines = bench.summary([row | {"system": "cuflash", "ms": ms, "tflops": 600 / ms}, peer]).splitlines()
        assert lines[1].endswith(verdict)
    host = {"topic": "host", "system": "cuflash", "direction": "forward", "causal": False, **sizes}
    assert bench.summary([host | {"us": 24.0}]).endswith("PASS")
    assert bench.summary([host | {"us": 26.0}]).endswith("MISS")


def test_the_source_distribution_can_be_tested(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is in the extra named test")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "scripts/test.sh", "README.md", "LICENSE", "pyproject.toml"} | SOURCES <= names

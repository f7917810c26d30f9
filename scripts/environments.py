"""Build the package as it is published, and use it in fresh environments: of the oldest libraries and of the newest.

    python scripts/environments.py              # the interpreters that are installed here
    python scripts/environments.py --out DIST   # and keep the wheel and the source distribution

The wheel is checked, built a second time from the source distribution, and installed without any extra: with the oldest NumPy
and ml_dtypes that pyproject.toml allows in the oldest interpreter, and with the newest in every one.  There the calls run, and
what needs an extra says which.  Building needs hatchling, of the extra named test; installing needs the network, or pip's cache.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1_000_000  # bytes of a wheel
MINORS = range(10, 15)  # of Python 3
CHECKS = """
import sys, warnings
warnings.simplefilter("error")
import ml_dtypes, numpy as np, cuflash, cuflash.compat, cuflash.onnx, cuflash.reference
assert "site-packages" in cuflash.__file__, cuflash.__file__
rng = np.random.default_rng(0)
for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
    q, k, v, dout = (rng.standard_normal((2, h, n, 8)).astype(dtype) for h, n in ((4, 9), (2, 11), (2, 11), (4, 9)))
    options = {"causal": True, "softcap": 3.0, "bias": rng.standard_normal((4, 9, 11)).astype(dtype)}
    options["modifiers"] = (
        cuflash.ALiBi([0.5, 0.25, 0.1, 0.2]),
        cuflash.KeyLengths([11, 4]),
        cuflash.Sinks(np.zeros(4)),
        cuflash.Dropout(0.1, seed=1, offset=2),
        cuflash.ScoreModifier("s * heat[h] - abs(q - k)", heat=np.ones(4), gradients="heat"),
    )
    out, lse, vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    call = cuflash.problem.describe(q, k, v, **{**options, "modifiers": cuflash.arrays.native_modifiers(
        options["modifiers"], cuflash.arrays.HOST, str(q.dtype), 11)})
    want, want_lse = cuflash.reference.forward(call)
    grads, wanted = vjp(dout), cuflash.reference.backward(call, dout)
    limit = {2: 0.1, 4: 1e-4, 8: 1e-10}[q.dtype.itemsize]
    for got, expected in ((out, want), (lse, want_lse), *zip(grads[:3], wanted[:3])):
        error = abs(got.astype(np.float64) - expected).max()
        assert error < limit * max(1, abs(expected).max()), (dtype, error)
    assert {"dbias", "dsinks", "dheat"} <= set(grads._fields)

class Exporter:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.array.__dlpack_device__()

target = np.zeros((2, 4, 9, 8))
cuflash.attention(*map(Exporter, (q, k, v)), out=Exporter(target))
assert (target == cuflash.attention(q, k, v)).all()
packed, offsets = rng.standard_normal((5, 2, 8)), [0, 2, 5]
cuflash.attention_varlen_vjp(packed, packed, packed, offsets, offsets)[1](packed)
part = cuflash.attention(q, k, v, return_lse=True)
cuflash.merge([part[0]] * 2, [part[1]] * 2)
cuflash.attention_decode(q, k, v, [3, 4])
cuflash.attention_statistics(q, k, v)
cuflash.attention_weights(q, k, [0, -1])
assert cuflash.explain(q, k, v).backend == "numpy"
from cuflash import source
assert "mma" in source.read("forward_mma.cu")

def refuses(error, words, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except error as found:
        assert words in str(found), found
        return
    raise AssertionError(f"{call} did not say that it lacks {words}")

refuses(cuflash.UnsupportedError, "cuflash[cuda13]", cuflash.attention, q, k, v, backend="simt")
refuses(cuflash.VersionError, "cuflash[jax]", __import__, "cuflash.jax")
refuses(cuflash.UnsupportedError, "cuflash[plot]", cuflash.draw_tiles, q, k)
absent = {"cupy", "jax", "matplotlib", "onnx", "scipy"}
assert not absent & set(sys.modules)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the wheel and the source distribution")
    parser.add_argument("--no-install", action="store_true", help="only build and check; needs no network")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel, sdist = build(ROOT, work / "dist")
        check_wheel(wheel)
        check_sdist(sdist, wheel, work)
        say(f"{wheel.name} ({wheel.stat().st_size / 1000:.0f} kB) and {sdist.name} are good, one makes the other")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy(path, options.out)
        if not options.no_install:
            found = interpreters()
            for name, minor, libraries in plans(sorted(found)):
                started = time.monotonic()
                versions = use(found[minor], wheel, libraries, work / f"{name}-{minor}")
                say(f"ok  Python 3.{minor}, {name}: {versions} ({time.monotonic() - started:.0f} s)")
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; ends the script with its message where it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise SystemExit(f"error: {shown:.200} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- what is published -----------------------------------------------------------------------------------------------
def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """Wheel and source distribution of a folder."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder, cwd=source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """End the script unless the wheel can be published."""
    if wheel.stat().st_size >= LARGEST:
        raise SystemExit(f"error: {wheel.name} has {wheel.stat().st_size} bytes: must have less than {LARGEST}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        try:
            metadata = Metadata.from_email(archive.read(name), validate=True)
        except Exception as wrong:  # a group of what a registry refuses, whose class depends on the interpreter
            reasons = "; ".join(map(str, getattr(wrong, "exceptions", [wrong])))
            raise SystemExit(f"error: no registry takes the metadata of {wheel.name}: {reasons}") from None
    if metadata.description_content_type != "text/markdown" or "# cuflash" not in (metadata.description or ""):
        raise SystemExit("error: the wheel's description is not README.md")


def check_sdist(sdist: Path, wheel: Path, work: Path) -> None:
    """End the script unless the source distribution makes the same wheel."""
    with tarfile.open(sdist) as archive:
        safely = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # not in the first releases of 3.10 and 3.11
        archive.extractall(work / "source", **safely)
    (source,) = (work / "source").iterdir()
    again, _ = build(source, work / "again")
    if again.read_bytes() != wheel.read_bytes():
        with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(again) as b:
            sizes = [{x.filename: x.CRC for x in archive.infolist()} for archive in (a, b)]
        differing = sorted(
            name for name in sizes[0].keys() | sizes[1].keys() if sizes[0].get(name) != sizes[1].get(name)
        )
        raise SystemExit(f"error: {sdist.name} makes another wheel; these files differ: {', '.join(differing)}")


# ---- where it is used ------------------------------------------------------------------------------------------------
def interpreters() -> dict[int, str]:
    """Interpreters that run, by minor version: those on the path, and the one that runs this."""
    found = {}
    for minor in MINORS:
        path = shutil.which(f"python3.{minor}")
        asked = "import sys, venv; print(sys.version_info[1])"
        if (
            path
            and subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False).stdout == f"{minor}\n"
        ):
            found[minor] = path
    return {sys.version_info[1]: sys.executable, **found}


def plans(minors: list[int]) -> Iterator[tuple[str, int, list[str]]]:
    """Environments: a name, the interpreter and the libraries beside the wheel."""
    yield "oldest libraries", minors[0], oldest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for minor in minors:
        yield "newest libraries", minor, []


def oldest(project: str) -> list[str]:
    """The oldest versions of what pyproject.toml requires in any case."""
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    pairs = re.findall(r'"([\w-]+)>=([\d.]+)"', line)
    if len(pairs) != line.count(",") + 1:
        raise SystemExit(f"error: dependencies = [{line}] are not all of the form name>=version")
    return [f"{name}=={least}" for name, least in pairs]


def use(interpreter: str, wheel: Path, libraries: list[str], folder: Path) -> str:
    """Install the wheel into a new environment and run the checks there; the versions of what it found."""
    reaches = tuple(map(int, version("pip").split(".")[:2])) >= (
        22,
        3,
    )  # whether pip installs elsewhere, which saves time
    run(interpreter, "-m", "venv", *(["--without-pip"] if reaches else []), folder)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", python] if reaches else [python, "-m", "pip"]
    run(*pip, "--disable-pip-version-check", "install", "--quiet", "--only-binary", ":all:", wheel, *libraries)
    run(python, "-I", "-c", CHECKS, cwd=folder)
    run(python, "-I", "-m", "cuflash", "info", cwd=folder)
    shown = (
        "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('numpy', 'ml_dtypes')), sep=', ')"
    )
    return run(python, "-I", "-c", shown).strip()


if __name__ == "__main__":
    sys.exit(main())

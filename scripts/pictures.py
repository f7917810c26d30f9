"""Draw README's pictures into docs/, each by a function of the package.

    python scripts/pictures.py                 # from what is measured already
    python scripts/pictures.py --measure       # measure plain attention and cuflash against the length first

Measured rows lie in scripts/results/, in the file that --results names.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package of this checkout

import cuflash
from cuflash import inspection, picture, problem
from cuflash.cli import text
from cuflash.cli.bench import Bench
from cuflash.cli.machine import array_library, stamp, this_machine
from cuflash.cli.shape import Shape

ROOT = Path(__file__).resolve().parent.parent
DPI = 75
LENGTHS = (256, 512, 1024, 2048, 4096)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the lengths here, and write them down")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results" / "cpu-lengths.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="what --measure measures")
    arguments = parser.parse_args()
    if arguments.measure:
        arguments.results.write_text(json.dumps(measured(arguments.lengths), indent=1) + "\n", encoding="utf-8")
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = {"tiles": tiles(), "recurrence": recurrence(), "lengths": lengths(arguments.results)}
    for name, figure in drawn.items():
        figure.savefig(arguments.out / f"{name}.png", dpi=DPI, metadata={"Software": None})
        print(arguments.out / f"{name}.png")
    return 0


def tiles() -> Any:
    """What three masks make of the tiles of one head."""
    seq, tile = 1024, (64, 64)
    q = np.zeros((1, seq, 64), np.float32)
    ids = np.repeat(np.arange(5), (150, 330, 90, 260, 194))
    options: dict[str, dict[str, Any]] = {
        "causal=True": {"causal": True},
        "window=(200, 0)": {"window": (200, 0)},
        "Documents, causal": {"causal": True, "modifiers": (cuflash.Documents(ids, ids),)},
    }
    figure = picture.new_figure("pictures.py", (13, 5), "")
    for part, (name, given) in zip(figure.subfigures(1, len(options)), options.items(), strict=True):
        call = problem.describe(q, q, q, **native(given))
        part.suptitle(name)
        picture.paint_tiles(part, inspection.tile_states(call, (0,), *tile), *tile)
    return figure


def native(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are behind the public calls: ids in 32 bits."""
    chain = [cuflash.Documents(*(x.astype(np.int32) for x in (m.ids_q, m.ids_k))) for m in options.get("modifiers", ())]
    return options | {"modifiers": chain}


def recurrence() -> Any:
    """A row whose scores grow along the keys, so that the maximum moves in later blocks."""
    rng = np.random.default_rng(7)
    q, k = rng.standard_normal((1, 1, 64)), rng.standard_normal((1, 768, 64))
    k += 0.12 * q * np.linspace(-1, 1, 768)[:, None]
    return cuflash.draw_recurrence(q, k, 0, block=64, title="One row: scores, running maximum, factors of correction")


def lengths(results: Path) -> Any:
    """Memory and time as they were measured."""
    result = json.loads(results.read_text(encoding="utf-8"))
    row = result["rows"][0]
    where = result["gpu"] or result["processor"]
    title = f"A forward, head size {row['head_dim']}, {row['dtype']}; {where}"
    return cuflash.draw_costs(result["rows"], title=title)


def measured(seqs: list[int]) -> dict[str, Any]:
    """Rows of cuflash and plain attention, in one process."""
    machine = this_machine()
    xp = array_library(machine)
    heads, dtype = (16, "float16") if machine.devices else (1, "float32")
    progress, rows = text.Progress(), []
    for seq in seqs:
        shape = Shape(1, heads, heads, seq, seq, 64, 64)
        rows += Bench(xp, shape, dtype, False).rows(("cuflash", "plain"), ("forward",), 5, progress)
    progress.done()
    topic = "lengths" if machine.devices else "lengths processor"
    return stamp(machine, [{"topic": topic, **row} for row in rows])


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``python -m cuflash [selfcheck | info | bench | explain | weights]``; without a command, the self-check.

Exit codes: 0 all is well, 1 the self-check found something beyond tolerance, 2 the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import cuflash
from cuflash.api import BACKENDS
from cuflash.cli.shape import parse
from cuflash.errors import CuflashError
from cuflash.problem import DTYPES

COMMANDS = {
    "selfcheck": "check results, time and memory on this machine (the default)",
    "info": "versions, GPUs, backends and where compiled kernels are kept",
    "bench": "time chosen shapes, dtypes and directions",
    "explain": "which backend, tile and resources a call gets, and why not the others",
    "weights": "how attention spreads over the keys: largest scores, entropies, favourite keys, and a picture",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "selfcheck")
    parsed = parser().parse_args(words)
    try:
        # Only the command that is asked for is imported.
        code: int = importlib.import_module(f"cuflash.cli.{parsed.command}").run(parsed)
    except (CuflashError, OSError, MemoryError) as error:
        print(f"cuflash: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cuflash: interrupted", file=sys.stderr)
        return 130
    return code


class Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the line and leave with code 2."""
        self.exit(2, f"cuflash: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = Parser(prog="python -m cuflash", description="Exact attention, forward and backward, for arrays.")
    top.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    for name in ("selfcheck", "info"):
        made[name].add_argument("--json", action="store_true", help="print one JSON object")

    bench = made["bench"]
    bench.add_argument(
        "--shapes",
        type=parse,
        nargs="+",
        action="extend",
        metavar="B,HQ,HK,SQ,SK,D[,DV]",
        help="batch, heads_q, heads_k, seq_q, seq_k, head_dim, head_dim_v (default: a few that suit the machine)",
    )
    bench.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: float32, on a GPU bfloat16")
    bench.add_argument(
        "--directions",
        type=lambda words: words.split(","),
        default=["forward", "backward", "step"],
        metavar="forward,backward,step",
        help="any of the three, with commas between (default: all)",
    )
    bench.add_argument("--causal", action="store_true", help="with the causal mask")
    bench.add_argument("--backend", choices=BACKENDS, help="insist on one (default: cuflash chooses)")
    bench.add_argument("--deterministic", action="store_true", help="ask for a backward that repeats bit for bit")
    bench.add_argument("--plain", action="store_true", help="time plain attention in the same array library beside it")
    bench.add_argument("--repeat", type=int, default=7, help="the median of so many is reported (default: 7)")
    bench.add_argument("--json", metavar="FILE", help="write the rows to this file")
    bench.add_argument("--plot", metavar="FILE.png", help="draw them (needs matplotlib: pip install 'cuflash[plot]')")

    explain = made["explain"]
    explain.add_argument("shape", type=parse, metavar="B,HQ,HK,SQ,SK,D[,DV]", help="sizes, as in bench")
    explain.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add_options(explain)
    form = explain.add_mutually_exclusive_group()
    form.add_argument(
        "--packed",
        dest="form",
        action="store_const",
        const="packed",
        default="attention",
        help="the entries of the batch as sequences that are packed one after the other",
    )
    form.add_argument(
        "--decode",
        dest="form",
        action="store_const",
        const="decode",
        help="SQ new queries over a cache of SK keys for each entry",
    )
    explain.add_argument(
        "--page-size", type=int, metavar="N", help="with --decode: the cache lies in pages of N positions"
    )
    explain.add_argument(
        "--capability",
        type=int,
        metavar="CC",
        help="explain for a GPU of this compute capability (90 for 9.0), which need not be there",
    )
    explain.add_argument(
        "--measure",
        action="store_true",
        help="time the forward, too, and compare it with what the device allows at best",
    )
    explain.add_argument(
        "--picture",
        metavar="FILE.png",
        help="draw its tiles, costs against the length, the recurrence along a row and weights (needs matplotlib)",
    )

    weights = made["weights"]
    weights.add_argument(
        "shape", type=parse, nargs="?", metavar="B,HQ,HK,SQ,SK,D", help="sizes of random arrays, as in bench"
    )
    weights.add_argument(
        "--arrays",
        nargs=2,
        metavar=("Q.npy", "K.npy"),
        help="your own, (..., heads, seq, head_dim), in place of a shape",
    )
    weights.add_argument("--dtype", choices=DTYPES, default="float32", help="of random arrays (default: float32)")
    add_options(weights)
    weights.add_argument("--entry", type=int, default=0, help="which entry of the batch (default: 0)")
    weights.add_argument("--rows", type=int, nargs="+", help="queries to draw, -1 is the last (default: some of all)")
    weights.add_argument("--plot", metavar="FILE.png", help="draw them (needs matplotlib: pip install 'cuflash[plot]')")
    return top


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of a call that fit on a line."""
    alignments = ("bottom_right", "top_left")
    command.add_argument("--causal", nargs="?", const=True, default=False, choices=alignments, help="which diagonal")
    command.add_argument(
        "--window", type=bound, nargs=2, metavar=("LEFT", "RIGHT"), help="inclusive distances, or none"
    )
    command.add_argument("--softcap", type=float, help="bound of the scores")
    command.add_argument("--scale", type=float, help="default: 1/sqrt(head_dim)")
    command.add_argument("--backend", choices=BACKENDS, help="insist on one (default: cuflash chooses)")


def bound(word: str) -> int | None:
    """One side of a window."""
    try:
        return None if word.lower() == "none" else int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} must be an integer or none") from None

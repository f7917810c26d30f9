"""`python -m cuflash info`: what is installed, what it runs on, which backends that gives."""

from __future__ import annotations

import argparse
import json

from cuflash.cli import text
from cuflash.cli.machine import Machine, backends, this_machine


def run(arguments: argparse.Namespace) -> int:
    """Print the facts, as text or as JSON."""
    machine = this_machine()
    if arguments.json:
        print(json.dumps(machine.record() | {"backends": backends(machine)}, indent=2))
    else:
        print(info_text(machine))
    return 0


def info_text(machine: Machine) -> str:
    """The facts, a line each."""
    gpus = [
        (
            f"gpu {index}",
            f"{d.name}, sm_{d.capability}, {d.multiprocessors} multiprocessors, {text.size(d.memory)}, "
            f"{text.size(d.shared_memory)} of shared memory a block",
        )
        for index, d in enumerate(machine.devices)
    ]
    return text.facts(
        [
            ("system", machine.system),
            ("processor", f"{machine.processor}, {machine.cores} cores"),
            *(gpus or [("gpu", f"none: {machine.no_gpu}")]),
            *([("driver", machine.driver)] if machine.devices else []),
            *machine.versions.items(),
            ("kernel cache", machine.cache),
            *((f"backend {name}", reason or "available") for name, reason in backends(machine).items()),
            *(("note", note) for note in machine.notes),
        ]
    )

"""The derivation script prints the figures that the algorithm is known by, and fails if one is off."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cuflash import numpy_backend

SCRIPT = Path(__file__).parent.parent / "scripts" / "derivation.py"


@pytest.fixture
def derivation(monkeypatch):
    spec = importlib.util.spec_from_file_location("derivation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "derivation", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_right(derivation, capsys):
    assert derivation.main() == 0
    printed = capsys.readouterr().out
    for figure in ("64 MiB", "4 GiB", "8 GiB", "1 MiB", "0.9999546", "0.5000000", "45 "):
        assert figure in printed, figure
    assert len(re.findall(r" ok$", printed, re.MULTILINE)) == 15


def test_a_wrong_forward_is_noticed(derivation, capsys, monkeypatch):
    right = numpy_backend.forward
    monkeypatch.setattr(
        numpy_backend, "forward", lambda *arguments, **options: (right(*arguments, **options)[0] + 1e-12, 0)
    )
    report = derivation.Report()
    derivation.forward(report)
    assert report.off == 1
    assert "OFF" in capsys.readouterr().out


def test_a_wrong_backward_is_noticed(derivation, capsys, monkeypatch):
    right = numpy_backend.backward
    monkeypatch.setattr(
        numpy_backend, "backward", lambda *arguments, **options: right(*arguments, **options)._replace(dk=np.zeros(1))
    )
    monkeypatch.setattr(derivation, "SECTIONS", (derivation.gradients,))
    assert derivation.main() == 1
    assert "1 off" in capsys.readouterr().out

"""scripts/train_text.py: a whole model trained with attention and gradients from cuflash."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_text.py"
SMALL = ("--backend", "numpy", "--width", "32", "--layers", "1", "--heads", "2", "--seq", "32", "--batch", "4")


def load_script():
    spec = importlib.util.spec_from_file_location("train_text", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


train_text = load_script()


def scaled(attention, name, factor=1.5):
    """`attention` with one gradient wrong by a factor."""

    def wrong(q, k, v, **options):
        out, vjp = attention(q, k, v, **options)

        def wrong_vjp(dout):
            grads = vjp(dout)
            return grads._replace(**{name: factor * getattr(grads, name)})

        return out, wrong_vjp

    return wrong


def gradient_error(attention) -> float:
    """Largest relative error of the model's gradient against central differences, over one direction per weight."""
    rng = np.random.default_rng(5)
    model = train_text.Transformer(vocabulary=11, width=32, layers=2, heads=2, attention=attention)
    weights = model.initial_weights(seed=1, dtype="float64", xp=np)
    for name in weights:
        if name.endswith("qkv"):
            weights[name] *= 3  # scores far from equal, so that dq and dk matter
    tokens, targets = rng.integers(0, model.vocabulary, (2, 3, 24))
    _, grads = model.loss_and_gradient(weights, tokens, targets)
    assert grads.keys() == weights.keys()

    step, worst = 1e-5, 0.0
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        direction /= np.linalg.norm(direction)
        ahead, behind = (
            model.loss({**weights, name: weight + sign * step * direction}, tokens, targets) for sign in (1, -1)
        )
        # Relative to the gradient's length: its component along one direction may be 0 by chance.
        error = abs((ahead - behind) / (2 * step) - (grads[name] * direction).sum()) / np.linalg.norm(grads[name])
        worst = max(worst, error)
    return worst


@pytest.mark.parametrize("attention", [cuflash.attention_vjp, train_text.plain_attention_vjp])
def test_gradient_of_the_model_is_right(attention):
    assert gradient_error(attention) < 1e-6


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_gradient_of_attention_is_noticed(name):
    assert gradient_error(scaled(cuflash.attention_vjp, name)) > 1e-3


def test_the_model_does_not_look_ahead():
    model = train_text.Transformer(vocabulary=11, width=32, layers=2, heads=2, attention=cuflash.attention_vjp)
    weights = model.initial_weights(seed=1, dtype="float64", xp=np)
    tokens = np.random.default_rng(5).integers(0, model.vocabulary, (1, 24))
    changed = tokens.copy()
    changed[0, 10] = (tokens[0, 10] + 1) % model.vocabulary
    difference = np.abs(model.logits(weights, tokens)[0] - model.logits(weights, changed)[0]).max(axis=1)
    assert (difference[:10] == 0).all()
    assert (difference[10:] > 0).all()


@pytest.fixture(scope="module")
def finished():
    """One training run as a user starts it."""
    command = [sys.executable, str(SCRIPT), *SMALL, "--steps", "120", "--every", "50", "--sample", "40", "--json"]
    package = str(Path(cuflash.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((package, os.environ.get("PYTHONPATH", "")))}
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=True)


def test_training_learns(finished):
    summary = json.loads(finished.stdout)
    losses = summary["losses"]
    assert len(losses) == 120
    vocabulary_size = np.exp(losses[0])
    assert 60 < vocabulary_size < 160  # an untrained model knows nothing: about even odds among 100 characters
    assert np.mean(losses[-10:]) < 0.8 * losses[0]
    assert summary["validation_loss_nats"] < summary["unigram_entropy_nats"]
    assert summary["validation_loss_bits"] == pytest.approx(summary["validation_loss_nats"] / np.log(2))
    assert len(summary["sample"]) == 40


def test_first_steps_agree_with_plain_attention(finished):
    difference = json.loads(finished.stdout)["difference_from_plain"]
    assert difference["loss"] < 1e-5
    assert difference["gradient"] < 1e-4


def test_progress_is_shown(finished):
    lines = [line.split() for line in finished.stderr.splitlines()]
    assert [line[0] for line in lines if line and line[0].endswith("/120")] == ["50/120", "100/120", "120/120"]
    assert "nats/char" in finished.stderr
    assert "bits/char" in finished.stderr


def test_same_seed_same_losses(capsys):
    def losses(seed):
        options = (*SMALL, "--steps", "5", "--check-steps", "0", "--sample", "0", "--json", "--seed", seed)
        assert train_text.main(options) == 0
        return json.loads(capsys.readouterr().out)["losses"]

    first = losses("7")
    assert losses("7") == first
    assert losses("8") != first


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_disagreement_with_plain_attention_stops_the_run(monkeypatch, capsys, name):
    monkeypatch.setattr(train_text, "plain_attention_vjp", scaled(train_text.plain_attention_vjp, name))
    assert train_text.main((*SMALL, "--steps", "2", "--check-steps", "1")) == 1
    assert "rounding" in capsys.readouterr().err


def test_nan_from_attention_stops_the_run(monkeypatch, capsys):
    monkeypatch.setattr(cuflash, "attention_vjp", scaled(cuflash.attention_vjp, "dk", float("nan")))
    assert train_text.main((*SMALL, "--steps", "2", "--check-steps", "1")) == 1
    assert "rounding" in capsys.readouterr().err


def test_plot_is_drawn(tmp_path, capsys):
    path = tmp_path / "loss.png"
    options = (*SMALL, "--steps", "2", "--check-steps", "0", "--sample", "0", "--plot", str(path))
    assert train_text.main(options) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_without_matplotlib_the_loss_is_drawn_in_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "loss.png"
    options = (*SMALL, "--steps", "2", "--check-steps", "0", "--sample", "0", "--plot", str(path))
    assert train_text.main(options) == 0
    printed = capsys.readouterr().out
    assert "matplotlib is not installed" in printed
    assert "█▁" in printed  # two losses, the second one lower
    assert not path.exists()


def test_own_text(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_text("ähnlich, " * 200, encoding="utf-8")
    options = (*SMALL, "--steps", "150", "--rate", "1e-2", "--sample", "10", "--json", "--text", str(path))
    assert train_text.main(options) == 0
    assert json.loads(capsys.readouterr().out)["sample"] == "ch, ähnlic"  # the prompt is 3 5/9 periods of the text


def test_a_diverging_loss_stops_the_run(monkeypatch, capsys):
    monkeypatch.setattr(train_text.Trainer, "step", lambda self: (float("nan"), {}))
    assert train_text.main((*SMALL, "--check-steps", "0")) == 1
    assert "the loss of step 1 is nan; try a smaller --rate" in capsys.readouterr().err


def test_an_error_of_cuflash_is_shown_in_one_line(monkeypatch, capsys):
    def refuse(*arrays, **options):
        raise cuflash.UnsupportedError("no backend takes this call")

    monkeypatch.setattr(cuflash, "attention_vjp", refuse)
    assert train_text.main(SMALL) == 1
    assert capsys.readouterr().err.endswith("error: no backend takes this call\n")


def test_entropy_of_the_text(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcd" * 10, encoding="utf-8")
    corpus = train_text.load_corpus([path], np)
    assert corpus.characters == "abcd"
    assert corpus.entropy == pytest.approx(np.log(4))
    assert (len(corpus.train), len(corpus.validation)) == (36, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: 0 is below the least value, 1"),
        (["--steps", "many"], "argument --steps: 'many' is not a whole number"),
        (["--seed", "-1"], "argument --seed: -1 is below the least value, 0"),
        (["--rate", "nan"], "argument --rate: nan is not above 0"),
        (["--rate", "fast"], "argument --rate: 'fast' is not a number"),
        (["--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--width", "30", "--heads", "4"], "argument --heads: 4 heads do not divide a width of 30"),
        (["--width", "30", "--heads", "2"], "argument --heads: 2 heads get 15 features each"),
        (["--seq", "100000000"], "argument --seq: 100000000 is too long for this text"),
        (["--text", "no/such/file"], "argument --text: cannot read the text"),
        (["--plot", "no/such/folder/loss.png"], "argument --plot: the folder of"),
        (["--stepps", "3"], "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_text.main(["--backend", "numpy", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_text_of_one_character_is_refused(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_text("a" * 1000, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        train_text.main([*SMALL, "--text", str(path)])
    assert stopped.value.code == 2
    assert "argument --text: the text needs at least two different characters" in capsys.readouterr().err


def test_cupy_is_refused_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit) as stopped:
        train_text.main(["--backend", "cupy"])
    assert stopped.value.code == 2
    assert "argument --backend: cupy cannot be used here" in capsys.readouterr().err

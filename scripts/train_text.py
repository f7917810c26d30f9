"""Train a small character-level transformer with cuflash and nothing but arrays.

The text is Python's own standard library, so nothing is downloaded. The arrays are CuPy's where there is a GPU and
NumPy's elsewhere. There is no framework: every building block below is a function that returns its output together with
`vjp`, a function from the gradient of the output to the gradients of the inputs. `cuflash.attention_vjp` has that same
form, so attention is one more block:

    out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    dq, dk, dv = vjp(dout)

Run it:

    python scripts/train_text.py                         # about a minute and a half on two CPU cores
    python scripts/train_text.py --plot loss.png         # also draws the loss
    python scripts/train_text.py --width 512 --layers 8 --heads 8 --seq 1024 --steps 2000      # for a GPU

Before it trains, it takes the first steps twice from the same weights, with cuflash and with plain (dense softmax)
attention, and stops if their gradients disagree. On a machine whose cores others use too, NumPy is faster with one
thread of its BLAS (OPENBLAS_NUM_THREADS=1) than with threads that wait for each other.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash

Array = Any  # numpy.ndarray or cupy.ndarray
Weights = dict[str, Array]

# Modules that stand at these places in every Python from 3.10 on. Their order fixes the text; the last tenth validates.
STDLIB_MODULES = (
    *("argparse", "ast", "calendar", "collections/__init__", "configparser", "contextlib", "csv", "dataclasses"),
    *("difflib", "doctest", "enum", "functools", "inspect", "optparse", "pdb", "pickle", "shutil", "smtplib"),
    *("statistics", "subprocess", "tarfile"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: `train` and `validation` hold positions in `characters`."""

    characters: str
    train: Array
    validation: Array
    entropy: float  # of single characters, in nats per character: what a model without context can reach at best

    def text(self, tokens: Array) -> str:
        return "".join(self.characters[int(token)] for token in tokens)


def stdlib_paths() -> list[Path]:
    """The files of the default text, in their order."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / f"{module}.py" for module in STDLIB_MODULES]


def load_corpus(paths: list[Path], xp: Any) -> Corpus:
    """Read the files, number the characters, keep the last tenth for validation."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    characters = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(characters)}
    tokens = np.array([number_of[character] for character in text], dtype=np.int64)
    frequency = np.bincount(tokens) / max(1, len(tokens))
    entropy = float(-(frequency * np.log(frequency)).sum())
    split = len(tokens) - len(tokens) // 10
    return Corpus(characters, xp.asarray(tokens[:split]), xp.asarray(tokens[split:]), entropy)


def windows(tokens: Array, starts: Array, seq: int) -> tuple[Array, Array]:
    """Cut inputs (batch, seq) and their targets, which are the inputs one character later."""
    xp = array_module(tokens)
    positions = xp.asarray(starts)[:, None] + xp.arange(seq + 1)
    batch = tokens[positions]
    return batch[:, :-1], batch[:, 1:]


# ---------------------------------------------------------------------------------------------------------------------
# Building blocks: output, vjp = block(inputs). Activations are (batch * seq, width), one row a token, so that a linear
# layer is a single matrix product. Only attention takes the two axes apart.
# ---------------------------------------------------------------------------------------------------------------------


def array_module(array: Array) -> Any:
    """The library that an array belongs to: numpy or cupy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def embedding(tokens: Array, table: Array):
    def vjp(dy: Array) -> Array:
        # A product with one-hot rows instead of a scatter: no atomics, hence the same sum in every run on a GPU.
        xp = array_module(dy)
        one_hot = (tokens[:, None] == xp.arange(len(table))).astype(dy.dtype)
        return one_hot.T @ dy

    return table[tokens], vjp


def linear(x: Array, weight: Array):
    def vjp(dy: Array) -> tuple[Array, Array]:
        return dy @ weight.T, x.T @ dy

    return x @ weight, vjp


def rms_norm(x: Array, gain: Array, epsilon: float = 1e-5):
    xp = array_module(x)
    inverse_rms = 1 / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
    normed = x * inverse_rms

    def vjp(dy: Array) -> tuple[Array, Array]:
        dnormed = dy * gain
        dx = inverse_rms * (dnormed - normed * (dnormed * normed).mean(axis=1, keepdims=True))
        return dx, (dy * normed).sum(axis=0)

    return normed * gain, vjp


def relu_squared(x: Array):
    xp = array_module(x)
    positive = xp.maximum(x, 0)

    def vjp(dy: Array) -> Array:
        return 2 * positive * dy

    return positive * positive, vjp


def rotary(x: Array, base: float = 10000.0):
    """Turn pairs of features by angles that grow with the position (Su et al., arXiv:2104.09864)."""
    xp = array_module(x)
    seq, head_dim = x.shape[-2:]
    half = head_dim // 2
    angle = xp.arange(seq)[:, None] * base ** (-xp.arange(half) / half)
    cos, sin = xp.cos(angle).astype(x.dtype), xp.sin(angle).astype(x.dtype)

    def turned(x: Array, sin: Array) -> Array:
        left, right = x[..., :half], x[..., half:]
        return xp.concatenate((left * cos - right * sin, left * sin + right * cos), axis=-1)

    def vjp(dy: Array) -> Array:
        return turned(dy, -sin)  # the transpose of a rotation turns back

    return turned(x, sin), vjp


def self_attention(x: Array, weight_qkv: Array, weight_out: Array, batch: int, heads: int, attention: Callable):
    """Causal multi-head attention: the one place where the model meets cuflash."""
    xp = array_module(x)
    tokens, width = x.shape
    seq, head_dim = tokens // batch, width // heads

    qkv, qkv_vjp = linear(x, weight_qkv)
    # Strided views of shape (batch, heads, seq, head_dim): cuflash reads any strides, so v is never copied.
    q, k, v = qkv.reshape(batch, seq, 3, heads, head_dim).transpose(2, 0, 3, 1, 4)
    (q, q_vjp), (k, k_vjp) = rotary(q), rotary(k)
    out, attention_vjp = attention(q, k, v, causal=True)
    merged = out.transpose(0, 2, 1, 3).reshape(tokens, width)
    y, out_vjp = linear(merged, weight_out)

    def vjp(dy: Array) -> tuple[Array, Array, Array]:
        dmerged, dweight_out = out_vjp(dy)
        dout = dmerged.reshape(batch, seq, heads, head_dim).transpose(0, 2, 1, 3)
        grads = attention_vjp(dout)
        dqkv = xp.stack((q_vjp(grads.dq), k_vjp(grads.dk), grads.dv)).transpose(1, 3, 0, 2, 4)
        dx, dweight_qkv = qkv_vjp(dqkv.reshape(tokens, 3 * width))
        return dx, dweight_qkv, dweight_out

    return y, vjp


def cross_entropy(logits: Array, targets: Array):
    """Mean over all tokens, in nats."""
    xp = array_module(logits)
    rows = xp.arange(len(targets))
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))

    def vjp() -> Array:
        dlogits = xp.exp(log_probability)
        dlogits[rows, targets] -= 1
        return dlogits / len(targets)

    return -log_probability[rows, targets].mean(), vjp


class AttentionGradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array


def plain_attention_vjp(q: Array, k: Array, v: Array, *, causal: bool):
    """What cuflash replaces: the whole matrix of probabilities in memory. Kept as the yardstick for the first steps."""
    xp = array_module(q)
    scale = 1 / math.sqrt(q.shape[-1])
    scores = scale * (q @ k.swapaxes(-1, -2))
    if causal:
        later = xp.arange(k.shape[-2]) > xp.arange(q.shape[-2])[:, None]
        scores = xp.where(later, -xp.inf, scores).astype(q.dtype)
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)

    def vjp(dout: Array):
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
        return AttentionGradients(scale * (ds @ k), scale * (ds.swapaxes(-1, -2) @ q), p.swapaxes(-1, -2) @ dout)

    return p @ v, vjp


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transformer:
    """A decoder: blocks of attention and a two-layer network, each behind an RMS norm."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    attention: Callable  # cuflash.attention_vjp or another one of its form

    def initial_weights(self, seed: int, dtype: Any, xp: Any) -> Weights:
        """Draw the weights on the host, so that NumPy and CuPy start from the same ones."""
        rng = np.random.default_rng((seed, 0))
        width, hidden = self.width, 4 * self.width
        into_residual = 1 / math.sqrt(2 * self.layers)  # keeps the sum over all blocks at the size of one

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            return gain / math.sqrt(rows) * rng.standard_normal((rows, columns))

        weights = {"token": 0.02 * rng.standard_normal((self.vocabulary, width))}
        for layer in range(self.layers):
            weights |= {
                f"{layer}.attention_norm": np.ones(width),
                f"{layer}.qkv": matrix(width, 3 * width),
                f"{layer}.out": matrix(width, width, into_residual),
                f"{layer}.mlp_norm": np.ones(width),
                f"{layer}.up": matrix(width, hidden),
                f"{layer}.down": matrix(hidden, width, into_residual),
            }
        weights |= {"norm": np.ones(width), "logits": matrix(width, self.vocabulary, 0.1)}
        return {name: xp.asarray(weight, dtype=dtype) for name, weight in weights.items()}

    def logits(self, weights: Weights, tokens: Array):
        """Scores of the next character, (batch * seq, vocabulary), for tokens (batch, seq)."""
        batch = len(tokens)
        x, token_vjp = embedding(tokens.reshape(-1), weights["token"])
        block_vjps = []
        for layer in range(self.layers):
            x, block_vjp = self.block(weights, layer, x, batch)
            block_vjps.append(block_vjp)
        normed, norm_vjp = rms_norm(x, weights["norm"])
        y, logits_vjp = linear(normed, weights["logits"])

        def vjp(dy: Array) -> Weights:
            grads: Weights = {}
            dnormed, grads["logits"] = logits_vjp(dy)
            dx, grads["norm"] = norm_vjp(dnormed)
            for block_vjp in reversed(block_vjps):
                dx, block_grads = block_vjp(dx)
                grads |= block_grads
            grads["token"] = token_vjp(dx)
            return grads

        return y, vjp

    def block(self, weights: Weights, layer: int, x: Array, batch: int):
        """x + attention(norm(x)), then the same with the two-layer network."""

        def own(name: str) -> Array:
            return weights[f"{layer}.{name}"]

        normed, attention_norm_vjp = rms_norm(x, own("attention_norm"))
        attended, attention_vjp = self_attention(normed, own("qkv"), own("out"), batch, self.heads, self.attention)
        x = x + attended
        normed, mlp_norm_vjp = rms_norm(x, own("mlp_norm"))
        hidden, up_vjp = linear(normed, own("up"))
        active, relu_vjp = relu_squared(hidden)
        y, down_vjp = linear(active, own("down"))

        def vjp(dy: Array) -> tuple[Array, Weights]:
            grads: Weights = {}
            dactive, grads["down"] = down_vjp(dy)
            dnormed, grads["up"] = up_vjp(relu_vjp(dactive))
            dx, grads["mlp_norm"] = mlp_norm_vjp(dnormed)
            dx += dy
            dnormed, grads["qkv"], grads["out"] = attention_vjp(dx)
            dresidual, grads["attention_norm"] = attention_norm_vjp(dnormed)
            dx += dresidual
            return dx, {f"{layer}.{name}": grad for name, grad in grads.items()}

        return x + y, vjp

    def loss(self, weights: Weights, tokens: Array, targets: Array) -> float:
        """Cross entropy of the targets, nats per character."""
        logits, _ = self.logits(weights, tokens)
        loss, _ = cross_entropy(logits, targets.reshape(-1))
        return float(loss)

    def loss_and_gradient(self, weights: Weights, tokens: Array, targets: Array) -> tuple[float, Weights]:
        """The loss and its gradient with respect to every weight, under the weights' names."""
        logits, logits_vjp = self.logits(weights, tokens)
        loss, loss_vjp = cross_entropy(logits, targets.reshape(-1))
        return float(loss), logits_vjp(loss_vjp())


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Adam:
    """Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1."""

    def __init__(self, weights: Weights, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 1e-8) -> None:
        xp = array_module(weights["token"])
        self.beta1, self.beta2, self.epsilon, self.step = beta1, beta2, epsilon, 0
        self.first = {name: xp.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: xp.zeros_like(weight) for name, weight in weights.items()}

    def update(self, weights: Weights, grads: Weights, rate: float) -> None:
        """Change the weights in place."""
        self.step += 1
        xp = array_module(weights["token"])
        correction1, correction2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        for name, weight in weights.items():
            grad, first, second = grads[name], self.first[name], self.second[name]
            first += (1 - self.beta1) * (grad - first)
            second += (1 - self.beta2) * (grad * grad - second)
            weight -= rate / correction1 * first / (xp.sqrt(second / correction2) + self.epsilon)


class Trainer:
    """Weights on their way: the same arguments always give the same batches and so the same losses."""

    def __init__(self, model: Transformer, corpus: Corpus, args: argparse.Namespace, xp: Any) -> None:
        self.model, self.corpus, self.args = model, corpus, args
        self.weights = model.initial_weights(args.seed, args.dtype, xp)
        self.adam = Adam(self.weights)
        self.rng = np.random.default_rng((args.seed, 1))

    def step(self) -> tuple[float, Weights]:
        """One batch, one update. Returns the loss before the update and the gradient."""
        starts = self.rng.integers(0, len(self.corpus.train) - self.args.seq, self.args.batch)
        tokens, targets = windows(self.corpus.train, starts, self.args.seq)
        loss, grads = self.model.loss_and_gradient(self.weights, tokens, targets)
        self.adam.update(self.weights, grads, self.rate())
        return loss, grads

    def rate(self) -> float:
        """A linear warm-up, then half a cosine down to a tenth."""
        warmup = min(20, max(1, self.args.steps // 10))
        done = min(1.0, self.adam.step / self.args.steps)
        return self.args.rate * min(1.0, (self.adam.step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

    def validation_loss(self, batches: int) -> float:
        """Mean loss over evenly spread windows of the validation text, the same ones in every call."""
        count, seq = batches * self.args.batch, self.args.seq
        starts = np.linspace(0, len(self.corpus.validation) - seq - 1, count).astype(np.int64)
        losses = []
        for chunk in np.split(starts, batches):
            losses.append(self.model.loss(self.weights, *windows(self.corpus.validation, chunk, seq)))
        return sum(losses) / batches

    def continue_text(self, prompt: str, length: int) -> str:
        """Draw `length` characters, each from the model's prediction after those before it."""
        temperature = 0.8  # below 1 prefers the likely characters
        rng = np.random.default_rng((self.args.seed, 2))
        characters, xp = self.corpus.characters, array_module(self.corpus.train)
        tokens = [characters.index(character) for character in prompt]
        for _ in range(length):
            logits, _ = self.model.logits(self.weights, xp.asarray([tokens[-self.args.seq :]]))
            last = logits[-1].astype(np.float64) / temperature
            cumulative = xp.exp(last - last.max()).cumsum()
            drawn = int((cumulative <= cumulative[-1] * rng.random()).sum())
            tokens.append(min(drawn, len(characters) - 1))
        return self.corpus.text(tokens[len(prompt) :])


class TrainingError(Exception):
    """A run that cannot go on: a wrong gradient, or a loss that is no number."""


# Largest relative difference of two gradients that rounding explains, with room to spare; a wrong one is off by more.
# The losses are shown and not judged: every step multiplies a difference, the more the larger the learning rate.
AGREEMENT = {"float32": 1e-3, "float64": 1e-9}


def compare(left: Trainer, right: Trainer, steps: int) -> dict[str, float]:
    """Take the same steps with both; return the largest relative differences of the losses and of the first gradient.

    Adam divides a gradient by its own size, so that the losses alone would hide a gradient that is wrong by a factor.
    """
    losses, gradients = [], []
    for step in range(steps):
        left_loss, left_grads = left.step()
        right_loss, right_grads = right.step()
        losses.append(abs(left_loss - right_loss) / abs(right_loss))
        if step == 0:
            for name, grad in right_grads.items():
                gradients.append(float(abs(left_grads[name] - grad).max()) / float(abs(grad).max()))
    return {"loss": float(np.max(losses)), "gradient": float(np.max(gradients))}  # np.max does not lose a NaN


def train(trainer: Trainer, say: Callable[[str], None]) -> tuple[list[float], list[tuple[int, float]]]:
    """Train with one line of progress per `--every` steps; return the losses and (step, validation loss) pairs."""
    args = trainer.args
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    say(f"{'step':>11}  {'loss':>7}  {'valid':>7}  {'tokens/s':>9}  {'elapsed':>8}  {'ETA':>8}     (loss in nats/char)")
    start = line_start = time.perf_counter()
    for step in range(1, args.steps + 1):
        losses.append(trainer.step()[0])
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"the loss of step {step} is {losses[-1]}; try a smaller --rate")
        if step % args.every == 0 or step == args.steps:
            line_steps = (step - 1) % args.every + 1
            now = time.perf_counter()
            speed = line_steps * args.batch * args.seq / (now - line_start)
            validation.append((step, trainer.validation_loss(batches=1)))
            line_start = time.perf_counter()
            elapsed = line_start - start
            eta = elapsed / step * (args.steps - step)
            mean = sum(losses[-line_steps:]) / line_steps
            say(
                f"{step:>5}/{args.steps:<5}  {mean:7.4f}  {validation[-1][1]:7.4f}  {speed:9,.0f}"
                f"  {elapsed:7.1f}s  {eta:7.1f}s"
            )
    return losses, validation


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------


def sparkline(values: list[float], columns: int = 60) -> str:
    """A curve in one line of text, high values tall."""
    chunks = [chunk.mean() for chunk in np.array_split(values, min(columns, len(values)))]
    low, high = min(chunks), max(chunks)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round((value - low) / (high - low or 1) * (len(bars) - 1))] for value in chunks)


def plot(path: Path, losses: list[float], validation: list[tuple[int, float]], entropy: float) -> None:
    """Draw the losses into a file. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.5, label="training")
    steps, validation_losses = zip(*validation, strict=True)
    axes.plot(steps, validation_losses, color="tab:orange", marker="o", markersize=3, label="validation")
    axes.axhline(entropy, color="gray", linestyle="--", label="entropy of single characters")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="Attention by cuflash")
    axes.legend()
    figure.savefig(path, dpi=150)


def in_nats_and_bits(nats: float) -> str:
    return f"{nats:.4f} nats/char = {nats / math.log(2):.4f} bits/char"


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def whole_number(low: int) -> Callable[[str], int]:
    """An argparse type: an integer not below `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below the least value, {low}")
        return value

    return parse


def learning_rate(text: str) -> float:
    """An argparse type: a number above 0 and not above 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a character-level transformer on Python's standard library: arrays, cuflash, no framework."
    )

    def option(group: Any, name: str, help: str, default: Any, **settings: Any) -> None:  # noqa: A002
        group.add_argument(name, help=f"{help} (default: {default})", default=default, **settings)

    model = parser.add_argument_group("model")
    option(model, "--width", "features of a token", 128, type=whole_number(1))
    option(model, "--layers", "number of blocks", 3, type=whole_number(1))
    option(model, "--heads", "attention heads; must divide the width", 4, type=whole_number(1))
    option(model, "--seq", "characters that the model sees at once", 128, type=whole_number(2))

    training = parser.add_argument_group("training")
    option(training, "--steps", "number of updates", 1000, type=whole_number(1))
    option(training, "--batch", "sequences per update", 8, type=whole_number(1))
    option(training, "--rate", "largest learning rate of Adam", 2e-3, type=learning_rate)
    option(training, "--seed", "same seed, same losses", 0, type=whole_number(0))
    option(training, "--dtype", "of all arrays", "float32", choices=("float32", "float64"))
    option(
        training, "--backend", "array library; auto is cupy if it has a GPU", "auto", choices=("auto", "numpy", "cupy")
    )
    training.add_argument(
        "--deterministic",
        action="store_true",
        help="make a GPU repeat itself to the last bit; without it one seed's losses may differ by rounding there"
        " (NumPy always repeats itself)",
    )
    training.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 files to train on instead of the standard library"
    )

    report = parser.add_argument_group("report")
    option(report, "--every", "one line of progress per N steps", 25, type=whole_number(1), metavar="N")
    option(
        report,
        "--check-steps",
        "first steps to repeat with plain attention, which holds seq x seq scores; 0 skips the check",
        3,
        type=whole_number(0),
        metavar="N",
    )
    option(report, "--sample", "characters to generate at the end", 300, type=whole_number(0), metavar="N")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss into FILE; needs matplotlib")
    report.add_argument(
        "--json", action="store_true", help="print a summary as JSON on stdout, and everything else on stderr"
    )
    return parser


def choose_arrays(backend: str, parser: argparse.ArgumentParser) -> Any:
    """numpy or cupy; a `cupy` that was asked for and cannot run is an error, never a silent numpy."""
    if backend == "numpy":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()  # raises where there is no GPU or no driver
    except Exception as reason:  # cupy's own error types cannot be named where cupy is missing
        if backend == "cupy":
            parser.error(f"argument --backend: cupy cannot be used here ({reason}); use --backend numpy")
        return np
    return cupy


def run(args: argparse.Namespace, corpus: Corpus, xp: Any) -> None:
    """Check, train, report."""

    def say(line: str = "") -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    def trainer_with(attention: Callable) -> Trainer:
        model = Transformer(len(corpus.characters), args.width, args.layers, args.heads, attention)
        return Trainer(model, corpus, args, xp)

    attention = partial(cuflash.attention_vjp, deterministic=args.deterministic or None)
    trainer = trainer_with(attention)
    parameters = sum(weight.size for weight in trainer.weights.values())
    say(f"text:    {len(corpus.train):,} characters to train on, {len(corpus.validation):,} to validate,")
    say(f"         {len(corpus.characters)} different ones; entropy of single ones {in_nats_and_bits(corpus.entropy)}")
    say(
        f"model:   {parameters:,} weights, {args.layers} layers, width {args.width}, {args.heads} heads, seq {args.seq}"
    )
    say(f"arrays:  {xp.__name__} {xp.__version__}, {args.dtype}; attention: cuflash {cuflash.__version__}")

    difference = None
    if args.check_steps:
        difference = compare(trainer_with(attention), trainer_with(plain_attention_vjp), args.check_steps)
        say(
            f"check:   first {args.check_steps} steps against plain attention: largest relative difference"
            f" {difference['loss']:.1e} (loss), {difference['gradient']:.1e} (first gradient)"
        )
        if not difference["gradient"] <= AGREEMENT[args.dtype]:  # so written, a NaN disagrees
            raise TrainingError(
                f"the gradients with cuflash and with plain attention differ by {difference['gradient']:.1e}, more than"
                f" rounding explains ({AGREEMENT[args.dtype]:g})"
            )

    say()
    start = time.perf_counter()
    losses, validation = train(trainer, say)
    seconds = time.perf_counter() - start
    validation_loss = trainer.validation_loss(batches=8)
    say()
    say(f"validation: {in_nats_and_bits(validation_loss)}")
    say(f"unigram:    {in_nats_and_bits(corpus.entropy)}")

    plotted = False
    if args.plot:
        try:
            plot(args.plot, losses, validation, corpus.entropy)
            plotted = True
            say(f"plot:       {args.plot}")
        except ImportError:
            say("plot:       none, because matplotlib is not installed (pip install 'cuflash[plot]'); in text instead:")
    if not plotted:
        say(f"loss:       {losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}")

    sample = ""
    if args.sample:
        prompt = corpus.text(corpus.validation[:32]) if args.text else "\n    def "
        sample = trainer.continue_text(prompt, args.sample)
        say(f"\nsample, after {prompt!r}:\n{prompt}{sample}")

    if args.json:
        summary = {
            "arrays": xp.__name__,
            "options": vars(args),
            "parameters": parameters,
            "unigram_entropy_nats": corpus.entropy,
            "unigram_entropy_bits": corpus.entropy / math.log(2),
            "validation_loss_nats": validation_loss,
            "validation_loss_bits": validation_loss / math.log(2),
            "losses": losses,
            "difference_from_plain": difference,
            "tokens_per_second": args.steps * args.batch * args.seq / seconds,
            "seconds": seconds,
            "sample": sample,
        }
        print(json.dumps(summary, indent=2, default=str))


def main(argv: list[str] | None = None) -> int:
    parser = command_line()
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"argument --heads: {args.heads} heads do not divide a width of {args.width}")
    head_dim = args.width // args.heads
    if head_dim % 2:
        parser.error(f"argument --heads: {args.heads} heads get {head_dim} features each; rotary positions need pairs")
    if args.plot and not args.plot.absolute().parent.is_dir():
        parser.error(f"argument --plot: the folder of {args.plot} does not exist")
    xp = choose_arrays(args.backend, parser)
    try:
        corpus = load_corpus(args.text or stdlib_paths(), xp)
    except (OSError, UnicodeDecodeError) as reason:
        parser.error(f"argument --text: cannot read the text: {reason}")
    if len(corpus.characters) < 2:
        parser.error("argument --text: the text needs at least two different characters")
    if len(corpus.validation) <= args.seq:
        parser.error(
            f"argument --seq: {args.seq} is too long for this text: a tenth of it, {len(corpus.validation)} characters,"
            f" validates and must be longer than one sequence"
        )
    try:
        run(args, corpus, xp)
    except (cuflash.CuflashError, TrainingError) as reason:
        print(f"{parser.prog}: error: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a console that lacks a character of the sample shows "?" and goes on
    sys.exit(main())

"""The one rule by which results are judged, for every backend, dtype and option.

The error against float64 on the same rounded inputs may be twice the error of plain attention in the storage dtype,
plus a floor of a few units in the last place.  A value that is not finite on one side only is a failure, and where a
row sees no key, or a key is seen by no row, results are exactly 0 (lse: −∞).

"Plain attention in the storage dtype" is dense, sums in the accumulator's dtype (float32, for float64 float64), and
rounds what a separate operation would have stored: the weights P, the output, the gradient of the scores.  Errors are
compared matrix by matrix, (seq, dim) of one head, so that one bad head cannot hide behind a coarser one.

The floor keeps chance out of it, since in a small matrix plain attention may be exact by luck.  It has three parts: one
unit in the last place of the result; a few units of the accumulator in the sums that lead to it, with absolute terms in
place of signed ones (with a single key the gradient of its score is 0, and what is left is their rounding); and one
rounding of each stored intermediate, these added as random errors are, by squares.
"""

import numpy as np

from cuflash import reference
from cuflash.arrays import named_dtype
from cuflash.gradients import score_operands
from cuflash.modifiers import Tile
from cuflash.modifiers.base import sum_to
from cuflash.problem import for_twins
from cuflash.reference import sum_groups

FEW = 4  # units in the last place of the accumulator
SCALES = ("q_scale", "k_scale", "v_scale")
TENSOR_CORE_TERMS = 16  # after so many terms of a sum of 16-bit products tensor cores truncate what they have


def assert_close(got, want, plain, name, floor=0.0):
    """Fail unless `got` is as near to `want` (float64) as the rule asks; `plain` is plain attention's result.

    The last two axes are one matrix, within which the largest errors are compared; `floor`, which broadcasts to the
    other axes, is allowed on top.  Returns the largest error in units of what is allowed.
    """
    assert got.shape == want.shape == plain.shape, f"{name}: shape {got.shape}, want {want.shape}, plain {plain.shape}"
    assert got.dtype == plain.dtype, f"{name}: dtype {got.dtype}, want {plain.dtype}"
    if got.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        stored = want.astype(got.dtype).astype(np.float64)  # what overflows in the dtype is infinite there
        rounded, given = plain.astype(np.float64), got.astype(np.float64)
        finite = np.isfinite(stored)
        wrong = np.where(finite, ~np.isfinite(given), ~((given == stored) | (np.isnan(given) & np.isnan(stored))))
        if wrong.any():
            at = tuple(map(int, np.argwhere(wrong)[0]))
            raise AssertionError(f"{name}{list(at)} is {given[at]}, want {stored[at]} ({wrong.sum()} such values)")
        error = matrix_max(np.where(finite, abs(given - want), 0))
        of_plain = matrix_max(np.where(finite & np.isfinite(rounded), abs(rounded - want), 0))
        ulp = epsilon(got.dtype) * matrix_max(np.where(finite, abs(want), 0))
        allowed = 2 * of_plain + ulp + floor
        ratio = np.where(error == 0, 0, error / np.where(allowed == 0, np.finfo(np.float64).tiny, allowed))
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    assert ratio[at] <= 1, (
        f"{name}{list(map(int, at))}: error {error[at]:.3g}, allowed {np.broadcast_to(allowed, error.shape)[at]:.3g} "
        f"(plain attention in {got.dtype}: {of_plain[at]:.3g})"
    )
    return float(ratio[at])


def assert_zero(got, where, name):
    """Fail unless `got` is exactly 0 at `where`, which broadcasts to it."""
    wrong = np.broadcast_to(where, got.shape) & ~(got.astype(np.float64) == 0)
    assert not wrong.any(), f"{name}{np.argwhere(wrong)[0].tolist()} is {got[wrong][0]}: must be exactly 0"


class Expectation:
    """What one call must return; arrays have the axes (*batch, heads, seq, dim)."""

    def __init__(self, call, dout=None, dlse=None):
        self.call, self.dout, self.dlse = call, dout, dlse
        self.seen = reference.visible(call)
        self.out, self.lse = reference.forward(call)
        self.plain = plain_attention(call, dout, dlse)
        self.floors = floors(call, dout, dlse)

    def check_forward(self, out, lse=None):
        """Check an output and, if given, a log-sum-exp; returns the largest error in units of what is allowed."""
        empty = ~self.seen.any(axis=-1)
        assert_zero(out, empty[..., None], "out")
        empty &= np.isneginf(plain_sink(self.call)[..., 0])
        ratios = [assert_close(out, self.out, self.plain["out"], "out", self.floors["out"])]
        if lse is not None:
            assert np.isneginf(lse[empty]).all(), f"lse of rows that see nothing is {lse[empty]}: must be -inf"
            want, plain = self.lse[..., None], self.plain["lse"][..., None]
            ratios.append(assert_close(lse[..., None], want, plain, "lse", self.floors["lse"]))
        return max(ratios)

    def check_statistics(self, found):
        """Check statistics by name; returns the largest error in units of what is allowed."""
        want, plain = reference.statistics(self.call), plain_statistics(self.call)
        allowed = statistics_floors(self.call, self.floors["lse"])
        empty = ~self.seen.any(axis=-1)
        ratios = [0.0]
        for name, got in found.items():
            assert got.dtype == self.call.problem.accumulator, f"{name} has dtype {got.dtype}"
            if name == "maximum":
                assert np.isneginf(got[empty]).all(), f"maximum of rows that see no key is {got[empty]}: must be -inf"
            else:
                assert_zero(got, empty if name == "entropy" else ~self.seen.any(axis=-2), name)
            if name == "entropy":
                assert not (got < 0).any(), f"an entropy is {got.min()}: must not be negative"
            matrices = (x[..., None] for x in (got, want[name], plain[name]))
            ratios.append(assert_close(*matrices, name, allowed[name]))
        return max(ratios)

    def check_backward(self, gradients):
        """Check a `Gradients`; returns the largest error in units of what is allowed."""
        want = reference.backward(self.call, self.dout, self.dlse)
        assert gradients._fields == want._fields, f"gradients are {gradients._fields}: must be {want._fields}"
        empty_row = ~self.seen.any(axis=-1)
        unseen_key = ~sum_groups(self.seen.any(axis=-2)[..., None], self.call.problem.group).astype(bool)
        assert_zero(gradients.dq, empty_row[..., None], "dq")
        assert_zero(gradients.dk, unseen_key, "dk")
        assert_zero(gradients.dv, unseen_key, "dv")
        for name in score_operands(self.call.problem.modifiers):
            got = getattr(gradients, f"d{name}")
            assert_zero(got, operand_sum(self.call, name, self.seen.astype(np.float64)) == 0, f"d{name}")
        return max(
            assert_close(getattr(gradients, name), getattr(want, name), self.plain[name], name, self.floors[name])
            for name in want._fields
        )

    def check_jvp(self, tangents, out, dout, lse, dlse):
        """Check the results of a forward mode; returns the largest error in units of what is allowed."""
        self.check_forward(out, lse)
        want = dict(zip(("dout", "dlse"), reference.jvp(self.call, tangents), strict=True))
        plain, allowed = plain_tangents(self.call, tangents), tangent_floors(self.call, tangents)
        empty = ~self.seen.any(axis=-1)
        assert_zero(dout, empty[..., None], "dout")
        assert_zero(dlse, empty & np.isneginf(plain_sink(self.call)[..., 0]), "dlse")
        ratio = assert_close(dout, want["dout"], plain["dout"], "dout", allowed["dout"])
        return max(
            ratio, assert_close(*(x[..., None] for x in (dlse, want["dlse"], plain["dlse"])), "dlse", allowed["dlse"])
        )

    def check_hvp(self, tangents, products):
        """Check the tangents of the gradients; returns the largest error in units of what is allowed."""
        want = reference.hvp(self.call, self.dout, self.dlse, tangents)
        assert products._fields == want._fields, f"tangents are {products._fields}: must be {want._fields}"
        plain = plain_tangents(self.call, tangents, self.dout, self.dlse)
        allowed = tangent_floors(self.call, tangents, self.dout, self.dlse)
        unseen_key = ~sum_groups(self.seen.any(axis=-2)[..., None], self.call.problem.group).astype(bool)
        assert_zero(products.dq, ~self.seen.any(axis=-1)[..., None], "dq")
        assert_zero(products.dk, unseen_key, "dk")
        assert_zero(products.dv, unseen_key, "dv")
        return max(
            assert_close(getattr(products, name), getattr(want, name), plain[name], name, allowed[name])
            for name in want._fields
        )


def plain_attention(call, dout=None, dlse=None):
    """out, lse and, with `dout`, the gradients by name, of dense attention that rounds what it would store."""
    problem, dtype = call.problem, call.q.dtype
    call, out_dtype = for_twins(call), named_dtype(problem.out_dtype)
    accumulator = np.dtype(problem.accumulator)

    def stored(x):
        return x.astype(dtype).astype(accumulator)

    with np.errstate(all="ignore"):
        seen = reference.visible(call)
        heads_seen = seen.any(axis=-2)[..., None]
        q = call.q.astype(accumulator)
        k, v = (np.where(heads_seen, x.astype(accumulator).repeat(problem.group, axis=-3), 0) for x in (call.k, call.v))
        tile = Tile(problem, call.operands, slice(0, problem.seq_q), slice(0, problem.seq_k))
        s, slopes = (q @ k.swapaxes(-1, -2)) * accumulator.type(problem.scale), []
        for modifier in problem.modifiers:
            if modifier.kind == "score":
                partials = {name: modifier.partial(name, s, tile) for name in modifier.differentiable}
                slopes.append((modifier, modifier.slope(s, tile), partials))
                s = modifier.apply(s, tile)
        assert s.dtype == accumulator, f"the twins turned {accumulator} scores into {s.dtype}"
        s, sink = np.where(seen, s, -np.inf), plain_sink(call)
        m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        e = np.exp(s - np.where(np.isneginf(m), 0, m))
        e_sink = np.exp(sink - np.where(np.isneginf(m), 0, m))
        total = e.sum(axis=-1, keepdims=True) + e_sink
        lse = np.where(total == 0, -np.inf, m + np.log(np.where(total == 0, 1, total)))
        p = e / np.where(total == 0, 1, total)
        factors = np.asarray(reference.weight_factors(tile), accumulator)
        result = {"out": (stored(p * factors) @ v).astype(out_dtype), "lse": lse[..., 0].astype(accumulator)}
        if dout is None:
            return result
        g = np.where(np.isneginf(lse), 0, dout.astype(accumulator))
        delta = (g * result["out"].astype(accumulator)).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta -= np.where(np.isneginf(lse), 0, dlse.astype(accumulator)[..., None])
        if "sinks" in call.operands:
            result["dsinks"] = sum_to(-e_sink / np.where(total == 0, 1, total) * delta, call.operands["sinks"].shape)
        ds = p * (factors * (g @ v.swapaxes(-1, -2)) - delta)
        for modifier, slope, partials in reversed(slopes):
            for name in modifier.differentiable:
                partial = partials[name]
                terms = ds if partial is None else np.where(ds == 0, 0, ds * partial)
                result[f"d{name}"] = operand_sum(call, name, terms).astype(call.operands[name].dtype)
            ds = ds if slope is None else ds * slope
        ds = stored(ds)
        result["dq"] = (accumulator.type(problem.scale) * (ds @ k)).astype(dtype)
        dk = accumulator.type(problem.scale) * (ds.swapaxes(-1, -2) @ q)
        result["dk"] = sum_groups(dk, problem.group).astype(dtype)
        result["dv"] = sum_groups(stored(p * factors).swapaxes(-1, -2) @ g, problem.group).astype(dtype)
        return result


def plain_tangents(call, tangents, dout=None, dlse=None):
    """Tangents of out and lse and, with `dout`, of the gradients by name, of dense attention that rounds what it would store."""
    twins = for_twins(call)
    problem, dtype = call.problem, call.q.dtype
    accumulator = np.dtype(problem.accumulator)

    def stored(x):
        return x.astype(dtype).astype(accumulator)

    with np.errstate(all="ignore"):
        seen = reference.visible(call)
        heads_seen = seen.any(axis=-2)[..., None]
        given = {name: getattr(call, name) for name in "qkv"}
        moved = {name: tangents.get(name, np.zeros(x.shape, dtype)) for name, x in given.items()}

        def loaded(arrays, name):
            x = arrays[name].astype(accumulator)
            return x if name == "q" else np.where(heads_seen, x.repeat(problem.group, axis=-3), 0)

        (q, k, v), (dq, dk, dv) = ([loaded(arrays, name) for name in "qkv"] for arrays in (given, moved))
        scale, tile = (
            accumulator.type(problem.scale),
            Tile(problem, twins.operands, slice(0, problem.seq_q), slice(0, problem.seq_k)),
        )
        s = (q @ transpose(k)) * scale
        entering = (dq @ transpose(k) + q @ transpose(dk)) * scale
        slope, curvature = np.ones((), accumulator), np.zeros((), accumulator)
        for modifier in problem.modifiers:
            if modifier.kind == "score":
                own, bent = modifier.slope(s, tile), modifier.curvature(s, tile)
                if own is not None:
                    curvature = own * curvature + (0 if bent is None else bent * slope**2)
                    slope = slope * own
                s = modifier.apply(s, tile)
        s = np.where(seen, s, -np.inf)
        ds = entering * slope + tangents.get("bias", np.zeros(1)).astype(accumulator)
        ds = np.where(seen, ds, 0)
        sink, sink_moved = plain_sink(call), tangents.get("sinks", np.zeros(1)).astype(accumulator)
        m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        e = np.exp(s - np.where(np.isneginf(m), 0, m))
        e_sink = np.exp(sink - np.where(np.isneginf(m), 0, m))
        total = e.sum(axis=-1, keepdims=True) + e_sink
        p, p_sink = (np.where(total == 0, 0, x / np.where(total == 0, 1, total)) for x in (e, e_sink))
        factors = np.asarray(reference.weight_factors(reference.whole(twins)), accumulator)
        lse_moved = (p * ds).sum(axis=-1, keepdims=True) + np.where(p_sink == 0, 0, p_sink * sink_moved)
        out = stored(stored(p * factors) @ v)
        out_moved = stored(
            stored(p * ds * factors) @ v + stored(p * factors) @ dv - lse_moved * (stored(p * factors) @ v)
        )
        result = {"dout": out_moved.astype(dtype), "dlse": lse_moved[..., 0].astype(accumulator)}
        if dout is None:
            return result
        empty = total == 0
        g, dg = (np.where(empty, 0, x.astype(accumulator)) for x in (dout, tangents.get("dout", np.zeros(dout.shape))))
        delta, delta_moved = (
            (g * out).sum(axis=-1, keepdims=True),
            (dg * out + g * out_moved).sum(axis=-1, keepdims=True),
        )
        for x, to in ((dlse, delta), (tangents.get("dlse"), delta_moved)):
            if x is not None:
                to -= np.where(empty, 0, x.astype(accumulator)[..., None])
        p_moved = p * (ds - lse_moved)
        dp = factors * (g @ transpose(v)) - delta
        dp_moved = factors * (dg @ transpose(v) + g @ transpose(dv)) - delta_moved
        a, a_moved = p * dp, p_moved * dp + p * dp_moved
        if "sinks" in call.operands:
            terms = -p_sink * ((sink_moved - lse_moved) * delta + delta_moved)
            result["dsinks"] = sum_to(np.where(p_sink == 0, 0, terms), call.operands["sinks"].shape).astype(accumulator)
        if "bias" in call.operands:
            result["dbias"] = operand_sum(call, "bias", a_moved).astype(dtype)
        a, a_moved = np.where(seen, a * slope, 0), np.where(seen, a_moved * slope + a * curvature * entering, 0)
        result["dq"] = (scale * (a_moved @ k + a @ dk)).astype(dtype)
        result["dk"] = sum_groups(scale * (transpose(a_moved) @ q + transpose(a) @ dq), problem.group).astype(dtype)
        tv = transpose(factors * p_moved) @ g + transpose(factors * p) @ dg
        result["dv"] = sum_groups(tv, problem.group).astype(dtype)
        return result


def tangent_floors(call, tangents, dout=None, dlse=None):
    """What is allowed on top, by result: units of the accumulator in absolute terms, and roundings of what is stored."""
    problem, half = call.problem, epsilon(call.q.dtype) / 2
    scale, relative = abs(problem.scale), floors(call)["lse"]
    if problem.dtype == "float64":  # in which the reference itself is off by a unit for each term of its sums
        relative = relative + (problem.seq_q + problem.seq_k) * epsilon(call.q.dtype)
    with np.errstate(all="ignore"):
        seen, dense = reference.visible(call), reference.attend(call)
        heads_seen = seen.any(axis=-2)[..., None]

        def loaded(x, name):
            x = abs(numbers(x))
            return x if name == "q" else np.where(heads_seen, x.repeat(problem.group, axis=-3), 0)

        q, k, v = (loaded(getattr(call, name), name) for name in "qkv")
        dq, dk, dv = (loaded(tangents.get(name, np.zeros(getattr(call, name).shape)), name) for name in "qkv")
        p, factors = np.nan_to_num(dense.p), dense.factors
        moved = reference.move(call, dense, tangents)
        slope, curvature = numbers(np.abs(moved.slope)), numbers(np.abs(moved.curvature))
        entering = np.where(seen, scale * (dq @ transpose(k) + q @ transpose(dk)), 0)
        # A slope is off by the curvature times the error of the score, which `relative` stands for.
        ds = np.where(seen, entering * (slope + curvature) + abs(numbers(tangents.get("bias", np.zeros(1)))), 0)
        p_sink, sink = np.nan_to_num(dense.p_sink), abs(numbers(tangents.get("sinks", np.zeros(1))))
        lse = (p * ds).sum(axis=-1, keepdims=True) + p_sink * sink
        kept = factors * p
        out, out_moved = kept @ v, (kept * (ds + lse)) @ v + kept @ dv
        squares = (kept * numbers(moved.s)) ** 2 @ v**2 + kept**2 @ dv**2 + lse**2 * (kept**2 @ v**2)
        result = {
            "dlse": relative * matrix_max(lse),
            "dout": relative * matrix_max(out_moved) + 2 * half * rms_max(squares),
        }
        if dout is None:
            return result
        g, dg = abs(numbers(dout)), abs(numbers(tangents.get("dout", np.zeros(dout.shape))))
        # Outputs are stored, and what their rounding does to δ is common to all keys of a row.
        stored = half * np.sqrt((g**2 * out**2).sum(axis=-1, keepdims=True))
        stored_moved = half * np.sqrt((dg**2 * out**2 + g**2 * out_moved**2).sum(axis=-1, keepdims=True))
        delta, delta_moved = (
            (g * out).sum(axis=-1, keepdims=True),
            (dg * out + g * out_moved).sum(axis=-1, keepdims=True),
        )
        delta = delta + (0 if dlse is None else abs(numbers(dlse))[..., None])
        delta_moved = delta_moved + (abs(numbers(tangents["dlse"]))[..., None] if "dlse" in tangents else 0)
        p_moved, most = p * (ds + lse), relative.max(initial=0)
        dp, dp_moved = factors * (g @ transpose(v)), factors * (dg @ transpose(v) + g @ transpose(dv))
        a, a_moved = p * (dp + delta), p_moved * (dp + delta) + p * (dp_moved + delta_moved)
        a_stored, a_moved_stored = p * stored, p_moved * stored + p * stored_moved
        if "sinks" in call.operands:
            shape = call.operands["sinks"].shape
            terms = most * ((sink + lse) * delta + delta_moved) + (sink + lse) * stored + stored_moved
            result["dsinks"] = matrix_max(sum_to(np.broadcast_to(p_sink * terms, (*problem.lse_shape, 1)), shape))
        if "bias" in call.operands:
            result["dbias"] = matrix_max(operand_sum(call, "bias", most * a_moved + a_moved_stored))
        bend = (curvature + slope) * entering
        a_moved, a_moved_stored = a_moved * slope + a * bend, a_moved_stored * slope + a_stored * bend
        a, a_stored = a * (slope + curvature), a_stored * slope
        moved_error = most * a_moved + a_moved_stored
        error = most * a + a_stored
        result["dq"] = scale * matrix_max(moved_error @ k + error @ dk)
        result["dk"] = scale * matrix_max(sum_groups(transpose(moved_error) @ q + transpose(error) @ dq, problem.group))
        tv = transpose(factors * p_moved) @ g + transpose(kept) @ np.broadcast_to(dg, g.shape)
        result["dv"] = most * matrix_max(sum_groups(tv, problem.group))
        return result


def plain_statistics(call):
    """Statistics of dense attention in the accumulator's dtype, by name."""
    problem = call.problem
    accumulator = np.dtype(problem.accumulator)
    with np.errstate(all="ignore"):
        seen = reference.visible(call)
        q, k = call.q.astype(accumulator), call.k.astype(accumulator).repeat(problem.group, axis=-3)
        tile = Tile(problem, call.operands, slice(0, problem.seq_q), slice(0, problem.seq_k))
        s = (q @ transpose(k)) * accumulator.type(problem.scale)
        for modifier in problem.modifiers:
            if modifier.kind == "score":
                s = modifier.apply(s, tile)
        s, sink = np.where(seen, s, -np.inf), plain_sink(call)
        largest = s.max(axis=-1, keepdims=True, initial=-np.inf)
        m = np.maximum(largest, sink)
        e = np.exp(s - np.where(np.isneginf(m), 0, m))
        e_sink = np.exp(sink - np.where(np.isneginf(m), 0, m))
        total = e.sum(axis=-1, keepdims=True) + e_sink
        p = np.where(seen, e / np.where(total == 0, 1, total), 0)
        every = np.concatenate([p, np.broadcast_to(e_sink / np.where(total == 0, 1, total), m.shape)], axis=-1)
        terms = np.where(every == 0, 0, every * np.log(np.where(every == 0, 1, every)))
    return {
        "maximum": np.where(np.isnan(total), np.nan, largest)[..., 0].astype(accumulator),
        "entropy": -terms.sum(axis=-1),
        "column_sums": p.sum(axis=-2),
    }


def plain_sink(call):
    """Logits of the sinks in the accumulator's dtype, -inf where there are none."""
    accumulator = np.dtype(call.problem.accumulator)
    return call.operands.get("sinks", np.full((1, 1), -np.inf)).astype(accumulator)


def statistics_floors(call, relative):
    """What is allowed on top; `relative` is the error that a score is known to, which is a relative one of its weight."""
    problem = call.problem
    with np.errstate(all="ignore"):
        sums = np.nan_to_num(reference.weights(call)).sum(axis=-2).max(axis=-1, initial=0)
    # With weights that are off by a relative r entropies change by r · Σ p·|log p + H|, at most r times twice the largest one.
    # A sum of as many terms as there are queries is off by a unit for the root of their number.  The kernels' sums are relative to a maximum that may lag behind by 8 powers of two.
    return {
        "maximum": relative,
        "entropy": relative * (8 + 2 * np.log(max(problem.seq_k, 1))),
        "column_sums": (relative + epsilon(np.dtype(problem.accumulator)) * np.sqrt(problem.seq_q)) * sums,
    }


def floors(call, dout=None, dlse=None):
    """What is allowed on top of plain attention's error, by result; one number per matrix."""
    problem = call.problem
    scale, unit, half = abs(problem.scale), epsilon(np.dtype(problem.accumulator)), epsilon(call.q.dtype) / 2
    truncations = problem.head_dim / TENSOR_CORE_TERMS if call.q.dtype.itemsize == 2 else 0
    call = for_twins(call)
    with np.errstate(all="ignore"):
        seen = reference.visible(call)
        heads_seen = seen.any(axis=-2)[..., None]
        q = numbers(call.q)
        k, v = (np.where(heads_seen, numbers(x).repeat(problem.group, axis=-3), 0) for x in (call.k, call.v))
        dense = reference.attend(call)
        p, factors = np.nan_to_num(dense.p), dense.factors
        dropped = p * factors
        # A score is known to the unit of its largest term, and an error of the score is a relative error of its weight.
        s = scale * matrix_max(np.where(seen, abs(q) @ transpose(abs(k)), 0))
        for name, operand in call.operands.items():
            if name in SCALES:  # they are in the elements
                continue
            if operand.dtype != bool and operand.dtype.kind not in "iu":
                distance = problem.seq_q + problem.seq_k if operand.shape[-2:] == (1, 1) else 1
                s = s + distance * np.broadcast_to(matrix_max(abs(numbers(operand))), s.shape)
        relative = max(FEW, truncations) * unit * (1 + s)
        most = factors.max(initial=0)
        result = {"out": relative * most * matrix_max(abs(v)) + half * rms_max(dropped**2 @ v**2), "lse": relative}
        if dout is None:
            return result

        def grouped(x):
            return sum_groups(x, problem.group)

        group_relative = relative.reshape(*relative.shape[:-1], problem.heads_k, problem.group).max(axis=-1)
        g = numbers(dout)
        # Sums of the accumulator: dP, δ and dlse may cancel, so each counts with its absolute terms.
        dp = factors * (abs(g) @ transpose(abs(v)))
        of_lse = 0 if dlse is None else abs(numbers(dlse))[..., None]
        ds = p * (dp + (p * dp).sum(axis=-1, keepdims=True) + of_lse)
        result["dq"] = relative * scale * matrix_max(ds @ abs(k))
        result["dk"] = group_relative * scale * matrix_max(grouped(transpose(ds) @ abs(q)))
        result["dv"] = group_relative * matrix_max(grouped(transpose(dropped) @ abs(g)))
        # Roundings of stored values: dS, P, and the output that δ is made of, whose error all keys of a row share.
        dp = factors * (g @ transpose(v))
        ds2 = (p * (dp - (p * dp).sum(axis=-1, keepdims=True))) ** 2
        delta2 = (g**2 * (dropped @ v) ** 2).sum(axis=-1, keepdims=True)
        if "sinks" in call.operands:  # nothing but δ and dlse, which may cancel
            p_sink, shape = np.nan_to_num(dense.p_sink), call.operands["sinks"].shape
            terms = (p * abs(dp)).sum(axis=-1, keepdims=True) + of_lse
            result["dsinks"] = relative.max(initial=0) * matrix_max(sum_to(p_sink * terms, shape))
            result["dsinks"] += half * matrix_max(sum_to(p_sink * np.sqrt(delta2), shape))
        result["dq"] += half * scale * rms_max(ds2 @ k**2 + delta2 * (p @ k) ** 2)
        result["dk"] += half * scale * rms_max(grouped(transpose(ds2 + p**2 * delta2) @ q**2))
        result["dv"] += half * rms_max(grouped(transpose(dropped**2) @ g**2))
        for name, factor in operand_factors(call).items():
            sums = relative.max(initial=0) * matrix_max(operand_sum(call, name, ds * factor))
            result[f"d{name}"] = sums + half * matrix_max(operand_sum(call, name, p * np.sqrt(delta2) * factor))
        return result


def operand_sum(call, name, terms):
    """Sum of terms, one for each score, over those that read the same element of an operand."""
    modifier = next(m for m in call.problem.modifiers if name in m.differentiable)
    total = np.zeros(call.operands[name].shape)
    modifier.add_gradient(name, terms, total, reference.whole(call))
    return total


def operand_factors(call):
    """By how much at most a score changes with the element that it reads, by operand."""
    factors = dict.fromkeys(score_operands(call.problem.modifiers), 1.0)
    slope = 1.0
    for _, own_slope, partials in reversed(reference.attend(call).slopes):
        for name, partial in partials.items():
            factors[name] = slope * (1.0 if partial is None else numbers(abs(partial)))
        slope = slope if own_slope is None else slope * numbers(abs(own_slope))
    return factors


def matrix_max(x):
    return x.max(axis=(-2, -1), initial=0)


def rms_max(squares):
    return np.sqrt(matrix_max(squares))


def transpose(x):
    return x.swapaxes(-1, -2)


def numbers(x):
    """float64 with 0 in place of what is not finite."""
    return np.nan_to_num(x.astype(np.float64), nan=0, posinf=0, neginf=0)


def epsilon(dtype):
    """Distance from 1 to the next number."""
    return float(np.spacing(dtype.type(1)))

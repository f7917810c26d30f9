"""Documents and block masks on the device: patterns over many tiles, arrays of every place, and what is never read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, Documents
from cuflash.modifiers import Modifier
from tests.cases import DTYPES, Case
from tests.gpu.device import Device, Kind, check

SEQ = 512


def case(**options: Any) -> Case:
    return Case("sparse", heads_q=4, seq_q=200, seq_k=330, head_dim=32, dlse=True, **options)


@pytest.mark.parametrize(
    ("density", "size", "causal"),
    [
        (0.0, (128, 128), False),
        (0.5, (128, 128), True),
        (1.0, (64, 64), True),
        (0.1, (64, 32), False),
        (0.5, (16, 16), False),
        (0.5, (33, 100), True),
        (0.3, (1, 1), False),
    ],
)
def test_block_masks(device: Device, kind: Kind, density: float, size: tuple[int, int], causal: bool) -> None:
    check(device, kind, case(blocks="bhqk", block_size=size, block_density=density, causal=causal))


@pytest.mark.parametrize("documents", ["packed", "halves", "mixed", "strangers"])
def test_documents(device: Device, kind: Kind, documents: str) -> None:
    check(device, kind, case(documents=documents))
    check(device, kind, case(documents=documents, causal=True, blocks="hqk", block_size=(64, 64), softcap=3.0))


def inputs(device: Device, kind: Kind) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, 2, SEQ, 64)).astype(DTYPES[kind.dtype]) for _ in range(4))


def sparse_chain(name: str, put: Any) -> list[Modifier]:
    """Keys 256 to 511 are seen by queries 256 to 511 alone; no tile has more than 256 queries."""
    if name == "documents":
        ids = np.arange(SEQ, dtype=np.int32) // 256
        return [Documents(put(ids), put(ids))]
    return [BlockMask(put(np.array([[1, 0], [1, 1]], bool)), 256)]


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", ["documents", "blocks"])
def test_what_is_hidden_is_not_read(device: Device, kind: Kind, name: str, place: str) -> None:
    """NaN in keys and values reaches the queries that see them and no others, in both directions."""
    q, k, v, dout = inputs(device, kind)
    chain = sparse_chain(name, device.put if place == "device" else lambda x: x)
    options: dict[str, Any] = {"modifiers": chain, "backend": kind.backend}
    clean = [device.put(x) for x in (q, k, v)]
    out, lse = cuflash.attention(*clean, return_lse=True, **options)
    want = cuflash.attention_backward(device.put(dout), *clean, out, lse, **options)
    k[..., 256:, :] = v[..., 256:, :] = np.nan
    dirty = [device.put(x) for x in (q, k, v)]
    dirty_out = device.get(cuflash.attention(*dirty, **options)).astype(np.float64)
    got = cuflash.attention_backward(device.put(dout), *dirty, out, lse, **options)
    rest = slice(0, 256)
    # float32 by tensor cores leaves a head with NaN to plain float32, which rounds elsewhere
    atol = 1e-6 if (kind.backend, kind.dtype) == ("mma", "float32") else 0
    np.testing.assert_allclose(dirty_out[:, :, rest], device.get(out).astype(np.float64)[:, :, rest], rtol=0, atol=atol)
    assert np.isnan(dirty_out[:, :, 256:]).all()
    for field in got._fields:
        x, y = (device.get(getattr(g, field)).astype(np.float64)[:, :, rest] for g in (got, want))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-2 * abs(y).max(), err_msg=field)
    device.check_inputs()


def test_arrays_that_change_between_calls(device: Device, kind: Kind) -> None:
    """What a call looks up of ids and blocks is that of their values when it is made."""
    q, k, v, _ = map(device.put, inputs(device, kind))
    ids, blocks = device.put(np.zeros(SEQ, np.int32)), device.put(np.ones((4, 4), bool))
    chain = [Documents(ids, ids), BlockMask(blocks, 128)]
    call = {"modifiers": chain, "backend": kind.backend}
    whole = device.get(cuflash.attention(q, k, v, **call))
    np.testing.assert_allclose(
        whole.astype(np.float64),
        device.get(cuflash.attention(q, k, v, backend=kind.backend)).astype(np.float64),
        atol=1e-2,
    )
    device.check_inputs()
    ids[256:] = 1
    first = device.get(cuflash.attention(q, k, v, **call))[:, :, :256]
    half = device.get(cuflash.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], backend=kind.backend))
    np.testing.assert_allclose(first.astype(np.float64), half.astype(np.float64), atol=1e-2)
    blocks[0] = False
    empty = device.get(cuflash.attention(q, k, v, **call)).astype(np.float64)
    assert (empty[:, :, :128] == 0).all()
    assert (empty[:, :, 128:] != 0).all()

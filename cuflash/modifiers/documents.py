"""Documents: queries see the keys of their own document alone; tiles between different documents are skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cuflash.modifiers.base import Array, Axes, Kind, Modifier, Tile, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem

#: positions whose smallest and largest id the kernels look up together: enough that a tile needs few, and few enough
#: that the border between two documents opens little more than the tiles that it runs through
GRANULE = 32


@dataclass(frozen=True)
class Documents(Modifier):
    """Hides the keys whose id is not that of the query.

    Parameters
    ----------
    ids_q
        int32, shape (seq_q,) or broadcastable to (*batch, seq_q): the document of each query.  Sequences and NumPy
        arrays of other integers are converted where their values fit.
    ids_k
        int32, shape (seq_k,) or broadcastable to (*batch, seq_k): the document of each key.

    Notes
    -----
    Ids may come in any order.  A tile of queries and keys is neither loaded nor computed where the smallest and largest
    ids of both sides, looked up for 32 positions together, leave no common id: with documents that lie one after the
    other, time falls with the visible area.  Windows, causal masks and ALiBi keep counting positions of the whole arrays.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 3, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [3.0], [5.0]]])
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.Documents([0, 0, 1], [0, 0, 1]),))
    array([[[2.],
            [2.],
            [5.]]])
    """

    name: ClassVar[str] = "documents"
    kind: ClassVar[Kind] = "mask"
    order: ClassVar[int] = 21
    fields: ClassVar[tuple[tuple[str, str], ...]] = (
        ("View", "document_q"),
        ("View", "document_k"),
        # of each granule, by kernels/document_bounds.cu
        ("View", "document_bounds_q"),
        ("View", "document_bounds_k"),
    )
    cuda: ClassVar[str] = """
struct Documents {
  static constexpr int kGranule = GRANULE;

  // What a query and a key have of the mask, and whether they meet.
  typedef int OfQuery;
  typedef int OfKey;
  static __device__ __forceinline__ int of_query(const Params& p, const Place& place, int q) {
    return *element_at<int>(p.document_q, place.offset(p.document_q), q, 0);
  }
  static __device__ __forceinline__ int of_key(const Params& p, const Place& place, int k) {
    return *element_at<int>(p.document_k, place.offset(p.document_k), 0, k);
  }
  static __device__ __forceinline__ bool meet(int q, int k) { return q == k; }
  static __device__ __forceinline__ bool visible(const Params& p, const Place& place, int q, int k) {
    return meet(of_query(p, place, q), of_key(p, place, k));
  }
  struct Ids { int least, most; };
  static __device__ __forceinline__ Ids ids_of(const View& bounds, const Place& place, Range positions) {
    const int* of = static_cast<const int*>(bounds.data) + place.offset(bounds);
    Ids ids{0x7fffffff, -0x7fffffff - 1};
#pragma unroll 1
    for (int granule = positions.begin / kGranule; granule <= (positions.end - 1) / kGranule; ++granule) {
      ids.least = min(ids.least, of[granule * bounds.row]);
      ids.most = max(ids.most, of[granule * bounds.row + bounds.column]);
    }
    return ids;
  }
  static __device__ __forceinline__ bool tile_is_hidden(const Params& p, const Place& place, Range queries, Range keys) {
    const Ids q = ids_of(p.document_bounds_q, place, queries), k = ids_of(p.document_bounds_k, place, keys);
    return q.most < k.least || k.most < q.least;
  }
  static __device__ __forceinline__ bool tile_is_clear(const Params& p, const Place& place, Range queries, Range keys) {
    const Ids q = ids_of(p.document_bounds_q, place, queries), k = ids_of(p.document_bounds_k, place, keys);
    return q.least == k.most && q.most == k.least;  // one id on both sides
  }
};
""".replace("GRANULE", str(GRANULE))

    ids_q: Any = array_field()
    ids_k: Any = array_field()

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"document_q": "ids_q", "document_k": "ids_k"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        if operand == "document_q":
            return None, ("seq_q", problem.seq_q), None
        return None, None, ("seq_k", problem.seq_k)

    def visible(self, tile: Tile) -> Array:
        same: Array = tile.part("document_q") == tile.part("document_k")
        return same

    def tile_is_hidden(self, tile: Tile) -> bool:
        (q_least, q_most), (k_least, k_most) = (extremes(tile.part(f"document_{side}")) for side in "qk")
        return bool(((q_most < k_least) | (k_most < q_least)).all())

    def tile_is_clear(self, tile: Tile) -> bool:
        (q_least, q_most), (k_least, k_most) = (extremes(tile.part(f"document_{side}")) for side in "qk")
        return bool(((q_least == k_most) & (q_most == k_least)).all())


def extremes(ids: Array) -> tuple[Array, Array]:
    """Smallest and largest id of one side of a tile, for each batch entry."""
    return ids.min(axis=(-2, -1)), ids.max(axis=(-2, -1))

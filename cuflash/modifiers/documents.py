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
        ("Pointer", "document_bounds"),  # kernels/document_bounds.cu, of each batch entry, first those of the queries
    )
    cuda: ClassVar[str] = """
struct Documents {
  static constexpr int kGranule = GRANULE;
  struct Ids {
    int least, most;
    __device__ __forceinline__ void add(int id) {
      least = min(least, id);
      most = max(most, id);
    }
  };
  static __device__ __forceinline__ Ids no_ids() { return {0x7fffffff, -0x7fffffff - 1}; }

  // Granules of one side, and of both sides of a batch entry.
  static __device__ __forceinline__ int granules_of(int length) { return tiles_of(length, kGranule); }
  static __device__ __forceinline__ int granules(const Params& p) { return granules_of(p.seq_q) + granules_of(p.seq_k); }

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
  static __device__ __forceinline__ Ids ids_of(const Ids* bounds, Range positions) {
    Ids ids = no_ids();
#pragma unroll 1
    for (int granule = positions.begin / kGranule; granule <= (positions.end - 1) / kGranule; ++granule) {
      const Ids own = bounds[granule];
      ids.add(own.least);
      ids.add(own.most);
    }
    return ids;
  }
  struct Sides { Ids q, k; };
  static __device__ __forceinline__ Sides sides_of(const Params& p, const Place& place, Range queries, Range keys) {
    const Ids* bounds = static_cast<const Ids*>(p.document_bounds) + i64(place.entry(p)) * granules(p);
    return {ids_of(bounds, queries), ids_of(bounds + granules_of(p.seq_q), keys)};
  }
  static __device__ __forceinline__ bool tile_is_hidden(const Params& p, const Place& place, Range queries, Range keys) {
    const Sides ids = sides_of(p, place, queries, keys);
    return ids.q.most < ids.k.least || ids.k.most < ids.q.least;
  }
  static __device__ __forceinline__ bool tile_is_clear(const Params& p, const Place& place, Range queries, Range keys) {
    const Sides ids = sides_of(p, place, queries, keys);
    return ids.q.least == ids.k.most && ids.q.most == ids.k.least;  // one id on both sides
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

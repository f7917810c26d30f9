// From products q·k to scores: modifiers, then -inf where the key is hidden.
//
// `Score` (generated) composes the score modifiers.  Without any, scores stay raw products and the scale is folded into the
// exponent (`p.softmax_scale` = scale · log2 e); with some, scores are natural logits and `p.softmax_scale` = log2 e.
//
// A fragment tells where a thread's elements live: `kSize` elements, element i in column `column(i)` and in the thread's
// row `row(slot(i))` of the tile.  `kTransposed` fragments have keys as rows and queries as columns.
#pragma once
#include "attention/mask.cuh"

// A bias that is the same for all keys of a query moves lse and nothing else, so scores are made without it (kBiasApart).
template <class P> __device__ __forceinline__ Real bias_apart(const P& p, const Place& place, int q) {
  return to_real(*element_at<OutElement>(p.bias, place.offset(p.bias), min(q, place.seq_q(p) - 1), 0));
}

// Positions of a tile's corner.
struct Corner { int q, k; };

template <class Fragment> struct Positions {
  static __device__ __forceinline__ int q(const Fragment& f, Corner corner, int i) {
    return corner.q + (Fragment::kTransposed ? f.column(i) : f.row(Fragment::slot(i)));
  }
  static __device__ __forceinline__ int k(const Fragment& f, Corner corner, int i) {
    return corner.k + (Fragment::kTransposed ? f.row(Fragment::slot(i)) : f.column(i));
  }
};

// Columns of the tile that each of the thread's rows may see; a schedule may choose the second form for its fragment.
template <class Fragment> constexpr bool kRangesAsBits = false;
template <class Fragment, bool kAsBits = kRangesAsBits<Fragment>> struct RowRanges {
  Range columns[Fragment::kSlots];

  __device__ __forceinline__ RowRanges(const Fragment& f, const Params& p, const Place& place, Corner corner) {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const int origin = Fragment::kTransposed ? corner.q : corner.k;
      const Range seen = Fragment::kTransposed ? seeing_queries(p, place, corner.k + f.row(slot))
                                               : visible_keys(p, place, corner.q + f.row(slot));
      columns[slot] = {seen.begin - origin, seen.end - origin};
    }
  }
  __device__ __forceinline__ bool contains(const Fragment& f, int i) const {
    const Range r = columns[Fragment::slot(i)];
    return f.column(i) >= r.begin && f.column(i) < r.end;
  }
};
// The same as a bit for each of the thread's elements, of which the assembler makes predicates seven at a time.
template <class Fragment> struct RowRanges<Fragment, true> {
  static constexpr int kOfRow = Fragment::kSize / Fragment::kSlots, kWords = (kOfRow + 31) / 32;
  u32 seen[Fragment::kSlots][kWords];

  __device__ __forceinline__ RowRanges(const Fragment& f, const Params& p, const Place& place, Corner corner) {
    const int first = corner.k + f.first_column;
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const Range keys = visible_keys(p, place, corner.q + f.row(slot));
      const int begin = elements_before(keys.begin - first), end = elements_before(keys.end - first);
#pragma unroll
      for (int word = 0; word < kWords; ++word)
        seen[slot][word] = bits_below(end - 32 * word) & ~bits_below(begin - 32 * word);
    }
  }
  __device__ __forceinline__ bool contains(const Fragment&, int i) const {
    const int of_row = Fragment::column_index(i);
    return seen[Fragment::slot(i)][of_row / 32] >> of_row % 32 & 1;
  }

 private:
  // Of a row's elements in this thread, two of eight columns, those in front of a column.
  static __device__ __forceinline__ int elements_before(int column) {
    const int inside = max(column, 0);
    return inside / 8 * 2 + min(inside % 8, 2);
  }
  static __device__ __forceinline__ u32 bits_below(int count) { return count >= 32 ? ~0u : (1u << max(count, 0)) - 1; }
};

// Scores of the backward also carry the derivative of the modifiers, 1 where there is none.
template <int kSize, bool kKept> struct Slopes {
  Real value[kSize];
  __device__ __forceinline__ Real operator[](int i) const { return value[i]; }
  __device__ __forceinline__ Real& slot(int i) { return value[i]; }
};
template <int kSize> struct Slopes<kSize, false> {
  __device__ __forceinline__ Real operator[](int) const { return Real(1); }
};
// Scores as they enter the modifiers, where gradients of what these read depend on them.
template <int kSize, bool kKept> struct EnteringScores {
  Real entering[kSize];
  __device__ __forceinline__ Real score(int i) const { return entering[i]; }
  __device__ __forceinline__ void keep(int i, Real s) { entering[i] = s; }
};
template <int kSize> struct EnteringScores<kSize, false> {
  __device__ __forceinline__ Real score(int) const { return Real(0); }
  __device__ __forceinline__ void keep(int, Real) {}
};
// Second derivatives, where those of the backward are wanted.
template <int kSize, bool kKept> struct Curvatures {
  Real bend[kSize];
  __device__ __forceinline__ Real curvature(int i) const { return bend[i]; }
};
template <int kSize> struct Curvatures<kSize, false> {
  __device__ __forceinline__ Real curvature(int) const { return Real(0); }
};
template <class Fragment>
struct ScoreSlopes : Slopes<Fragment::kSize, Score::kHasSlope>,
                     EnteringScores<Fragment::kSize, Score::kKeepsScores>,
                     Curvatures<Fragment::kSize, Score::kHasCurvature> {};

// What the rows of a thread have of a mask of which queries and keys have parts, and whether a row meets a column; positions are
// those of elements that exist.
template <class Fragment, class Met> struct MetRows {
  typedef typename Met::OfQuery OfQuery;
  typedef typename Met::OfKey OfKey;
  OfQuery queries[Fragment::kTransposed ? 1 : Fragment::kSlots];
  OfKey keys[Fragment::kTransposed ? Fragment::kSlots : 1];

  __device__ __forceinline__ MetRows(const Fragment& f, const Params& p, const Place& place, Corner corner,
                                     Corner last) {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      if constexpr (Fragment::kTransposed)
        keys[slot] = Met::of_key(p, place, min(corner.k + f.row(slot), last.k));
      else
        queries[slot] = Met::of_query(p, place, min(corner.q + f.row(slot), last.q));
    }
  }
  __device__ __forceinline__ bool meet(int i, const Params& p, const Place& place, Corner at) const {
    if constexpr (Fragment::kTransposed)
      return Met::meet(Met::of_query(p, place, at.q), keys[Fragment::slot(i)]);
    else
      return Met::meet(queries[Fragment::slot(i)], Met::of_key(p, place, at.k));
  }
};

// `Score`, looked into only where it has second derivatives.
template <class> struct WithCurvature : Score {};

// `Score`, looked into only where all it does is to add an element of an array.
template <class> struct WithArray : Score {};

// In place: products -> scores, where all that is done is to add an element of a 16-bit array whose columns are neighbours in
// memory, or the same for all keys: rows come in 16-byte pieces or as one number.  Tells whether that is so; nothing is changed
// if not.
template <class Item, class Fragment>
__device__ __forceinline__ bool scores_by_rows(Real (&s)[Fragment::kSize], const Fragment& f, const Params& p,
                                               const Place& place, Corner corner, Real scale) {
  const View& view = WithArray<Fragment>::added(p);
  const int first_k = corner.k + f.first_column / 8 * 8;  // of the warp
  const Item* const from = element_at<Item>(view, place.offset(view), 0, first_k);
  const bool pieces = view.column == 1 && first_k + 8 * Fragment::kColumnBlocks <= place.seq_k(p) &&
                      (reinterpret_cast<u64>(from) | u64(view.row * i64(sizeof(Item)))) % 16 == 0;
  if (!pieces && view.column != 0) return false;
#pragma unroll
  for (int slot = 0; slot < Fragment::kSlots; ++slot) {
    const int q = min(corner.q + f.row(slot), place.seq_q(p) - 1);
    const Item* const row = from + q * view.row;
    const auto change = [&](int block, int of_pair, Item x) {
      const int i = Fragment::block(slot / 2, block) + slot % 2 * 2 + of_pair;
      s[i] = s[i] * scale + to_real(x);
    };
    if (pieces) {
#pragma unroll
      for (int first = 0; first < Fragment::kColumnBlocks; first += 4) {
        const uint4 piece = *reinterpret_cast<const uint4*>(row + 8 * first + f.first_column % 8 * 4);
        u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
        Fragment::spread(words);
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          change(first + block, 0, Item{u16(words[block])});
          change(first + block, 1, Item{u16(words[block] >> 16)});
        }
      }
    } else {
      const Item x = *row;
#pragma unroll
      for (int block = 0; block < Fragment::kColumnBlocks; ++block) {
        change(block, 0, x);
        change(block, 1, x);
      }
    }
  }
  return true;
}

// What `Score` adds, where all it does is to add an array: read from memory by `scores_of`, or by a type of schedules that have it
// at hand, whose add_to(s, f, scale) makes scores of products.
struct FromMemory { static constexpr bool kIsAtHand = false; };

// In place: products -> scores.  `open` tiles need no tests (attention/mask.cuh, tile_is_open), except those of masks that
// have to be asked about each element.
//
// Operands of elements that do not exist are read at the nearest one that does, and what follows from it is dropped: without a
// branch around each element, all loads of a tile are under way together.  Positions are recomputed every now and then, else
// addresses of all elements would be in registers at once.
template <bool kWithSlope, class Fragment, class Added>
__device__ __forceinline__ void scores_of(Real (&s)[Fragment::kSize], ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                          const Params& p, const Place& place, Corner corner, bool open, Real scale,
                                          Added& added) {
  typedef Positions<Fragment> At;
  constexpr bool kSloped = kWithSlope && Score::kHasSlope, kKept = kWithSlope && Score::kKeepsScores;
  constexpr bool kCurved = kWithSlope && Score::kHasCurvature;
  const int last_q = place.seq_q(p) - 1, last_k = place.seq_k(p) - 1;
  const auto existing = [&](int i) -> Corner {
    if (i % 2 == 0) {
      if constexpr (Fragment::kTransposed) corner.q = recomputed(corner.q);
      corner.k = recomputed(corner.k);
    }
    return {min(At::q(f, corner, i), last_q), min(At::k(f, corner, i), last_k)};
  };
  const auto hide = [&](int i) {
    s[i] = -infinity<Real>();
    if constexpr (kSloped) slopes.slot(i) = Real(1);
    if constexpr (kCurved) slopes.bend[i] = Real(0);
    if constexpr (kKept) slopes.keep(i, Real(0));
  };
  const auto for_each_masked = [&](auto found) {
    if constexpr (Visibility::kHasMask) {
      if (Visibility::kClearsTiles && open) return;
#pragma unroll
      for (int i = 0; i < Fragment::kSize; ++i) {
        const Corner at = existing(i);
        if (!Visibility::visible(p, place, at.q, at.k)) found(i);
      }
    }
  };
  // Where slopes or scores are kept, masks are asked before these take registers; where whole tiles need no mask, the others are
  // asked about both at once.
  constexpr bool kMarks = kSloped || kKept;
  constexpr bool kTogether = Visibility::kClearsTiles && !kMarks;
  u32 masked[(Fragment::kSize + 31) / 32] = {};
  if constexpr (kMarks) for_each_masked([&](int i) { masked[i / 32] |= 1u << i % 32; });
  bool is_done = Score::kIdentity;
  if constexpr (Added::kIsAtHand) {
    static_assert(Score::kAddsArray && !kMarks && !kCurved, "nothing else is done to scores");
    added.add_to(s, f, scale);
    is_done = true;
  } else if constexpr (Score::kAddsArray && Fragment::kSpreads && sizeof(OutElement) == 2 && !kMarks && !kCurved)
    is_done = scores_by_rows<OutElement>(s, f, p, place, corner, scale);
  if (!is_done) {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const Corner at = existing(i);
      const Real entering = s[i] * scale;
      if constexpr (kKept) slopes.keep(i, entering);
      if constexpr (kCurved) {
        slopes.slot(i) = Real(1);
        slopes.bend[i] = Real(0);
        s[i] = WithCurvature<Fragment>::apply_with_curvature(p, place, at.q, at.k, entering, slopes.slot(i),
                                                             slopes.bend[i]);
      } else if constexpr (kSloped) {
        slopes.slot(i) = Real(1);
        s[i] = Score::apply_with_slope(p, place, at.q, at.k, entering, slopes.slot(i));
      } else {
        s[i] = Score::apply(p, place, at.q, at.k, entering);
      }
      if constexpr (kMarks && Visibility::kHasMask)
        if (masked[i / 32] >> i % 32 & 1) hide(i);
    }
  }
  if (!open) {
    const RowRanges<Fragment> ranges(f, p, place, corner);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      bool seen = ranges.contains(f, i);
      if constexpr (Visibility::kHasMask || !Score::kIdentity) seen &= At::q(f, corner, i) <= last_q;
      if constexpr (kTogether && !Visibility::kMeets) {
        const Corner at = existing(i);
        seen = seen && Visibility::visible(p, place, at.q, at.k);
      }
      if (!seen) hide(i);
    }
    if constexpr (kTogether && Visibility::kMeets) {
      const MetRows<Fragment, Visibility::Met> rows(f, p, place, corner, {last_q, last_k});
#pragma unroll
      for (int i = 0; i < Fragment::kSize; ++i) {
        // Two rows share what their columns have, and no load waits for a branch.
        int& first = Fragment::kTransposed ? corner.q : corner.k;
        if (i % 4 == 0) first = recomputed(first);
        if (!rows.meet(i, p, place, {min(At::q(f, corner, i), last_q), min(At::k(f, corner, i), last_k)})) hide(i);
      }
    }
  }
  if constexpr (!kMarks && !kTogether) for_each_masked(hide);
}
template <bool kWithSlope, class Fragment>
__device__ __forceinline__ void scores_of(Real (&s)[Fragment::kSize], ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                          const Params& p, const Place& place, Corner corner, bool open, Real scale) {
  FromMemory added;
  scores_of<kWithSlope>(s, slopes, f, p, place, corner, open, scale, added);
}
template <bool kWithSlope, class Fragment>
__device__ __forceinline__ void scores_of(Real (&s)[Fragment::kSize], ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                          const Params& p, const Place& place, Corner corner, bool open) {
  scores_of<kWithSlope>(s, slopes, f, p, place, corner, open, p.scale);
}

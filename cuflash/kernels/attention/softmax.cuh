// The online softmax of the forward, and P and dS of the backward.
//
// Source: FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.  Statistics are kept per row: m the largest score so far,
// l the sum of exp(s - m); both l and the accumulator change base when m grows.  m starts at a true -inf and no finite
// stand-in for it exists anywhere: while a row has seen nothing, the shift of that step is 0.
//
// What scores are multiplied with to become powers of two comes with the arguments, or where heads have scales of their own
// with the `Units` of one head (attention/units.cuh).
#pragma once

// Further numbers per row, where they are asked for: the largest score, which m may lag behind; and the sum of
// exp(s - m)·(s - m), from which -sum p·log p follows: log l - (that sum) / l.
template <int kSlots, bool kKept> struct KeptMaximum { Real largest_score[kSlots]; };
template <int kSlots> struct KeptMaximum<kSlots, false> {};
template <int kSlots, bool kKept> struct KeptMoment {
  Real moment[kSlots];  // in powers of two; of this thread's columns only, until `finish`
};
template <int kSlots> struct KeptMoment<kSlots, false> {};

// A sink is one more term of a row's sum, for which no key and no value exist: it joins after the last key.  The sum changes
// base for it, and what the keys have added up to counts `weight` times in the new one.
struct Joined {
  Real base;  // in powers of two
  Real weight, sum;
  Real sink;  // its own part of the sum
};
template <class P> __device__ __forceinline__ Joined joined(Real m, Real l, Real sink, const P& p,
                                                            Real lift = Real(0)) {
  if (m == -infinity<Real>() && sink == -infinity<Real>()) return {sink, Real(0), Real(0), Real(0)};
  const Real of_keys = m * p.softmax_scale - lift, base = max_of(of_keys, sink);
  const Real weight = m == -infinity<Real>() ? Real(0) : exp2_of(of_keys - base), part = exp2_of(sink - base);
  return {base, weight, l * weight + part, part};
}
template <int kSlots, bool kKept> struct KeptSink { Real base[kSlots], weight[kSlots]; };
template <int kSlots> struct KeptSink<kSlots, false> {};

template <class Fragment, bool kMaximum = false, bool kEntropy = false, bool kLags = true>
struct OnlineSoftmax : KeptMaximum<Fragment::kSlots, kMaximum>,
                       KeptMoment<Fragment::kSlots, kEntropy>,
                       KeptSink<Fragment::kSlots, kHasSinks> {
  Real m[Fragment::kSlots];
  Real l[Fragment::kSlots];  // of this thread's columns only, until `finish`
  // Powers of two by which m may lag behind the largest score, and by which probabilities are lifted: 8-bit elements have so
  // few below 1 that they take as many as they have above, up to 448.
  static constexpr Real kSlack = Real(!kLags ? 0 : sizeof(Element) == 1 ? 3.8 : 6);
  static constexpr Real kLift = Real(sizeof(Element) == 1 ? 5 : 0);
  static constexpr int kReach = 100;
  // (s - m) · scale is right for any scores; s · scale - m · scale takes one instruction less, which 16-bit kernels feel,
  // and is as good until the rounding of m · scale, the same for a whole row, is more than the division by l takes back.
  static constexpr bool kSubtracts = sizeof(Element) >= 4;
  static constexpr Real kFar = Real(1 << 20);
  static constexpr Real kLog2 = Real(0.6931471805599453);
  static constexpr Real kNothing = Real(-2000);  // a power of two that is 0 in every type

  template <class P> static __device__ __forceinline__ bool is_far(Real score, const P& p) {
    return !kSubtracts & (fabs(score * p.softmax_scale) > kFar);
  }

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      m[slot] = -infinity<Real>();
      l[slot] = Real(0);
      if constexpr (kMaximum) this->largest_score[slot] = -infinity<Real>();
      if constexpr (kEntropy) this->moment[slot] = Real(0);
    }
  }

  // One block of keys: scores -> probabilities relative to m, accumulator brought to the new base.
  template <class Accumulator, int kSize, class P>
  __device__ __forceinline__ void step(Real (&s)[Fragment::kSize], Real (&o)[kSize], const P& p) {
    Real alpha[Fragment::kSlots];
    bool subtracted = false;
    if (rebase(s, alpha, subtracted, p)) rescale<Accumulator>(o, alpha);
    exponentiate(s, subtracted, p);
  }

  // The first half of a step: m follows the maximum; tells whether the accumulator must be multiplied by `alpha`.
  //
  // It follows lazily: while no row outgrows its m by more than 2^kSlack, nothing changes base.  Probabilities then reach
  // at most 2^kSlack, which every element type holds, sums are exact all the same, and the multiplications of the whole
  // accumulator are rarely needed.  What a row pays is the rounding of its largest probability, which at the base of the
  // maximum is exactly 1: with a slack of 8 peaked rows come out 1.3 times as far off, with 6 1.2 times.  Far scores are
  // `subtracted` from here on: what is left is s - m.
  template <class P>
  __device__ __forceinline__ bool rebase(Real (&s)[Fragment::kSize], Real (&alpha)[Fragment::kSlots], bool& subtracted,
                                         const P& p) {
    Real largest[Fragment::kSlots];
    find_largest(largest, s);
    bool rare = false;
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      largest[slot] = Fragment::row_max(largest[slot]);
      if constexpr (kMaximum) this->largest_score[slot] = max_of(this->largest_score[slot], largest[slot]);
      rare |= outgrown(largest, slot, p) | is_far(m[slot], p);
    }
    if (!Fragment::any(rare)) return false;
    move_to(largest, alpha, p);
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot)
      subtracted |= is_far(m[slot], p) & (m[slot] != -infinity<Real>());
    if (subtracted) {
#pragma unroll
      for (int i = 0; i < Fragment::kSize; ++i)
        s[i] -= m[Fragment::slot(i)] == -infinity<Real>() ? Real(0) : m[Fragment::slot(i)];
    }
    return true;
  }

  // Whether `guess` may be tried: every row has seen something, and nothing far.
  template <class P> __device__ __forceinline__ bool may_guess(const P& p) const {
    bool far = false;
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) far |= is_far(m[slot], p);
    return !Fragment::any(far);
  }

  // Both halves of a step at once, for a block of which every row sees every key: exponentials relative to the m of before,
  // and no maximum at all, since their sum, which is wanted anyway, tells whether m would have had to move.  False when the
  // guess was lost: then the state is that of before, `s` holds the scores again, and the two halves must follow.
  //
  // It is exact for any scores.  While no thread's part of a row sums to more than 2^kSlack, no probability passes that, so
  // `rebase` would have left m alone as well, and the results are the same bit for bit.  Up to 2^kReach, probabilities and
  // their sums are finite; they are brought to a new base before anything rounds them to a narrower type, and what vanished
  // in the old base is nothing in the new one.  Beyond, or where there is a NaN, nothing of them is used, and `again`
  // computes the scores anew.
  //
  // `settled` is called once, as soon as it is known that the scores will not be needed again.
  template <class P, class Settled, class Again>
  __device__ __forceinline__ bool guess(Real (&s)[Fragment::kSize], Real (&alpha)[Fragment::kSlots], bool& moved,
                                        const P& p, Settled settled, Again again) {
    const OnlineSoftmax before = *this;
    exponentiate(s, false, p);
    const auto sums_pass = [&](Real limit) {
      bool passed = false;
#pragma unroll
      for (int slot = 0; slot < Fragment::kSlots; ++slot) passed |= !(l[slot] - before.l[slot] <= limit);
      return Fragment::any(passed);
    };
    const bool rare = sums_pass(exp2_of(kSlack + kLift));
    if (!rare) {
      settled();
      return true;
    }
    const bool beyond = sums_pass(exp2_of(kReach + kLift));
    if (beyond) {
      *this = before;
      again();
    } else {
      follow(s, before, alpha, p);
      moved = true;
    }
    settled();
    return !beyond;
  }

  // The second half: scores -> probabilities, and their sums.
  template <class P>
  __device__ __forceinline__ void exponentiate(Real (&s)[Fragment::kSize], bool subtracted, const P& p) {
    Real shift[Fragment::kSlots];
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot)
      shift[slot] = m[slot] == -infinity<Real>() || subtracted ? Real(0) - kLift
                    : kSubtracts                               ? m[slot]
                                                               : m[slot] * p.softmax_scale - kLift;
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const Real base = shift[Fragment::slot(i)];
      const Real power = kSubtracts ? (s[i] - base) * p.softmax_scale : fma_of(s[i], p.softmax_scale, -base);
      s[i] = exp2_of(power);
      // What is hidden weighs 0, and 0 · -inf is NaN.
      if constexpr (kEntropy)
        this->moment[Fragment::slot(i)] = fma_of(s[i], max_of(power, kNothing), this->moment[Fragment::slot(i)]);
    }
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) l[Fragment::slot(i)] += s[i];
  }

  // An accumulator at the base that m moved to.
  template <class Accumulator, int kSize>
  static __device__ __forceinline__ void rescale(Real (&o)[kSize], const Real (&alpha)[Fragment::kSlots]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) o[i] *= alpha[Accumulator::slot(i)];
  }

  // After the last block: completes l.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      l[slot] = Fragment::row_sum(l[slot]);
      if constexpr (kEntropy) this->moment[slot] = Fragment::row_sum(this->moment[slot]);
    }
  }
  // After `finish`: all scores of a row become larger by a number, which the weights of its keys do not notice.
  template <class P> __device__ __forceinline__ void move(int slot, Real by, const P& p) {
    if (l[slot] == Real(0)) return;
    const bool hides = by == -infinity<Real>();
    l[slot] = hides ? Real(0) : l[slot] + (by - by);  // NaN from anything else that is not finite
    m[slot] = hides ? by : m[slot] + by / (p.softmax_scale * kLog2);
  }
  // After `finish`, for the rows of a place: their sink, if they have one, joins l, which is relative to `base` from here on.
  __device__ __forceinline__ void join_sink(const Params& p, const Place& place) { join_sink(p, place, p); }
  template <class P> __device__ __forceinline__ void join_sink(const Params& p, const Place& place, const P& units) {
    if constexpr (kHasSinks) {
      const Real sink = sink_of(p, place);
#pragma unroll
      for (int slot = 0; slot < Fragment::kSlots; ++slot) {
        const Joined row = joined(m[slot], l[slot], sink, units, kLift);
        if constexpr (kEntropy) {
          const Real moved = fma_of(m[slot] * units.softmax_scale - row.base, l[slot], this->moment[slot]);
          this->moment[slot] = row.weight == Real(0) ? Real(0) : row.weight * moved;
          if (row.sink != Real(0)) this->moment[slot] += row.sink * (sink - row.base);
        }
        this->base[slot] = row.base;
        this->weight[slot] = row.weight;
        l[slot] = row.sum;
      }
    }
  }
  // A row that saw nothing has the output 0 and lse = -inf.
  __device__ __forceinline__ Real inverse(int slot) const {
    if constexpr (kHasSinks) return l[slot] == Real(0) ? Real(0) : this->weight[slot] / l[slot];
    return l[slot] == Real(0) ? Real(0) : Real(1) / l[slot];
  }
  template <class P> __device__ __forceinline__ Real lse(int slot, const P& p) const {
    if constexpr (kHasSinks)
      return l[slot] == Real(0) ? -infinity<Real>() : fma_of(this->base[slot], kLog2, log_of(l[slot]));
    const Real log_sum = log_of(l[slot]) - kLift * kLog2;
    return l[slot] == Real(0) ? -infinity<Real>() : fma_of(m[slot], p.softmax_scale * kLog2, log_sum);
  }
  // Of a row that saw nothing -inf, and of one whose lse is NaN NaN, which `max_of` drops.
  __device__ __forceinline__ Real maximum(int slot, const Params& p) const {
    return l[slot] != l[slot] ? l[slot] : this->largest_score[slot] * (p.softmax_scale * kLog2);
  }
  // Of a row that saw nothing 0; rounding does not take it below.
  __device__ __forceinline__ Real entropy(int slot) const {
    const Real h = log_of(l[slot]) - kLog2 * this->moment[slot] / l[slot];
    return l[slot] == Real(0) || h < Real(0) ? Real(0) : h;
  }

 private:
  // Of m and this thread's scores.
  __device__ __forceinline__ void find_largest(Real (&largest)[Fragment::kSlots],
                                               const Real (&s)[Fragment::kSize]) const {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) largest[slot] = m[slot];
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) largest[Fragment::slot(i)] = max_of(largest[Fragment::slot(i)], s[i]);
  }
  // Whether a row's probabilities relative to m pass 2^kSlack.
  template <class P>
  __device__ __forceinline__ bool outgrown(const Real (&largest)[Fragment::kSlots], int slot, const P& p) const {
    return (largest[slot] - m[slot]) * p.softmax_scale > kSlack;
  }
  // m and l to a base in which the largest of these probabilities, relative to m, is 1, and they as well.  Lifted ones have less
  // room above 1, so that rows of many equal scores would be here in every block: there it is their sums that reach 1.
  template <class P>
  __device__ __forceinline__ void follow(Real (&s)[Fragment::kSize], const OnlineSoftmax& before,
                                         Real (&alpha)[Fragment::kSlots], const P& p) {
    Real largest[Fragment::kSlots] = {};
    if constexpr (kLift != Real(0)) {
#pragma unroll
      for (int slot = 0; slot < Fragment::kSlots; ++slot) largest[slot] = (l[slot] - before.l[slot]) * exp2_of(-kLift);
    } else {
#pragma unroll
      for (int i = 0; i < Fragment::kSize; ++i) largest[Fragment::slot(i)] = max_of(largest[Fragment::slot(i)], s[i]);
    }
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const Real powers = log2_of(max_of(Fragment::row_max(largest[slot]), Real(1)));
      alpha[slot] = exp2_of(-powers);
      m[slot] += powers / p.softmax_scale;
      l[slot] *= alpha[slot];
    }
    rescale<Fragment>(s, alpha);
  }
  template <class P>
  __device__ __forceinline__ void move_to(const Real (&largest)[Fragment::kSlots], Real (&alpha)[Fragment::kSlots],
                                          const P& p) {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      alpha[slot] = largest[slot] == -infinity<Real>() ? Real(1) : exp2_of((m[slot] - largest[slot]) * p.softmax_scale);
      if constexpr (kEntropy) {
        // Every s - m changes by what m moves; nothing is left where that is infinite, or where nothing was seen.
        const Real moved = fma_of((m[slot] - largest[slot]) * p.softmax_scale, l[slot], this->moment[slot]);
        this->moment[slot] = m[slot] == -infinity<Real>() || alpha[slot] == Real(0) ? Real(0) : alpha[slot] * moved;
      }
      m[slot] = largest[slot];
      l[slot] *= alpha[slot];
    }
  }
};

// What the backward keeps per query: lse in the units of the exponent, and delta = dout·out - dlse.
struct alignas(2 * sizeof(Real)) RowStatistics {
  Real shift;  // +inf for rows that see nothing or do not exist, so that their probabilities are exactly 0
  Real delta;
};
__device__ __forceinline__ RowStatistics row_statistics(Real lse, Real delta) {
  const bool empty = lse == -infinity<Real>();
  return {empty ? infinity<Real>() : lse * Real(1.4426950408889634), empty ? Real(0) : delta};
}

// Of a row that does not exist, which is one that sees nothing.
__device__ __forceinline__ RowStatistics no_row_statistics() { return row_statistics(-infinity<Real>(), Real(0)); }

// What the backward keeps of a tile of queries where one load shall bring what two neighbours have of either.
template <int kRows> struct alignas(16) TileStatistics { Real shift[kRows], delta[kRows]; };

// Those of a row, counted over all heads, however they lie.
template <int kRows> __device__ __forceinline__ RowStatistics statistics_of(const void* statistics, i64 line) {
  if constexpr (kRows > 1) {
    const TileStatistics<kRows>& tile = static_cast<const TileStatistics<kRows>*>(statistics)[line / kRows];
    return {tile.shift[line % kRows], tile.delta[line % kRows]};
  } else {
    return static_cast<const RowStatistics*>(statistics)[line];
  }
}

// P from a score and its row's statistics; rounding of a large lse cannot lift it above 1.
// Lifted by 2^kLift where the shift is less by kLift.
template <int kLift = 0, class P> __device__ __forceinline__ Real probability(Real s, Real shift, const P& p) {
  return exp2_of(min_or_nan(fma_of(s, p.softmax_scale, -shift), Real(kLift)));
}
// The same by a function object that makes powers of two and knows none above 1 (hw/exp2_f64.cuh).
template <class Exp2>
__device__ __forceinline__ Real probability_by(const Exp2& exp2, Real s, Real shift, const Params& p) {
  return exp2(fma_of(s, p.softmax_scale, -shift));
}
// P where a key that its query does not see weighs nothing even if the query's lse is NaN.
__device__ __forceinline__ Real seen_probability(Real s, Real shift, const Params& p) {
  return s == -infinity<Real>() ? Real(0) : probability(s, shift, p);
}
// Gradient of a sink's logit, in powers of two, by one row: that of a score whose key has the value 0.
__device__ __forceinline__ Real sink_gradient(Real sink, const RowStatistics& row) {
  const Real weight = exp2_of(min_or_nan(sink - row.shift, Real(0)));
  return weight == Real(0) ? Real(0) : -weight * row.delta;
}
// Gradient of the score that enters the softmax.
__device__ __forceinline__ Real score_gradient(Real probability, Real dp, Real delta) {
  return probability * (dp - delta);
}

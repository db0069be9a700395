// Tiles of float32: the exponents of K, what forward and backward make of them while they are in registers, and
// mixing. K[r][c] is for key r and query c, vectors run along the queries.
#pragma once
#include "head.h"

namespace gka {

// A block of K (and in the backward pass of M, the gradient of its exponents) in the L2 cache. Its ranges end with the
// last token: padding fills tiles up but is not mixed.
struct Block {
  Range keys, queries;
  int64_t stride;
  float *k, *m;
  GKA_INLINE int64_t at(int64_t r, int64_t c) const { return (r - keys.begin) * stride + (c - queries.begin); }
};

// Rows must not lie in one set of the L1 cache.
inline int64_t block_stride(const Plan& plan) { return plan.block + (plan.block % 64 ? 0 : 16); }

template <int ROWS, int V>
GKA_INLINE void clear(Vector (&acc)[ROWS][V]) {
  GKA_UNROLL for (int r = 0; r < ROWS; r++)
    GKA_UNROLL for (int v = 0; v < V; v++) acc[r][v] = Vector::all(0.0f);
}

// acc[r][v] += sum_d a[d][r] b[d][c] over a chunk of the channels of two panels, added up apart if it is not the first.
// A function of its own: inlined beside earlier sums, gcc runs out of registers and reads the columns for every row.
template <int V, bool FIRST>
GKA_NOINLINE void multiply_chunk(const float* a, const float* b, int64_t channels, Vector (&acc)[TILE_ROWS][V]) {
  Vector sum[TILE_ROWS][V];
  GKA_UNROLL for (int r = 0; r < TILE_ROWS; r++)
    GKA_UNROLL for (int v = 0; v < V; v++) sum[r][v] = FIRST ? acc[r][v] : Vector::all(0.0f);
  for (int64_t d = 0; d < channels; d++, a += PANEL, b += PANEL) {
    Vector column[V];
    GKA_UNROLL for (int v = 0; v < V; v++) column[v] = Vector::load(b + v * Vector::LANES);
    GKA_UNROLL for (int r = 0; r < TILE_ROWS; r++) {
      Vector row = Vector::all(a[r]);
      GKA_UNROLL for (int v = 0; v < V; v++) sum[r][v] = fma(row, column[v], sum[r][v]);
    }
  }
  GKA_UNROLL for (int r = 0; r < TILE_ROWS; r++)
    GKA_UNROLL for (int v = 0; v < V; v++) acc[r][v] = FIRST ? sum[r][v] : acc[r][v] + sum[r][v];
}

// The same over all channels, as half norms are added up: K_ii is then exactly 1.
template <int V>
GKA_INLINE void multiply(const float* a, const float* b, int64_t head_dim, Vector (&acc)[TILE_ROWS][V]) {
  const int64_t chunk = channels_at_once(head_dim);
  multiply_chunk<V, true>(a, b, std::min(head_dim, chunk), acc);
  for (int64_t d = chunk; d < head_dim; d += chunk)
    multiply_chunk<V, false>(a + d * PANEL, b + d * PANEL, std::min(head_dim - d, chunk), acc);
}

// log2 K from x.k, |k|^2/2 and |x|^2/2, all scaled. Equal tokens give exactly 0, and rounding gives nothing above it.
GKA_INLINE Vector exponent(Vector product, Vector half_norm_key, Vector half_norm_query) {
  return lesser(Vector::all(0.0f), product - half_norm_key - half_norm_query);
}

// Lanes of the vector from query c on that see key r.
GKA_INLINE Vector visible(const Reach& reach, int64_t r, int64_t c, Vector value, Vector hidden) {
  Range seen = reach.seen_by(r);
  return value.keep(seen.begin - c, seen.end - 1 - c, hidden);
}

// A unit on the diagonal of a symmetric K has all its elements: its sums along rows equal those along columns.
template <bool SYMMETRIC>
GKA_INLINE bool on_diagonal(int64_t r, int64_t c) {
  return SYMMETRIC && unit_of(r) == unit_of(c);
}

// Call tile.template run<V>(r, c, masked) for tiles that cover all units of the block with a visible element.
template <typename Tile>
inline void each_tile(const Reach& reach, const Block& block, const Tile& tile) {
  constexpr int64_t L = Vector::LANES;
  for (int64_t c0 = block.queries.begin; c0 < block.queries.end; c0 += PANEL)
    for (int64_t unit = block.keys.begin; unit < block.keys.end; unit += UNIT) {
      Range queries = reach.queries(unit).within({c0, std::min(c0 + PANEL, block.queries.end)});
      if (queries.empty()) continue;
      const bool masked = reach.hides({unit, unit + UNIT}, queries);
      for (int64_t r = unit; r < std::min(unit + UNIT, block.keys.end); r += TILE_ROWS)
        for (int64_t c = queries.begin; c < queries.end;) {
          int64_t rest = (queries.end - c + L - 1) / L, vectors = rest == 4 ? 2 : std::min<int64_t>(rest, TILE_VECTORS);
          if (vectors == 3) tile.template run<3>(r, c, masked);
          else if (vectors == 2) tile.template run<2>(r, c, masked);
          else tile.template run<1>(r, c, masked);
          c += vectors * L;
        }
    }
}

// Rows of channels that are sums of many rows. Long sums also keep their rounding errors, `rest` numbers further on.
struct Sums {
  static constexpr int64_t SOME = 48, LONG = 2048;  // tokens that a token sees, each of which adds one to four terms
  float* sum = nullptr;
  int64_t channels = 0, size = 0, rest = 0;
  int64_t at_once = 48;  // terms that are added up one after another, and rounded each time

  void take(Arena& arena, const Tokens& tokens, int64_t seen) {
    channels = tokens.channels, size = tokens.padded * channels, rest = seen > LONG ? size : 0;
    at_once = seen > LONG ? 96 : seen > SOME ? 48 : 8;
    sum = arena.take(size + rest);
  }
  void clear() const { std::fill(sum, sum + size + rest, 0.0f); }
  GKA_INLINE void scale(int64_t row, float factor) const {
    for (int64_t o = row * channels; o < size + rest; o += size)
      for (int64_t d = o; d < o + channels; d += Vector::LANES)
        (Vector::load(sum + d) * Vector::all(factor)).store(sum + d);
  }
  // A vector of the sum over all parts. Where a sum is infinite, its rounding error is NaN.
  GKA_INLINE Vector get(int64_t o, int64_t parts, int64_t slot_size) const {
    Vector total = Vector::all(0.0f), lost = total;
    for (int64_t part = 0; part < parts; part++, o += slot_size) {
      total = total + Vector::load(sum + o);
      if (rest) lost = lost + Vector::load(sum + o + rest).or_zero();
    }
    return total + lost;
  }
};

// y[t] += sum_j k(j, t) rows[j] (+ the same of a second pair) for ROWS tokens t and V vectors of channels; k(j, t) is
// K[j][t] if DOWN, along a column, else K[t][j]. What rounding takes from y is added to y[rest], unless rest is 0.
template <int ROWS, int V, bool DOWN, bool TWO>
inline void mix_tile(const float* k, const float* k2, int64_t stride, const float* x, const float* x2, int64_t count,
                     float* y, int64_t rest, int64_t channels) {
  constexpr int64_t L = Vector::LANES;
  Vector acc[ROWS][V];
  clear(acc);
  const int64_t step = DOWN ? stride : 1, side = DOWN ? 1 : stride;
  auto add = [&](const float* weights, const float* from) __attribute__((always_inline)) {
    Vector channel[V];
    GKA_UNROLL for (int v = 0; v < V; v++) channel[v] = Vector::load(from + v * L);
    GKA_UNROLL for (int t = 0; t < ROWS; t++) {
      Vector weight = Vector::all(weights[t * side]);
      GKA_UNROLL for (int v = 0; v < V; v++) acc[t][v] = fma(weight, channel[v], acc[t][v]);
    }
  };
  for (int64_t j = 0; j < count; j++) {
    add(k + j * step, x + j * channels);
    if (TWO) add(k2 + j * step, x2 + j * channels);
  }
  auto each = [&](auto add_to) __attribute__((always_inline)) {
    GKA_UNROLL for (int t = 0; t < ROWS; t++)
      GKA_UNROLL for (int v = 0; v < V; v++) add_to(y + t * channels + v * L, acc[t][v]);
  };
  if (!rest) return each([](float* sum, Vector more) { (Vector::load(sum) + more).store(sum); });
  each([rest](float* sum, Vector more) {
    const Vector before = Vector::load(sum), after = before + more, added = after - before;
    const Vector lost = (before - (after - added)) + (more - added);
    after.store(sum), (Vector::load(sum + rest) + lost).store(sum + rest);
  });
}

// A matrix and the rows that it mixes; the second of two may be empty.
struct Term {
  const float *matrix, *rows;
};

// The tokens from y on, up to a UNIT, as mix_tile.
template <bool DOWN, bool TWO>
inline void mix_unit(Term a, Term b, int64_t stride, int64_t count, float* y, int64_t rest, int64_t channels,
                     int64_t tokens) {
  constexpr int64_t L = Vector::LANES;
  const int64_t vectors = channels / L, passes = (vectors + MIX_VECTORS - 1) / MIX_VECTORS;
  for (int64_t pass = 0, done = 0; pass < passes; pass++) {
    const int64_t width = (vectors - done) / (passes - pass), d = done * L;
    auto part = [&](auto rows, auto v, int64_t t) __attribute__((always_inline)) {
      if (t >= tokens) return;
      const int64_t o = DOWN ? t : t * stride;
      mix_tile<decltype(rows)::value, decltype(v)::value, DOWN, TWO>(
          a.matrix + o, TWO ? b.matrix + o : nullptr, stride, a.rows + d, TWO ? b.rows + d : nullptr, count,
          y + t * channels + d, rest, channels);
    };
    auto unit = [&](auto v) __attribute__((always_inline)) {  // 6 + 5 + 5 tokens
      part(std::integral_constant<int, 6>(), v, 0);
      part(std::integral_constant<int, 5>(), v, 6);
      part(std::integral_constant<int, 5>(), v, 11);
    };
    if (width == 1) unit(std::integral_constant<int, 1>());
    else if (width == 2) unit(std::integral_constant<int, 2>());
    else if (width == 3) unit(std::integral_constant<int, std::min(3, MIX_VECTORS)>());
    else unit(std::integral_constant<int, MIX_VECTORS>());
    done += width;
  }
}

// to_c += sum_r a[r][c] a.rows_r (+ b): the queries of the block gather its keys. The rows of those at once stay in the
// L1 cache.
template <bool TWO>
inline void gather_by_queries(const Reach& reach, const Block& block, Term a, Term b, const Sums& to) {
  const int64_t chunk = to.at_once / (TWO ? 2 : 1), channels = to.channels;
  for (int64_t j = block.keys.begin; j < block.keys.end; j += chunk)
    for (int64_t c = block.queries.begin; c < block.queries.end; c += UNIT) {
      Range keys = reach.keys(c).within({j, std::min(j + chunk, block.keys.end)});
      if (reach.symmetric) keys.end = std::min(keys.end, c);  // its diagonal unit is gathered by the keys
      if (keys.empty()) continue;
      const int64_t o = block.at(keys.begin, c), from = keys.begin * channels;
      mix_unit<true, TWO>({a.matrix + o, a.rows + from}, {b.matrix + o, b.rows + from}, block.stride,
                          keys.end - keys.begin, to.sum + c * channels, to.rest, channels, block.queries.end - c);
    }
}

// to_r += sum_c a[r][c] a.rows_c (+ b): the keys of the block gather its queries.
template <bool TWO>
inline void gather_by_keys(const Reach& reach, const Block& block, Term a, Term b, const Sums& to) {
  const int64_t chunk = to.at_once / (TWO ? 2 : 1), channels = to.channels;
  for (int64_t j = block.queries.begin; j < block.queries.end; j += chunk)
    for (int64_t r = block.keys.begin; r < block.keys.end; r += UNIT) {
      Range queries = reach.queries(r).within({j, std::min(j + chunk, block.queries.end)});
      if (queries.empty()) continue;
      const int64_t o = block.at(r, queries.begin), from = queries.begin * channels;
      mix_unit<false, TWO>({a.matrix + o, a.rows + from}, {b.matrix + o, b.rows + from}, block.stride,
                           queries.end - queries.begin, to.sum + r * channels, to.rest, channels, block.keys.end - r);
    }
}

}  // namespace gka

// One head in bfloat16: its tokens in the orders of tiles, and the exponents of a block of K.
//
// A stripe of 32 tokens is multiplied with all stripes of tokens that it sees or that see it. Blocks of 32 x 32 are
// computed completely, with hidden elements set to 0.
#pragma once
#include "bf16_tiles.h"

BF16_BEGIN

namespace gka {

constexpr int64_t CHUNK = 8 * STRIPE;     // keys whose K stays in the L1 cache until it is mixed
constexpr float FAR = 1e37f;              // the norm term of padding: K is 0 there
constexpr Half ONE = 0x3f80;

using HalfSource = RowsOf<Half>;

// Tokens in three orders: as left operand (rows), as right operand of K's products (columns), and as right operand of
// the mixing by K (mixed). There a channel of ones behind the others makes the mixing add up the weights, after they
// were rounded, so that an offset common to all tokens cancels.
struct HalfTokens {
  int64_t count, padded, head_dim, steps, outputs;
  Half *rows = nullptr, *columns = nullptr, *mixed = nullptr;

  HalfTokens(int64_t count, int64_t head_dim)
      : count(count), padded(round_up(count, STRIPE)), head_dim(head_dim), steps((head_dim + STRIPE - 1) / STRIPE),
        outputs(head_dim / UNIT + 1) {}
  void take(Arena& arena, bool with_mixed) {
    rows = halves(arena, padded * depth());
    columns = halves(arena, padded * depth());
    if (with_mixed) mixed = halves(arena, padded * outputs * UNIT);
  }
  static Half* halves(Arena& arena, int64_t numbers) { return reinterpret_cast<Half*>(arena.take(numbers / 2)); }
  int64_t depth() const { return steps * STRIPE; }
  bool sums_alone() const { return head_dim % UNIT == 0; }
  GKA_INLINE const Half* left(int64_t i) const { return rows + i * depth(); }
  GKA_INLINE const Half* right(int64_t i) const { return columns + i * depth(); }
  GKA_INLINE const Half* mixed_from(int64_t i) const { return mixed + i * outputs * UNIT; }

  void copy(const HalfSource& from) {
    for (int64_t i = 0; i < padded; i++) {
      if (i + AHEAD < count) prefetch(from.row(i + AHEAD), head_dim);
      for (int64_t d = 0; d < depth(); d += STRIPE) {
        const uint64_t filled = i < count ? std::min(std::max<int64_t>(head_dim - d, 0), STRIPE) : 0;
        _mm512_store_si512(rows + i * depth() + d, _mm512_maskz_loadu_epi16((1ull << filled) - 1, from.row(i) + d));
      }
    }
  }

  // The other orders, from the rows.
  void reorder(bool with_ones) {
    for (int64_t unit = 0; unit < padded; unit += UNIT)
      for (int64_t s = 0; s < steps; s++)
        transpose_words(left(unit) + s * STRIPE, depth(), columns + unit * depth() + s * TILE);
    for (int64_t i = 0; mixed && i < padded; i += STRIPE) mix_order(left(i), mixed + i * outputs * UNIT, with_ones);
  }

  // Words of token i and token i + 16 of a stripe.
  void mix_order(const Half* from, Half* to, bool with_ones) const {
    __m512i low, high;  // the words of the first and of the last 16 of 32 channels
    uint16_t index[64];
    for (int i = 0; i < 32; i++) index[2 * i] = i, index[2 * i + 1] = 32 + i;
    low = _mm512_loadu_si512(index), high = _mm512_loadu_si512(index + 32);
    const int64_t tail = head_dim / UNIT;  // the tile with the channel of ones
    for (int64_t p = 0; p < UNIT; p++) {
      for (int64_t d = 0; d < depth(); d += STRIPE) {
        const __m512i a = _mm512_loadu_si512(from + p * depth() + d);
        const __m512i b = _mm512_loadu_si512(from + (p + UNIT) * depth() + d);
        Half* tile = to + d / UNIT * TILE + p * STRIPE;
        _mm512_store_si512(tile, _mm512_permutex2var_epi16(a, low, b));
        if (d / UNIT + 1 < outputs) _mm512_store_si512(tile + TILE, _mm512_permutex2var_epi16(a, high, b));
      }
      Half* last = to + tail * TILE + p * STRIPE;
      if (tail * UNIT == depth()) _mm512_store_si512(last, _mm512_setzero_si512());
      last[head_dim % UNIT * 2] = last[head_dim % UNIT * 2 + 1] = with_ones ? ONE : 0;
    }
  }

  // scale |x|^2 / 2 of every token. Returns the largest.
  float half_norms(float scale, float* to) const {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < padded; unit += UNIT) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t p = 0; p < depth() / 2; p++)
        sum = _mm512_dpbf16_ps(sum, word(unit, p), word(unit, p));
      sum = _mm512_mul_ps(sum, _mm512_set1_ps(0.5f * scale));
      largest = _mm512_max_ps(largest, sum);
      _mm512_store_ps(to + unit, sum);
    }
    std::fill(to + count, to + padded, FAR);
    return _mm512_reduce_max_ps(largest);
  }
  GKA_INLINE __m512bh word(int64_t unit, int64_t p) const {
    return reinterpret_cast<__m512bh>(_mm512_load_si512(columns + unit * depth() + p * STRIPE));
  }
};

// Stripes that cover a range, of tokens that exist.
GKA_INLINE Range stripes(Range r, int64_t padded) {
  return Range{r.begin & -STRIPE, round_up(r.end, STRIPE)}.within({0, padded});
}

// Which of the 32 tokens from c on are in the range.
GKA_INLINE uint32_t lanes(Range r, int64_t c) {
  const int64_t first = std::min(std::max<int64_t>(r.begin - c, 0), STRIPE);
  const int64_t last = std::min(std::max(r.end - c, first), STRIPE);
  return static_cast<uint32_t>((1ull << last) - (1ull << first));
}

// The part of a head that forward and backward share.
struct HalfHead {
  Reach reach;
  HalfTokens x, key, value;
  bool own_keys;
  float *query_term, *key_term;  // what is subtracted from x_i.k_j: norms, or for queries of other keys their level
  float inverse = 0.0f;          // 1 / sigma^2

  HalfHead(const GkaRequest& q, Arena& arena, bool mixes_queries, bool mixes_keys, bool mixes_values)
      : reach(q), x(q.num_queries, q.head_dim), key(q.num_keys, q.head_dim), value(key), own_keys(q.own_keys) {
    key.take(arena, mixes_keys);
    if (own_keys) x = key;
    else x.take(arena, mixes_queries);
    if (q.own_values) value = key;
    else value.take(arena, mixes_values);
    key_term = arena.take(key.padded);
    query_term = own_keys ? key_term : arena.take(x.padded);
  }

  // The tokens and the norms of the keys. Returns the largest of these.
  float fill(const GkaRequest& q, int64_t index) {
    inverse = float(inverse_variance(q, index));
    key.copy(HalfSource(q.keys, q, index));
    key.reorder(true);
    if (!own_keys) x.copy(HalfSource(q.x, q, index)), x.reorder(true);
    if (!q.own_values) value.copy(HalfSource(q.values, q, index)), value.reorder(true);
    return key.half_norms(float(inverse * LOG2_E), key_term);
  }

  // The stripes of keys that a stripe of queries sees.
  Range seen_by_stripe(int64_t row) const {
    return stripes({reach.seen(row).begin, reach.seen(row + STRIPE - 1).end}, key.padded);
  }
};

int64_t forward_scratch_bfloat16(const GkaRequest& q);
int64_t backward_scratch_bfloat16(const GkaRequest& q);

// log2 K of some rows and 32 columns, two vectors a row, from their norm terms; 0 at most, and NaN stays.
template <int N>
GKA_INLINE Vectors<N> exponents(const float* products, __m512 scale, const float* rows, const float* columns) {
  const __m512 norm[2] = {_mm512_load_ps(columns), _mm512_load_ps(columns + UNIT)};
  auto e = Vectors<N>::of([&](int i) { return _mm512_load_ps(products + i * UNIT); });
  e = Vectors<N>::of([&](int i) { return _mm512_fmsub_ps(e.v[i], scale, norm[i % 2]); });
  e = Vectors<N>::of([&](int i) { return _mm512_sub_ps(e.v[i], _mm512_set1_ps(rows[i / 2])); });
  return Vectors<N>::of([&](int i) { return _mm512_min_ps(_mm512_setzero_ps(), e.v[i]); });
}

}  // namespace gka

BF16_END

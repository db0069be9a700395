// Products of bfloat16 pairs into float32: by AMX, in tiles of 16 rows x 64 bytes, or by AVX512-BF16, in vectors.
//
// An instruction of AMX multiplies 16 rows of 32 numbers with 16 words of pairs x 16 columns. So the left operand has
// 32 numbers of a row side by side, and the right one has pairs of rows in words. The order of the 32 numbers does not
// matter if both operands have the same: a word pairs token i with token i + 16 of a stripe, which takes a shift and a
// blend, where neighbours would take a permutation. An instruction of AVX512-BF16 multiplies one word of a left row
// with a row of a right operand's tile, so both instruction sets read the same orders.
//
// Needs the instruction sets that BF16_BEGIN names: call gka_ready_bfloat16 first.
#pragma once
#include "head.h"

#include <type_traits>

#if defined(__clang__)
#define BF16_BEGIN                                                                                                     \
  _Pragma("clang attribute push(__attribute__((target(\"avx512bw,avx512vl,avx512bf16\"))), apply_to=function)")
#define BF16_END _Pragma("clang attribute pop")
#else
#define BF16_BEGIN                                                                                                     \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx512bw,avx512vl,avx512bf16\")")
#define BF16_END _Pragma("GCC pop_options")
#endif

BF16_BEGIN

namespace gka {

using Half = uint16_t;  // the bits of a bfloat16

constexpr int64_t STRIPE = 32;      // queries and keys of the blocks in which K is computed, masked and mixed
constexpr int64_t TILE = 512;       // numbers of bfloat16 in a tile
constexpr int64_t TILE_ROW = 64;    // bytes
constexpr int64_t PRODUCTS = 1024;  // numbers of float32 in a block of products: 2 x 2 tiles

inline bool has_tiles = false;  // AMX; gka_ready_bfloat16 decides

// The tiles of a thread while it computes.
struct TileState {
  struct __attribute__((packed)) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  TileState() {
    if (!has_tiles) return;
    alignas(64) Config config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileState() {
    if (has_tiles) asm volatile("tilerelease");
  }
};

// The instructions. The compiler's own intrinsics do not say that a load reads memory.
template <int T>
GKA_INLINE void tile_load(const void* from, int64_t bytes_apart) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes_apart), "i"(T) : "memory");
}
template <int T>
GKA_INLINE void tile_store(void* to, int64_t bytes_apart) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes_apart), "i"(T) : "memory");
}
template <int T>
GKA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int TO, int LEFT, int RIGHT>
GKA_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(LEFT), "i"(RIGHT));
}

GKA_INLINE void clear_tiles() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

// How many rows of a stripe with so many tokens are computed: all by tiles, otherwise a multiple of ROWS_AT_ONCE.
constexpr int64_t ROWS_AT_ONCE = 8;
GKA_INLINE int64_t rows_of_stripe(int64_t tokens) {
  return has_tiles || tokens >= STRIPE ? STRIPE : round_up(tokens, ROWS_AT_ONCE);
}

// Strides of an operand of a product by vectors, in numbers: from row to row, from one step of 32 numbers to the next
// and, in a right operand, from a tile to the one beside it.
struct Order {
  int64_t row, step, beside = 0;
};

// to (`rows` x 16 COLUMNS, `width` apart) = or, with `add`, += left . right over some pairs of numbers, 16 in a step.
template <int COLUMNS>
GKA_INLINE void multiply_vectors(const Half* left, Order l, const Half* right, Order r, int64_t pairs, int64_t rows,
                                 bool add, float* to, int64_t width) {
  constexpr int N = ROWS_AT_ONCE;
  for (int64_t i = 0; i < rows; i += N, left += N * l.row, to += N * width) {
    __m512 sums[N][COLUMNS];
    GKA_UNROLL for (int row = 0; row < N; row++)
      GKA_UNROLL for (int c = 0; c < COLUMNS; c++)
        sums[row][c] = add ? _mm512_load_ps(to + row * width + c * UNIT) : _mm512_setzero_ps();
    const Half *a = left, *b = right;
    for (int64_t begin = 0; begin < pairs; begin += UNIT, a += l.step, b += r.step)
      for (int64_t pair = 0; pair < std::min(pairs - begin, UNIT); pair++) {
        __m512bh columns[COLUMNS];
        GKA_UNROLL for (int c = 0; c < COLUMNS; c++)
          columns[c] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + c * r.beside + pair * r.row));
        GKA_UNROLL for (int row = 0; row < N; row++) {
          int32_t word;
          std::memcpy(&word, a + row * l.row + 2 * pair, sizeof word);
          const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
          GKA_UNROLL for (int c = 0; c < COLUMNS; c++) sums[row][c] = _mm512_dpbf16_ps(sums[row][c], columns[c], both);
        }
      }
    GKA_UNROLL for (int row = 0; row < N; row++)
      GKA_UNROLL for (int c = 0; c < COLUMNS; c++) _mm512_store_ps(to + row * width + c * UNIT, sums[row][c]);
  }
}

// 32 tokens x 32: rows of a left operand times tiles of a right operand.
struct Factors {
  const Half *left = nullptr, *right = nullptr;
};

// The block left . right, plus other.left . other.right if there is one, over steps of 32 channels. Without tiles,
// `rows` of it.
GKA_INLINE void multiply(Factors first, Factors other, int64_t steps, int64_t rows, float* to) {
  if (!has_tiles) {
    const Order left{steps * STRIPE, STRIPE}, right{STRIPE, TILE, steps * TILE};
    multiply_vectors<2>(first.left, left, first.right, right, steps * UNIT, rows, false, to, STRIPE);
    if (other.left) multiply_vectors<2>(other.left, left, other.right, right, steps * UNIT, rows, true, to, STRIPE);
    return;
  }
  clear_tiles();
  const int64_t row = steps * STRIPE * sizeof(Half), width = STRIPE * sizeof(float);
  for (Factors f : {first, other}) {
    if (!f.left) break;
    for (int64_t s = 0; s < steps; s++) {
      tile_load<4>(f.left + s * STRIPE, row);
      tile_load<6>(f.right + s * TILE, TILE_ROW);
      tile_load<7>(f.right + (steps + s) * TILE, TILE_ROW);
      tile_load<5>(f.left + (UNIT * steps + s) * STRIPE, row);
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 4, 7>();
      tile_multiply<2, 5, 6>();
      tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(to, width);
  tile_store<1>(to + UNIT, width);
  tile_store<2>(to + UNIT * STRIPE, width);
  tile_store<3>(to + UNIT * STRIPE + UNIT, width);
}

// The size of a mixing: computed rows of the stripe of queries, keys, and tiles of channels. alone: the last tile has
// only the channel that adds up weights; ones: that channel is 1, otherwise 0.
struct Mixed {
  int64_t queries, keys, outputs;
  bool alone, ones;
};

// Two or, at the end, one of the tiles of channels that `mix` computes.
template <bool TWO>
GKA_INLINE void mix_channels(const Half* weights, const Half* rows, Mixed of, bool add, float* to) {
  const int64_t outputs = of.outputs;
  const int64_t width = outputs * UNIT * sizeof(float);
  float* lower = to + UNIT * outputs * UNIT;
  if (add) {
    tile_load<0>(to, width);
    tile_load<2>(lower, width);
    if (TWO) tile_load<1>(to + UNIT, width);
    if (TWO) tile_load<3>(lower + UNIT, width);
  } else {
    clear_tiles();
  }
  for (int64_t s = 0; s < of.keys; s += STRIPE, weights += 2 * TILE, rows += outputs * TILE) {
    tile_load<4>(weights, TILE_ROW);
    tile_load<6>(rows, TILE_ROW);
    if (TWO) tile_load<7>(rows + TILE, TILE_ROW);
    tile_load<5>(weights + TILE, TILE_ROW);
    tile_multiply<0, 4, 6>();
    if (TWO) tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    if (TWO) tile_multiply<3, 5, 7>();
  }
  tile_store<0>(to, width);
  tile_store<2>(lower, width);
  if (TWO) tile_store<1>(to + UNIT, width);
  if (TWO) tile_store<3>(lower + UNIT, width);
}

template <int N>
using Columns = std::integral_constant<int, N>;

// The sums of the weights' rows, as the channel of ones would give them.
inline void sum_weights(const Half* weights, Mixed of, bool add, float* to, int64_t width) {
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  for (int64_t i = 0; i < of.queries; i++) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t s = 0; s < of.keys; s += STRIPE) {
      const __m512i row = _mm512_load_si512(weights + (s + i) * STRIPE);
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row), ones);
    }
    to[i * width] = _mm512_reduce_add_ps(sum) + (add ? to[i * width] : 0.0f);
  }
}

inline void mix_vectors(const Half* weights, const Half* rows, Mixed of, bool add, float* to) {
  const Order left{STRIPE, 2 * TILE}, right{STRIPE, of.outputs * TILE, TILE};
  const int64_t pairs = of.keys / STRIPE * UNIT + std::min(of.keys % STRIPE, UNIT);  // of token i and i + 16
  const auto some = [&](auto columns, int64_t d) {
    multiply_vectors<columns()>(weights, left, rows + d * TILE, right, pairs, of.queries, add, to + d * UNIT,
                                of.outputs * UNIT);
    return d + columns();
  };
  const int64_t tiles = of.outputs - of.alone;
  if (of.alone && of.ones) sum_weights(weights, of, add, to + tiles * UNIT, of.outputs * UNIT);
  int64_t d = 0;
  while (tiles - d > 3) d = some(Columns<2>(), d);
  if (tiles - d == 3) some(Columns<3>(), d);
  else if (tiles - d == 2) some(Columns<2>(), d);
  else some(Columns<1>(), d);
}

// to (32 x 16 `outputs`) = or, with `add`, += weights . rows: weights are a pair of tiles, and rows `outputs` tiles,
// for each stripe of keys.
inline void mix(const Half* weights, const Half* rows, Mixed of, bool add, float* to) {
  if (!has_tiles) return mix_vectors(weights, rows, of, add, to);
  int64_t d = 0;
  for (; d + 1 < of.outputs; d += 2) mix_channels<true>(weights, rows + d * TILE, of, add, to + d * UNIT);
  if (d < of.outputs) mix_channels<false>(weights, rows + d * TILE, of, add, to + d * UNIT);
}

// The 16 x 16 words at `from`, transposed into a tile.
inline void transpose_words(const Half* from, int64_t stride, Half* to) {
  __m512i a[16], b[16];
  GKA_UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
  GKA_UNROLL for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  GKA_UNROLL for (int i = 0; i < 4; i++)
    GKA_UNROLL for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  GKA_UNROLL for (int i = 0; i < 2; i++)
    GKA_UNROLL for (int j = 0; j < 4; j++) {
      b[8 * i + j] = _mm512_shuffle_i32x4(a[8 * i + j], a[8 * i + 4 + j], 0x88);
      b[8 * i + 4 + j] = _mm512_shuffle_i32x4(a[8 * i + j], a[8 * i + 4 + j], 0xdd);
    }
  GKA_UNROLL for (int j = 0; j < 8; j++) {
    _mm512_store_si512(to + j * STRIPE, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
    _mm512_store_si512(to + (8 + j) * STRIPE, _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
  }
}

// ---- vectors of float32 from and to bfloat16 ----

GKA_INLINE __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
GKA_INLINE __m256i narrow(__m512 v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }

// The first `count` (of 16, or all) channels from p; 0 in the rest.
GKA_INLINE __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
GKA_INLINE __m512 load_half(const Half* p, int64_t count) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
GKA_INLINE void store_half(Half* p, int64_t count, __m512 v) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), narrow(v));
}

// Words of two numbers, cut off to bfloat16: `low` in the low half.
GKA_INLINE __m512i join(__m512 low, __m512 high) {
  const __m512i shifted = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, shifted, _mm512_castps_si512(high));
}

// Adding half of bfloat16's last place makes cutting off round.
GKA_INLINE __m512 rounded(__m512 v) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000)));
}

// Several vectors, one operation on all of them after another: a single one would wait for each of its results.
template <int N>
struct Vectors {
  __m512 v[N];
  template <typename F>
  GKA_INLINE static Vectors of(F f) {
    Vectors out;
    GKA_UNROLL for (int i = 0; i < N; i++) out.v[i] = f(i);
    return out;
  }
};

// 2^a, to 4e-6 of itself and exact at integers: degree 4 between two integers, where the polynomial is in [1, 2]. With
// ROUNDING half of bfloat16's last place is in its first coefficient, which makes cutting off round for free.
template <bool ROUNDING, int N>
GKA_INLINE Vectors<N> exp2_half(const Vectors<N>& a) {
  const __m512 first = _mm512_set1_ps(0.0135557472f);
  auto r = Vectors<N>::of([&](int i) { return _mm512_reduce_ps(a.v[i], 1); });  // a minus the integer below it
  auto p = Vectors<N>::of([&](int i) { return _mm512_fmadd_ps(first, r.v[i], _mm512_set1_ps(0.05203236906f)); });
  for (float coefficient : {0.2413797629f, 0.6930321208f, ROUNDING ? 1.00390625f : 1.0f})
    p = Vectors<N>::of([&](int i) { return _mm512_fmadd_ps(p.v[i], r.v[i], _mm512_set1_ps(coefficient)); });
  return Vectors<N>::of([&](int i) { return _mm512_scalef_ps(p.v[i], a.v[i]); });  // times 2^(the integer below a)
}

}  // namespace gka

BF16_END

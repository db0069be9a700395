// One register of floats, so that the kernels are written once for AVX-512 and AVX2.
//
// The instructions of lesser and greater return their second argument if either is NaN: what must be kept stands there.
#pragma once
#include <immintrin.h>
#include <cstdint>

#define GKA_INLINE inline __attribute__((always_inline))
#define GKA_NOINLINE __attribute__((noinline)) static
#define GKA_UNROLL _Pragma("GCC unroll 8")

namespace gka {

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
constexpr float LOWEST = -1e38f;  // below every exponent; stands for minus infinity where differences must not be NaN

#if defined(__AVX512F__)

struct Vector {
  static constexpr int LANES = 16;
  __m512 v;
  static GKA_INLINE Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static GKA_INLINE Vector load_first(const float* p, int64_t count) {  // zeros after them; reads nothing beyond
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
  }
  static GKA_INLINE Vector widen(const uint16_t* p) {  // from bfloat16
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
  }
  static GKA_INLINE Vector all(float a) { return {_mm512_set1_ps(a)}; }
  GKA_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  GKA_INLINE void store_first(float* p, int64_t count) const {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), v);
  }
  GKA_INLINE Vector operator+(Vector o) const { return {_mm512_add_ps(v, o.v)}; }
  GKA_INLINE Vector operator-(Vector o) const { return {_mm512_sub_ps(v, o.v)}; }
  GKA_INLINE Vector operator*(Vector o) const { return {_mm512_mul_ps(v, o.v)}; }
  GKA_INLINE Vector operator/(Vector o) const { return {_mm512_div_ps(v, o.v)}; }
  GKA_INLINE Vector sqrt() const { return {_mm512_sqrt_ps(v)}; }
  static GKA_INLINE Vector load(const double* p) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p)), high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
    return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
  }
  GKA_INLINE void add_to(double* p) const {
    const __m256 low = _mm512_castps512_ps256(v), high = _mm512_extractf32x8_ps(v, 1);
    _mm512_storeu_pd(p, _mm512_add_pd(_mm512_loadu_pd(p), _mm512_cvtps_pd(low)));
    _mm512_storeu_pd(p + 8, _mm512_add_pd(_mm512_loadu_pd(p + 8), _mm512_cvtps_pd(high)));
  }
  GKA_INLINE Vector or_zero() const {  // instead of NaN
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v)};
  }
  GKA_INLINE float sum() const { return _mm512_reduce_add_ps(v); }
  GKA_INLINE float max() const { return _mm512_reduce_max_ps(v); }

  // Lanes first .. last, and `other` in the rest.
  GKA_INLINE Vector keep(int64_t first, int64_t last, Vector other) const {
    uint32_t lanes = first > 15 || last < 0 ? 0 : 0xffffu << (first < 0 ? 0 : first);
    if (last < 15) lanes &= (2u << (last < 0 ? 0 : last)) - 1;
    return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(lanes), v)};
  }
};

GKA_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
GKA_INLINE Vector negated_fma(Vector a, Vector b, Vector c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
GKA_INLINE Vector lesser(Vector a, Vector b) { return {_mm512_min_ps(a.v, b.v)}; }
GKA_INLINE Vector greater(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
GKA_INLINE Vector fraction(Vector a) { return {_mm512_reduce_ps(a.v, 0)}; }  // a minus the nearest integer
GKA_INLINE Vector scale(Vector a, Vector power, Vector) { return {_mm512_scalef_ps(a.v, power.v)}; }
GKA_INLINE Vector exponent_range(Vector a) { return a; }

// The sum of each register's lanes, that of the first one in the first lane.
GKA_INLINE Vector sums(const Vector* of) {
  __m512 four[4];  // registers each, in every quarter
  GKA_UNROLL for (int i = 0; i < 4; i++) {
    const Vector* r = of + 4 * i;
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(r[0].v, r[1].v), _mm512_unpackhi_ps(r[0].v, r[1].v));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(r[2].v, r[3].v), _mm512_unpackhi_ps(r[2].v, r[3].v));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  auto halved = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 a = halved(four[0], four[1]), b = halved(four[2], four[3]);
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))};
}

constexpr int TILE_ROWS = 8, TILE_VECTORS = 3;  // of K: 24 accumulators of 32 registers
constexpr int MIX_VECTORS = 4;                  // of channels, times up to 6 tokens
constexpr int64_t BLOCK = 192;                  // tokens along a side of a block of K: the L2 cache has 1 MB or more

// Products add up a quarter of the channels at once, 16 at most.
constexpr int64_t CHANNEL_CHUNKS = 4, LARGEST_CHUNK = 16;

#else

struct Vector {
  static constexpr int LANES = 8;
  __m256 v;
  static GKA_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static GKA_INLINE Vector load_first(const float* p, int64_t count) {  // zeros after them; reads nothing beyond
    return {_mm256_maskload_ps(p, first(count))};
  }
  static GKA_INLINE __m256i first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  }
  static GKA_INLINE Vector widen(const uint16_t* p) {  // from bfloat16
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
  }
  static GKA_INLINE Vector all(float a) { return {_mm256_set1_ps(a)}; }
  GKA_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
  GKA_INLINE void store_first(float* p, int64_t count) const { _mm256_maskstore_ps(p, first(count), v); }
  GKA_INLINE Vector operator+(Vector o) const { return {_mm256_add_ps(v, o.v)}; }
  GKA_INLINE Vector operator-(Vector o) const { return {_mm256_sub_ps(v, o.v)}; }
  GKA_INLINE Vector operator*(Vector o) const { return {_mm256_mul_ps(v, o.v)}; }
  static GKA_INLINE Vector load(const double* p) {
    return {_mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)))};
  }
  GKA_INLINE void add_to(double* p) const {
    const __m128 low = _mm256_castps256_ps128(v), high = _mm256_extractf128_ps(v, 1);
    _mm256_storeu_pd(p, _mm256_add_pd(_mm256_loadu_pd(p), _mm256_cvtps_pd(low)));
    _mm256_storeu_pd(p + 4, _mm256_add_pd(_mm256_loadu_pd(p + 4), _mm256_cvtps_pd(high)));
  }
  GKA_INLINE Vector or_zero() const { return {_mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q))}; }  // instead of NaN
  GKA_INLINE float sum() const {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  GKA_INLINE float max() const {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  GKA_INLINE Vector operator/(Vector o) const { return {_mm256_div_ps(v, o.v)}; }
  GKA_INLINE Vector sqrt() const { return {_mm256_sqrt_ps(v)}; }

  // Lanes first .. last, and `other` in the rest.
  GKA_INLINE Vector keep(int64_t first, int64_t last, Vector other) const {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int low = first < 0 ? 0 : first > 8 ? 8 : static_cast<int>(first);
    int high = last < -1 ? -1 : last > 7 ? 7 : static_cast<int>(last);
    __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                  _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(high)));
    return {_mm256_blendv_ps(v, other.v, _mm256_castsi256_ps(out))};
  }
};

GKA_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
GKA_INLINE Vector negated_fma(Vector a, Vector b, Vector c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
GKA_INLINE Vector lesser(Vector a, Vector b) { return {_mm256_min_ps(a.v, b.v)}; }
GKA_INLINE Vector greater(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
GKA_INLINE Vector fraction(Vector a) {
  return {_mm256_sub_ps(a.v, _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
// a * 2^power through the exponent's bits, and 0 where the unclamped exponent was out of range.
GKA_INLINE Vector scale(Vector a, Vector power, Vector unclamped) {
  __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(power.v), 23);
  __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), bits));
  return {_mm256_and_ps(scaled, _mm256_cmp_ps(unclamped.v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ))};
}
GKA_INLINE Vector exponent_range(Vector a) { return greater(Vector::all(-126.0f), a); }

// The sum of each register's lanes, that of the first one in the first lane.
GKA_INLINE Vector sums(const Vector* of) {
  __m256 four[2];  // registers each, in every half
  GKA_UNROLL for (int i = 0; i < 2; i++) {
    const Vector* r = of + 4 * i;
    four[i] = _mm256_hadd_ps(_mm256_hadd_ps(r[0].v, r[1].v), _mm256_hadd_ps(r[2].v, r[3].v));
  }
  return {_mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                        _mm256_permute2f128_ps(four[0], four[1], 0x31))};
}

constexpr int TILE_ROWS = 4, TILE_VECTORS = 3;  // of K: 12 accumulators of 16 registers
constexpr int MIX_VECTORS = 2;                  // of channels, times up to 6 tokens
constexpr int64_t BLOCK = 144;                  // K, M and the tokens of 128 channels fit an L2 cache of 512 KB

// Products add up half of the channels at once, 64 at most: between two chunks all sums go to memory and back, which
// costs as much as two channels.
constexpr int64_t CHANNEL_CHUNKS = 2, LARGEST_CHUNK = 64;

#endif

// A factor above 0 in two floats, whose products are rounded once. Neither part is 0, so that infinity stays infinite.
struct Factor {
  float high, low;
  explicit Factor(double a) : high(float(a) * 0.99999994f), low(float(a - double(high))) {}
  GKA_INLINE Vector times(Vector a) const { return fma(a, Vector::all(high), a * Vector::all(low)); }
};

// 2^a for a <= 0, to 1e-7 of itself, exactly 1 at 0: a polynomial around the nearest integer (Cephes, exp2f).
GKA_INLINE Vector exp2(Vector a) {
  Vector clamped = exponent_range(a), r = fraction(clamped), p = Vector::all(1.535336188319500e-4f);
  p = fma(p, r, Vector::all(1.339887440266574e-3f));
  p = fma(p, r, Vector::all(9.618437357674640e-3f));
  p = fma(p, r, Vector::all(5.550332471162809e-2f));
  p = fma(p, r, Vector::all(2.402264791363012e-1f));
  p = fma(p, r, Vector::all(6.931472028550421e-1f));
  p = fma(p, r, Vector::all(1.0f));
  return scale(p, clamped - r, a);
}

// Channels d .. of a token with head_dim of them, zeros after the last; and back.
GKA_INLINE Vector load_channels(const float* token, int64_t d, int64_t head_dim) {
  if (d + Vector::LANES <= head_dim) return Vector::load(token + d);
  return d < head_dim ? Vector::load_first(token + d, head_dim - d) : Vector::all(0.0f);
}

GKA_INLINE void store_channels(Vector a, float* token, int64_t d, int64_t head_dim) {
  if (d + Vector::LANES <= head_dim) a.store(token + d);
  else if (d < head_dim) a.store_first(token + d, head_dim - d);
}

// The 8 x 8 numbers at `from`, transposed and multiplied.
GKA_INLINE void transpose8(const float* from, int64_t from_stride, float factor, float* to, int64_t to_stride) {
  const __m256 f = _mm256_set1_ps(factor);
  __m256 row[8];
  GKA_UNROLL for (int i = 0; i < 8; i++) row[i] = _mm256_mul_ps(f, _mm256_loadu_ps(from + i * from_stride));
  __m256 pair[8];
  GKA_UNROLL for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  __m256 four[8];  // columns 0 to 3 of rows 0 to 3, then of rows 4 to 7; the high halves have columns 4 to 7
  GKA_UNROLL for (int i = 0; i < 8; i += 4)
    GKA_UNROLL for (int j = 0; j < 2; j++) {
      four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
      four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
    }
  GKA_UNROLL for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps(to + j * to_stride, _mm256_permute2f128_ps(four[j], four[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * to_stride, _mm256_permute2f128_ps(four[j], four[j + 4], 0x31));
  }
}

// Denormal numbers, which are slow, count as 0 while this lives on a thread.
struct FlushDenormals {
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

}  // namespace gka

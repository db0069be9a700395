// Forward in bfloat16: y_i = sum_j K_ij v_j / (sum_j K_ij + eps).
//
// Self-attention: K_ii = 1 is the largest of its row, so nothing is subtracted from exponents and nothing rescaled.
// Other keys: K is at most 1 and may be very small. If the sum of a row is close to the smallest float, its stripe is
// computed again with the largest exponent of each row subtracted.
#include "request.h"
#if defined(__AVX512F__)
#include "bf16_head.h"
#include "documents.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

BF16_BEGIN

namespace {

using namespace gka;

constexpr int ROWS = 4;            // that are computed side by side
constexpr float LEAST = 0x1p-64f;  // row sum: floats end at 2^-126, so weights down to 2^-62 of it count

struct Forward : HalfHead {
  float *products, *mixed;
  Half* k;
  float largest = 0.0f;

  Forward(const GkaRequest& q, const Plan&, Arena& arena) : HalfHead(q, arena, false, q.own_values, true) {
    products = arena.take(PRODUCTS);
    mixed = arena.take(STRIPE * x.outputs * UNIT);
    k = HalfTokens::halves(arena, STRIPE * CHUNK);
  }

  void fill(const GkaRequest& q, int64_t index) {
    float norm = HalfHead::fill(q, index);
    if (!own_keys) norm = x.half_norms(float(inverse * LOG2_E), query_term);
    largest = 2.0f * norm * LN_2;
  }

  bool hides(int64_t row, int64_t c) const { return reach.hides({c, c + STRIPE}, {row, row + STRIPE}); }

  int64_t rows_of(int64_t row) const { return rows_of_stripe(x.count - row); }

  // A block of K, rounded, as two tiles.
  template <bool EDGE>
  GKA_INLINE void block(int64_t row, int64_t c, Half* to) const {
    const __m512 scale = _mm512_set1_ps(float(inverse * LOG2_E)), one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < rows_of(row); i += ROWS) {
      const float *rows = query_term + row + i, *from = products + i * STRIPE;
      auto weights = exp2_half<true>(exponents<2 * ROWS>(from, scale, rows, key_term + c));
      GKA_UNROLL for (int r = 0; r < ROWS; r++) {
        __m512 &low = weights.v[2 * r], &high = weights.v[2 * r + 1];
        if (EDGE) {
          const int64_t query = row + i + r;
          const uint32_t seen = lanes(reach.seen(query), c);
          const uint32_t diagonal = own_keys ? lanes({query, query + 1}, c) : 0;
          low = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(seen, low), diagonal, one);
          high = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(seen >> UNIT, high), diagonal >> UNIT, one);
        }
        _mm512_store_si512(to + (i + r) * STRIPE, join(low, high));
      }
    }
  }

  // sum_j K_ij v_j of a stripe of queries.
  void mix_stripe(int64_t row) {
    const Range keys = seen_by_stripe(row);
    if (keys.empty()) std::fill(mixed, mixed + STRIPE * x.outputs * UNIT, 0.0f);
    for (int64_t begin = keys.begin; begin < keys.end; begin += CHUNK) {
      const int64_t end = std::min(begin + CHUNK, keys.end);
      for (int64_t c = begin; c < end; c += STRIPE) {
        multiply({x.left(row), key.right(c)}, {}, x.steps, rows_of(row), products);
        Half* to = k + (c - begin) * STRIPE;
        if ((own_keys && c == row) || hides(row, c)) block<true>(row, c, to);
        else block<false>(row, c, to);
      }
      const Mixed of{rows_of(row), std::min(end, key.count) - begin, x.outputs, x.sums_alone(), true};
      mix(k, value.mixed_from(begin), of, begin > keys.begin, mixed);
    }
  }

  // Whether the sum of a row of the stripe is too small. One that is not a number is not.
  bool underflows(int64_t row) const {
    bool any = false;
    for (int64_t i = row; i < std::min(row + STRIPE, x.count); i++)
      any |= mixed[(i - row) * x.outputs * UNIT + x.head_dim] < LEAST;
    return any;
  }

  // Make the exponents of each row relative to its largest, which becomes exactly 0.
  void subtract_largest(int64_t row) {
    const __m512 scale = _mm512_set1_ps(float(inverse * LOG2_E)), lowest = _mm512_set1_ps(LOWEST);
    const Range keys = seen_by_stripe(row);
    __m512 peaks[STRIPE];
    std::fill(peaks, peaks + STRIPE, lowest);
    for (int64_t c = keys.begin; c < keys.end; c += STRIPE) {
      multiply({x.left(row), key.right(c)}, {}, x.steps, rows_of(row), products);
      for (int64_t i = 0; i < rows_of(row); i++) {
        const uint32_t seen = lanes(reach.seen(row + i), c);
        for (int64_t u = 0; u < STRIPE; u += UNIT) {
          const __m512 product = _mm512_load_ps(products + i * STRIPE + u);
          const __m512 score = _mm512_fmsub_ps(product, scale, _mm512_load_ps(key_term + c + u));
          // In this order NaN is ignored here; it shows in K.
          peaks[i] = _mm512_mask_max_ps(peaks[i], seen >> u, score, peaks[i]);
        }
      }
    }
    for (int64_t i = 0; i < STRIPE; i++) query_term[row + i] = _mm512_reduce_max_ps(peaks[i]);
  }

  void attend_stripe(int64_t row) {
    mix_stripe(row);
    if (own_keys || !underflows(row)) return;
    subtract_largest(row);
    mix_stripe(row);
  }

  // y and level of a stripe.
  void write(const GkaRequest& q, int64_t index, int64_t row) const {
    const HalfSource y(q.y, q, index), residual(q.residual, q, index);
    for (int64_t i = row; i < std::min(row + STRIPE, x.count); i++) {
      if (i + AHEAD < x.count) prefetch<true>(y.row(i + AHEAD), q.head_dim);
      if (q.residual.data && i + AHEAD < x.count) prefetch<true>(residual.row(i + AHEAD), q.head_dim);
      const float* from = mixed + (i - row) * x.outputs * UNIT;
      const float total = from[q.head_dim] + (own_keys ? q.eps : 0.0f);
      const __m512 share = _mm512_set1_ps(1.0f / total);
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        const __m512 exact = _mm512_mul_ps(_mm512_load_ps(from + d), share);
        store_half(y.row(i) + d, q.head_dim - d, exact);
        const __m512 lost = _mm512_sub_ps(exact, widen(narrow(exact)));
        if (q.residual.data) store_half(residual.row(i) + d, q.head_dim - d, lost);
      }
      static_cast<float*>(q.row_state)[index * q.num_queries + i] = own_keys ? total : query_term[i] + std::log2(total);
    }
  }
};

}  // namespace

int64_t gka::forward_scratch_bfloat16(const GkaRequest& q) {
  const Plan plan(q);
  return plan.slots * slot_size_of<Forward>(q, plan);
}

float gka_forward_bfloat16(const GkaRequest* request, float* scratch) {
  const GkaRequest& q = *request;
  if (q.cu_seqlens)
    return each_document(documents_bfloat16(q, GKA_FORWARD), scratch, [](const GkaRequest& part, float* slot) {
      return gka_forward_bfloat16(&part, slot);
    });
  const Plan plan(q);
  float largest = 0.0f;
  auto run = [&](const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* slot) {
    TileState tiles;
    Arena arena{slot};
    Forward head(q, plan, arena);
    head.fill(q, index);
    for (int64_t row = part * STRIPE; row < head.x.padded; row += plan.parts * STRIPE) {
      head.attend_stripe(row);
      head.write(q, index, row);
    }
#pragma omp critical(gka_largest)
    largest = std::max(largest, head.largest);
  };
  in_parallel(q, plan, scratch, slot_size_of<Forward>(q, plan), 0, run, [](auto&&...) {});
  return largest;
}

BF16_END

// How this machine multiplies bfloat16: without the instructions that it asks for.
int32_t gka_ready_bfloat16(int32_t tiles) {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: the operating system saves tiles on demand
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 0;                     // avx512_bf16
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 30 & 1) || !(b >> 31 & 1)) return 0;  // avx512bw, avx512vl
  const bool amx = (d >> 22 & 1) && (d >> 24 & 1);                                             // amx_bf16, amx_tile
  gka::has_tiles = tiles && amx && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return gka::has_tiles ? 2 : 1;
}

int64_t gka_scratch_bfloat16(const GkaRequest* request, int32_t phase) {
  if (request->cu_seqlens) return gka::documents_bfloat16(*request, phase).scratch();
  return phase == GKA_FORWARD ? gka::forward_scratch_bfloat16(*request) : gka::backward_scratch_bfloat16(*request);
}

#else
int32_t gka_ready_bfloat16(int32_t) { return 0; }
#endif

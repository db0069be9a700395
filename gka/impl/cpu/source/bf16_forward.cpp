// Forward in bfloat16: y_i = sum_j K_ij v_j / (sum_j K_ij + eps) for own keys. K_ii = 1 is the largest of its row, so
// nothing is subtracted from exponents and nothing rescaled.
#include "request.h"
#if defined(__AVX512F__)
#include "bf16_head.h"

BF16_BEGIN

namespace {

using namespace gka;

constexpr int ROWS = 4;  // that are computed side by side

struct Forward {
  Reach reach;
  HalfTokens x, value;
  float *norm, *products, *mixed;
  Half* k;
  float inverse = 0.0f, largest = 0.0f;

  Forward(const GkaRequest& q, const Plan&, Arena& arena) : reach(q), x(q.num_keys, q.head_dim), value(x) {
    x.take(arena, q.own_values);
    if (q.own_values) value = x;
    else value.take(arena, true);
    norm = arena.take(x.padded);
    products = arena.take(PRODUCTS);
    mixed = arena.take(STRIPE * x.outputs * UNIT);
    k = HalfTokens::halves(arena, STRIPE * CHUNK);
  }

  void fill(const GkaRequest& q, int64_t index) {
    inverse = inverse_variance(q, index);
    x.copy(HalfSource(q.x, q, index));
    x.reorder(true);
    if (!q.own_values) value.copy(HalfSource(q.values, q, index)), value.reorder(true);
    largest = 2.0f * x.half_norms(inverse * LOG2_E, norm) * LN_2;
  }

  // A block of K, rounded, as two tiles.
  template <bool EDGE>
  GKA_INLINE void block(int64_t row, int64_t c, Half* to) const {
    const __m512 scale = _mm512_set1_ps(inverse * LOG2_E), one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < STRIPE; i += ROWS) {
      auto weights = exp2_half<true>(exponents<2 * ROWS>(products + i * STRIPE, scale, norm + row + i, norm + c));
      GKA_UNROLL for (int r = 0; r < ROWS; r++) {
        __m512 &low = weights.v[2 * r], &high = weights.v[2 * r + 1];
        if (EDGE) {
          const int64_t query = row + i + r;
          const uint32_t seen = lanes(seen_from(reach, query), c), own = lanes({query, query + 1}, c);
          low = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(seen, low), own, one);
          high = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(seen >> UNIT, high), own >> UNIT, one);
        }
        _mm512_store_si512(to + (i + r) * STRIPE, join(low, high));
      }
    }
  }

  // sum_j K_ij v_j of a stripe of queries.
  void mix_stripe(int64_t row) {
    const Range queries{row, row + STRIPE};
    const Range keys = stripes({seen_from(reach, row).begin, seen_from(reach, row + STRIPE - 1).end}, x.padded);
    for (int64_t begin = keys.begin; begin < keys.end; begin += CHUNK) {
      const int64_t end = std::min(begin + CHUNK, keys.end);
      for (int64_t c = begin; c < end; c += STRIPE) {
        multiply({x.left(row), x.right(c)}, {}, x.steps, products);
        Half* to = k + (c - begin) * STRIPE;
        if (c == row || reach.hides({c, c + STRIPE}, queries)) block<true>(row, c, to);
        else block<false>(row, c, to);
      }
      mix(k, value.mixed_from(begin), (end - begin) / STRIPE, x.outputs, begin > keys.begin, mixed);
    }
  }

  // y and level of a stripe.
  void write(const GkaRequest& q, int64_t index, int64_t row) const {
    const HalfSource y(q.y, q, index), rest(q.rest, q, index);
    for (int64_t i = row; i < std::min(row + STRIPE, q.num_queries); i++) {
      const float* from = mixed + (i - row) * x.outputs * UNIT;
      const float total = from[q.head_dim] + q.eps;
      const __m512 share = _mm512_set1_ps(1.0f / total);
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        const __m512 exact = _mm512_mul_ps(_mm512_load_ps(from + d), share);
        store_half(y.row(i) + d, q.head_dim - d, exact);
        if (q.rest.data) store_half(rest.row(i) + d, q.head_dim - d, _mm512_sub_ps(exact, widen(narrow(exact))));
      }
      q.level[index * q.num_queries + i] = total;
    }
  }
};

}  // namespace

namespace gka {
int64_t forward_scratch_bfloat16(const GkaRequest& q) {
  const Plan plan(q);
  return plan.slots * slot_size_of<Forward>(q, plan);
}
}  // namespace gka

void gka_forward_bfloat16(const GkaRequest* request) {
  const GkaRequest& q = *request;
  const Plan plan(q);
  float largest = 0.0f;
  auto run = [&](const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* scratch) {
    TileState tiles;
    Arena arena{scratch};
    Forward head(q, plan, arena);
    head.fill(q, index);
    for (int64_t row = part * STRIPE; row < head.x.padded; row += plan.parts * STRIPE) {
      head.mix_stripe(row);
      head.write(q, index, row);
    }
#pragma omp critical(gka_largest)
    largest = std::max(largest, head.largest);
  };
  in_parallel(q, plan, slot_size_of<Forward>(q, plan), 0, run, [](auto&&...) {});
  *q.largest = largest;
}

BF16_END
#endif

// Backward in bfloat16 for own keys (gka/README.md, Gradients). With g_i = grad_y_i / (D_i + eps), delta_i = g_i.y_i:
//
//   dx_i = (1 / sigma^2) sum_j M_ij (x_j - x_i) + sum_j [j sees i] K_ij g_j
//   M_ij = K_ij ([i sees j] (g_i.v_j - delta_i) + [j sees i] (v_i.g_j - delta_j))
//
// Every token gathers its gradient from all tokens that it sees and all that see it, so nothing is added up across
// stripes, and no transposed copies are needed. Under a causal mask K is computed twice for that.
#include "request.h"
#if defined(__AVX512F__)
#include "bf16_head.h"

BF16_BEGIN

namespace {

using namespace gka;

enum Roles { QUERY, KEY, BOTH, EDGE };  // of the rows of a block; EDGE: it depends on the element

struct Backward {
  Reach reach;
  HalfTokens x, value, grad;
  float *norm, *delta, *products, *dx, *dvalues;
  Half *k, *m;
  float inverse = 0.0f;
  double moment = 0.0;  // sum of M times exponents

  Backward(const GkaRequest& q, const Plan&, Arena& arena) : reach(q), x(q.num_keys, q.head_dim), value(x), grad(x) {
    x.take(arena, true);
    if (q.own_values) value = x;
    else value.take(arena, false);
    grad.take(arena, true);
    norm = arena.take(x.padded);
    delta = arena.take(x.padded);
    products = arena.take(2 * 3 * PRODUCTS);
    dx = arena.take(STRIPE * x.outputs * UNIT);
    dvalues = q.own_values ? dx : arena.take(STRIPE * x.outputs * UNIT);
    k = HalfTokens::halves(arena, STRIPE * CHUNK);
    m = HalfTokens::halves(arena, STRIPE * CHUNK);
  }

  void fill(const GkaRequest& q, int64_t index) {
    inverse = inverse_variance(q, index);
    x.copy(HalfSource(q.x, q, index));
    x.reorder(true);
    if (!q.own_values) value.copy(HalfSource(q.values, q, index)), value.reorder(false);
    x.half_norms(inverse * LOG2_E, norm);
    const HalfSource from(q.grad_y, q, index), y(q.y, q, index);
    grad.copy(from);
    std::fill(delta, delta + x.padded, 0.0f);
    for (int64_t i = 0; i < x.count; i++) {
      const __m512 share = _mm512_set1_ps(1.0f / q.level[index * q.num_queries + i]);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        Half* row = grad.rows + i * grad.depth() + d;
        const __m256i g = narrow(_mm512_mul_ps(load_half(row, UNIT), share));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), g);
        sum = _mm512_fmadd_ps(widen(g), load_half(y.row(i) + d, q.head_dim - d), sum);
      }
      delta[i] = _mm512_reduce_add_ps(sum);
    }
    grad.reorder(false);
  }

  Roles roles(int64_t row, int64_t c, Range seen, Range seeing) const {
    const Range rows{row, row + STRIPE}, columns{c, c + STRIPE};
    const bool query = !columns.within(seen).empty(), key = !columns.within(seeing).empty();
    if (row == c || (query && reach.hides(columns, rows)) || (key && reach.hides(rows, columns))) return EDGE;
    return query && key ? BOTH : query ? QUERY : KEY;
  }

  // x.x, and g.v for the rows' roles: one behind the other, in EDGE blocks each by itself.
  void multiply_block(int64_t row, int64_t c, Roles roles, float* to) const {
    const Factors none{nullptr, nullptr}, as_query{grad.left(row), value.right(c)}, as_key{value.left(row), grad.right(c)};
    multiply({x.left(row), x.right(c)}, none, x.steps, to);
    if (roles == BOTH) multiply(as_query, as_key, x.steps, to + PRODUCTS);
    else multiply(roles == KEY ? as_key : as_query, none, x.steps, to + PRODUCTS);
    if (roles == EDGE) multiply(as_key, none, x.steps, to + 2 * PRODUCTS);
  }

  // M without 1 / sigma^2, and K for the rows as keys, of row i and the 16 columns from c on.
  template <Roles ROLES>
  GKA_INLINE __m512 element(int64_t i, int64_t c, const float* products, __m512& k, __m512& moments) const {
    const __m512 e = exponents(products, _mm512_set1_ps(inverse * LOG2_E), _mm512_load_ps(norm + c), _mm512_set1_ps(norm[i]));
    k = exp2_half<false>(e);
    __m512 f = _mm512_load_ps(products + PRODUCTS);
    const __m512 delta_row = _mm512_set1_ps(delta[i]), delta_column = _mm512_load_ps(delta + c);
    if (ROLES == QUERY || ROLES == BOTH || ROLES == EDGE) f = _mm512_sub_ps(f, delta_row);
    if (ROLES == KEY || ROLES == BOTH) f = _mm512_sub_ps(f, delta_column);
    __m512 w;
    if (ROLES == EDGE) {
      const __mmask16 own = lanes({i, i + 1}, c), query = lanes(seen_from(reach, i), c) & ~own;
      const __mmask16 key = lanes(reach.seen_by(i), c) & ~own;
      const __m512 of_key = _mm512_sub_ps(_mm512_load_ps(products + 2 * PRODUCTS), delta_column);
      // Hidden elements must not meet a K that is not a number.
      w = _mm512_maskz_mul_ps(query | key, k, _mm512_add_ps(_mm512_maskz_mov_ps(query, f), _mm512_maskz_mov_ps(key, of_key)));
      k = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(key, k), own, _mm512_set1_ps(1.0f));
      moments = _mm512_mask3_fmadd_ps(w, e, moments, query | key);
    } else {
      w = _mm512_mul_ps(k, f);
      moments = _mm512_fmadd_ps(w, e, moments);
    }
    return w;
  }

  template <Roles ROLES>
  GKA_INLINE void block(int64_t row, int64_t c, const float* products, Half* to_k, Half* to_m) {
    __m512 moments = _mm512_setzero_ps();
    const __m512 scale = _mm512_set1_ps(inverse);
    for (int64_t i = 0; i < STRIPE; i++, products += STRIPE) {
      __m512 k_low, k_high;
      const __m512 low = element<ROLES>(row + i, c, products, k_low, moments);
      const __m512 high = element<ROLES>(row + i, c + UNIT, products + UNIT, k_high, moments);
      _mm512_store_si512(to_m + i * STRIPE, join(rounded(_mm512_mul_ps(low, scale)), rounded(_mm512_mul_ps(high, scale))));
      if (ROLES != QUERY) _mm512_store_si512(to_k + i * STRIPE, join(rounded(k_low), rounded(k_high)));
    }
    moment += _mm512_reduce_add_ps(moments);
  }

  // What a stripe gathers, in dx and dvalues. Products are one block ahead, as they are computed beside exponentials.
  void gather_stripe(int64_t row) {
    std::fill(dx, dx + STRIPE * x.outputs * UNIT, 0.0f);
    std::fill(dvalues, dvalues + STRIPE * x.outputs * UNIT, 0.0f);
    const Range seen = stripes({seen_from(reach, row).begin, seen_from(reach, row + STRIPE - 1).end}, x.padded);
    const Range seeing = stripes({reach.seen_by(row).begin, reach.seen_by(row + STRIPE - 1).end}, x.padded);
    const Range both{std::min(seen.begin, seeing.begin), std::max(seen.end, seeing.end)};
    auto products_of = [&](int64_t c) { return products + (c / STRIPE & 1) * 3 * PRODUCTS; };
    Roles next = roles(row, both.begin, seen, seeing);
    multiply_block(row, both.begin, next, products_of(both.begin));
    for (int64_t begin = both.begin; begin < both.end; begin += CHUNK) {
      const Range chunk{begin, std::min(begin + CHUNK, both.end)};
      for (int64_t c = begin; c < chunk.end; c += STRIPE) {
        const Roles now = next;
        if (c + STRIPE < both.end) {
          next = roles(row, c + STRIPE, seen, seeing);
          multiply_block(row, c + STRIPE, next, products_of(c + STRIPE));
        }
        Half *to_k = k + (c - begin) * STRIPE, *to_m = m + (c - begin) * STRIPE;
        if (now == BOTH) block<BOTH>(row, c, products_of(c), to_k, to_m);
        else if (now == QUERY) block<QUERY>(row, c, products_of(c), to_k, to_m);
        else if (now == KEY) block<KEY>(row, c, products_of(c), to_k, to_m);
        else block<EDGE>(row, c, products_of(c), to_k, to_m);
      }
      mix(m, x.mixed_from(begin), (chunk.end - begin) / STRIPE, x.outputs, dx);
      const Range keys = seeing.within(chunk);
      if (keys.empty()) continue;
      mix(k + (keys.begin - begin) * STRIPE, grad.mixed_from(keys.begin), (keys.end - keys.begin) / STRIPE, x.outputs, dvalues);
    }
  }

  void write(const GkaRequest& q, int64_t index, int64_t row) const {
    const HalfSource to(q.dx, q, index);
    for (int64_t i = row; i < std::min(row + STRIPE, x.count); i++) {
      const float* from = dx + (i - row) * x.outputs * UNIT;
      const __m512 sum = _mm512_set1_ps(from[q.head_dim]);
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        const __m512 own = load_half(x.left(i) + d, UNIT);
        store_half(to.row(i) + d, q.head_dim - d, _mm512_fnmadd_ps(sum, own, _mm512_load_ps(from + d)));
      }
      if (q.own_values) continue;
      const HalfSource to_values(q.dvalues, q, index);
      for (int64_t d = 0; d < q.head_dim; d += UNIT)
        store_half(to_values.row(i) + d, q.head_dim - d, _mm512_load_ps(dvalues + (i - row) * x.outputs * UNIT + d));
    }
  }
};

int64_t stripes_of(const GkaRequest& q) { return round_up(q.num_keys, STRIPE) / STRIPE; }

}  // namespace

namespace gka {
int64_t backward_scratch_bfloat16(const GkaRequest& q) {
  const Plan plan(q);
  return plan.slots * slot_size_of<Backward>(q, plan) + round_up(2 * plan.heads * stripes_of(q), 16);
}
}  // namespace gka

void gka_backward_bfloat16(const GkaRequest* request) {
  const GkaRequest& q = *request;
  const Plan plan(q);
  const int64_t slot_size = slot_size_of<Backward>(q, plan), stripes = stripes_of(q);
  double* moments = reinterpret_cast<double*>(q.scratch + plan.slots * slot_size);  // (B, H, stripes)
  auto run = [&](const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* scratch) {
    TileState tiles;
    Arena arena{scratch};
    Backward head(q, plan, arena);
    head.fill(q, index);
    for (int64_t stripe = part; stripe < stripes; stripe += plan.parts) {
      head.moment = 0.0;
      head.gather_stripe(stripe * STRIPE);
      head.write(q, index, stripe * STRIPE);
      moments[index * stripes + stripe] = head.moment;
    }
  };
  in_parallel(q, plan, slot_size, 0, run, [](auto&&...) {});
  for (int64_t h = 0; h < q.num_heads; h++) {
    double sum = 0.0;
    for (int64_t i = 0; i < plan.heads * stripes; i++)
      if (i / stripes % q.num_heads == h) sum += moments[i];
    const bool clamped = std::abs(q.log_sigma[h]) > q.bound;
    q.dlog_sigma[h] = clamped ? 0.0f : float(-double(LN_2) * sum);  // every pair was met twice
  }
}

BF16_END
#endif

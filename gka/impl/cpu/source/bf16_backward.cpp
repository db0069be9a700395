// Backward in bfloat16 (docs/mathematics.md). With g_i = grad_y_i / (D_i + eps) and delta_i = g_i.y_i of y before
// it was rounded, as g_i.v_j - delta_i cancels where tokens have an offset in common:
//
//   dx_i = (1 / sigma^2) sum_j M_ij (x_j - x_i) + sum_j [j sees i] K_ij g_j
//   M_ij = K_ij ([i sees j] (g_i.v_j - delta_i) + [j sees i] (v_i.g_j - delta_j))
//
// Other keys: K is W itself, 2^(exponent - level), and g_i = grad_y_i. A query gathers with the first of M's two terms,
// a key with the second, and K_ij g_j for its value. M's rows sum to 0, so for dlog_sigma any constant may be
// subtracted from a row's exponents: that of the mean weight is, with which the rounding error of the sum has the least
// effect.
//
// Every token gathers its gradient from all tokens that it sees and all that see it, so no sums cross stripes and no
// transposed copies are needed. If the mask or K is not symmetric, K is therefore computed twice.
#include "request.h"
#if defined(__AVX512F__)
#include "bf16_head.h"
#include "documents.h"

BF16_BEGIN

namespace {

using namespace gka;

constexpr int ROWS = 2;  // that are computed side by side

enum Roles { QUERY, KEY, BOTH };  // of the rows of a block; BOTH: own keys alone

struct Backward : HalfHead {
  HalfTokens grad;
  float* even;  // log2 of how many foreign keys a query sees
  float *delta, *products, *gradient, *dvalues;
  Half *k, *m;
  double moment = 0.0;  // sum of M times exponents; for foreign keys of M times log2(W / (1 / seen keys))

  Backward(const GkaRequest& q, const Plan&, Arena& arena) : HalfHead(q, arena, true, true, false), grad(x) {
    grad.take(arena, true);
    even = arena.take(x.padded);
    delta = arena.take(x.padded);
    products = arena.take(3 * PRODUCTS);
    gradient = arena.take(STRIPE * x.outputs * UNIT);
    dvalues = q.own_values ? gradient : arena.take(STRIPE * x.outputs * UNIT);
    k = HalfTokens::halves(arena, STRIPE * CHUNK);
    m = HalfTokens::halves(arena, STRIPE * CHUNK);
  }

  void fill(const GkaRequest& q, int64_t index) {
    HalfHead::fill(q, index);
    const float* level = static_cast<const float*>(q.row_state) + index * q.num_queries;
    std::fill(even, even + x.padded, 0.0f);
    if (!own_keys) {
      std::copy(level, level + x.count, query_term);
      std::fill(query_term + x.count, query_term + x.padded, FAR);
      for (int64_t i = 0; i < x.count; i++) {
        const Range seen = reach.seen(i).within({0, key.count});
        even[i] = std::log2(float(std::max<int64_t>(seen.end - seen.begin, 1)));
      }
    }
    fill_gradients(q, index, level);
  }

  void fill_gradients(const GkaRequest& q, int64_t index, const float* level) {
    const HalfSource from(q.grad_y, q, index), y(q.y, q, index), residual(q.residual, q, index);
    grad.copy(from);
    std::fill(delta, delta + x.padded, 0.0f);
    for (int64_t i = 0; i < x.count; i++) {
      if (i + AHEAD < x.count) prefetch(y.row(i + AHEAD), q.head_dim);
      if (q.residual.data && i + AHEAD < x.count) prefetch(residual.row(i + AHEAD), q.head_dim);
      const __m512 share = _mm512_set1_ps(own_keys ? 1.0f / level[i] : 1.0f);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        Half* row = grad.rows + i * grad.depth() + d;
        const __m256i g = narrow(_mm512_mul_ps(load_half(row, UNIT), share));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), g);
        const int64_t channels = q.head_dim - d;
        __m512 mixed = load_half(y.row(i) + d, channels);
        if (q.residual.data) mixed = _mm512_add_ps(mixed, load_half(residual.row(i) + d, channels));
        sum = _mm512_fmadd_ps(widen(g), mixed, sum);
      }
      delta[i] = _mm512_reduce_add_ps(sum);
    }
    grad.reorder(false);
  }

  // The roles of the rows of own keys against some columns.
  Roles roles_of(int64_t c, Range seen, Range seeing) const {
    const Range columns{c, c + STRIPE};
    const bool query = !columns.within(seen).empty(), key = !columns.within(seeing).empty();
    return query && key ? BOTH : query ? QUERY : KEY;
  }

  // Whether roles depend on the element; on the diagonal of own keys tokens meet themselves.
  bool masks(Roles roles, int64_t row, int64_t c) const {
    const Range rows{row, row + STRIPE}, columns{c, c + STRIPE};
    return (own_keys && row == c) || (roles != KEY && reach.hides(columns, rows)) ||
           (roles != QUERY && reach.hides(rows, columns));
  }

  int64_t rows_of(Roles roles, int64_t row) const { return rows_of_stripe((roles == KEY ? key : x).count - row); }

  // x.k, and g.v for the rows' roles: of both as one sum, or if masked each by itself.
  void multiply_block(Roles roles, bool masked, int64_t row, int64_t c) const {
    const Factors as_query{grad.left(row), value.right(c)}, as_key{value.left(row), grad.right(c)}, none{};
    const Factors exponents = roles == KEY ? Factors{key.left(row), x.right(c)} : Factors{x.left(row), key.right(c)};
    const int64_t rows = rows_of(roles, row);
    multiply(exponents, none, x.steps, rows, products);
    multiply(roles == KEY ? as_key : as_query, roles == BOTH && !masked ? as_key : none, x.steps, rows,
             products + PRODUCTS);
    if (roles == BOTH && masked) multiply(as_key, none, x.steps, rows, products + 2 * PRODUCTS);
  }

  // M and K of a block (K for the rows as keys) as two tiles each.
  template <Roles ROLES, bool MASKED>
  GKA_INLINE void block(int64_t row, int64_t c, Half* to_k, Half* to_m) {
    constexpr bool SEPARATE = ROLES == BOTH && MASKED;
    const float* products = this->products;
    const float* row_terms = (ROLES == KEY ? key_term : query_term) + row;
    const float* column_terms = (ROLES == KEY ? query_term : key_term) + c;
    using V = Vectors<2 * ROWS>;
    __m512 moments = _mm512_setzero_ps(), delta_columns[2];
    const __m512 scale = _mm512_set1_ps(float(inverse * LOG2_E)), factor = _mm512_set1_ps(inverse);
    const __m512 one = _mm512_set1_ps(1.0f);
    if (ROLES != QUERY)
      for (int v = 0; v < 2; v++) delta_columns[v] = _mm512_load_ps(delta + c + v * UNIT);
    for (int64_t i = 0; i < rows_of(ROLES, row); i += ROWS, products += ROWS * STRIPE) {
      auto e = exponents<2 * ROWS>(products, scale, row_terms + i, column_terms);
      auto k = exp2_half<false>(e);
      if (ROLES == QUERY)
        e = V::of([&](int v) { return _mm512_add_ps(e.v[v], _mm512_set1_ps(even[row + i + v / 2])); });
      auto f = V::of([&](int v) { return _mm512_load_ps(products + PRODUCTS + v * UNIT); });
      if (ROLES != KEY) f = V::of([&](int v) { return _mm512_sub_ps(f.v[v], _mm512_set1_ps(delta[row + i + v / 2])); });
      if (ROLES != QUERY && !SEPARATE) f = V::of([&](int v) { return _mm512_sub_ps(f.v[v], delta_columns[v % 2]); });
      if (MASKED) {
        // Hidden elements must not be multiplied with a K that is NaN; those on the diagonal have no gradient.
        GKA_UNROLL for (int v = 0; v < 2 * ROWS; v++) {
          const int64_t token = row + i + v / 2, column = c + v % 2 * UNIT;
          const __mmask16 diagonal = ROLES == BOTH ? lanes({token, token + 1}, column) : 0;
          const __mmask16 query = ROLES == KEY ? 0 : lanes(reach.seen(token), column) & ~diagonal;
          const __mmask16 key = ROLES == QUERY ? 0 : lanes(reach.seen_by(token), column) & ~diagonal;
          if (SEPARATE) {
            const __m512 of_key = _mm512_load_ps(products + 2 * PRODUCTS + v * UNIT);
            f.v[v] = _mm512_add_ps(_mm512_maskz_mov_ps(query, f.v[v]),
                                   _mm512_maskz_sub_ps(key, of_key, delta_columns[v % 2]));
          }
          f.v[v] = _mm512_maskz_mul_ps(query | key, k.v[v], f.v[v]);
          moments = _mm512_mask3_fmadd_ps(f.v[v], e.v[v], moments, query | key);
          k.v[v] = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(key, k.v[v]), diagonal, one);
        }
      } else {
        f = V::of([&](int v) { return _mm512_mul_ps(k.v[v], f.v[v]); });
        GKA_UNROLL for (int v = 0; v < 2 * ROWS; v++) moments = _mm512_fmadd_ps(f.v[v], e.v[v], moments);
      }
      f = V::of([&](int v) { return rounded(_mm512_mul_ps(f.v[v], factor)); });
      k = V::of([&](int v) { return rounded(k.v[v]); });
      GKA_UNROLL for (int r = 0; r < ROWS; r++) {
        _mm512_store_si512(to_m + (i + r) * STRIPE, join(f.v[2 * r], f.v[2 * r + 1]));
        if (ROLES != QUERY) _mm512_store_si512(to_k + (i + r) * STRIPE, join(k.v[2 * r], k.v[2 * r + 1]));
      }
    }
    if (own_keys || ROLES == QUERY) moment += _mm512_reduce_add_ps(moments);
  }

  void fill_block(Roles roles, int64_t row, int64_t c, Half* to_k, Half* to_m) {
    const bool masked = masks(roles, row, c);
    if (own_keys && masked) roles = BOTH;
    multiply_block(roles, masked, row, c);
    if (roles == BOTH) masked ? block<BOTH, true>(row, c, to_k, to_m) : block<BOTH, false>(row, c, to_k, to_m);
    else if (roles == QUERY) masked ? block<QUERY, true>(row, c, to_k, to_m) : block<QUERY, false>(row, c, to_k, to_m);
    else masked ? block<KEY, true>(row, c, to_k, to_m) : block<KEY, false>(row, c, to_k, to_m);
  }

  // The sums of a stripe of tokens in these roles, into gradient and dvalues.
  void gather_stripe(Roles roles, int64_t row) {
    bool values_begun = dvalues == gradient;
    Range seen{0, 0}, seeing{0, 0};
    if (roles != KEY) seen = seen_by_stripe(row);
    if (roles != QUERY)
      seeing = stripes({reach.seen_by(row).begin, reach.seen_by(row + STRIPE - 1).end}, x.padded);
    const Range both{std::min(seen.begin, seeing.begin), std::max(seen.end, seeing.end)};
    const Range met = roles == QUERY ? seen : roles == KEY ? seeing : both;
    if (met.empty()) {
      std::fill(gradient, gradient + STRIPE * x.outputs * UNIT, 0.0f);
      std::fill(dvalues, dvalues + STRIPE * x.outputs * UNIT, 0.0f);
    }
    for (int64_t begin = met.begin; begin < met.end; begin += CHUNK) {
      const Range chunk{begin, std::min(begin + CHUNK, met.end)};
      for (int64_t c = begin; c < chunk.end; c += STRIPE)
        fill_block(roles == BOTH ? roles_of(c, seen, seeing) : roles, row, c, k + (c - begin) * STRIPE,
                   m + (c - begin) * STRIPE);
      const HalfTokens& partners = roles == KEY ? x : key;
      const int64_t count = std::min(chunk.end, partners.count) - begin;
      const Mixed all{rows_of(roles, row), count, x.outputs, x.sums_alone(), true};
      mix(m, partners.mixed_from(begin), all, begin > met.begin, gradient);
      const Range keys = seeing.within(chunk);
      if (keys.empty()) continue;
      const int64_t seers = std::min(keys.end, x.count) - keys.begin;
      const Mixed of{rows_of(roles, row), seers, x.outputs, x.sums_alone(), false};
      mix(k + (keys.begin - begin) * STRIPE, grad.mixed_from(keys.begin), of, values_begun, dvalues);
      values_begun = true;
    }
  }

  void write(const GkaRequest& q, int64_t index, Roles roles, int64_t row) const {
    const HalfTokens& tokens = roles == KEY ? key : x;
    const HalfSource to(roles == KEY ? q.dkeys : q.dx, q, index), to_values(q.dvalues, q, index);
    for (int64_t i = row; i < std::min(row + STRIPE, tokens.count); i++) {
      if (i + AHEAD < tokens.count) prefetch<true>(to.row(i + AHEAD), q.head_dim);
      const float* from = gradient + (i - row) * x.outputs * UNIT;
      const __m512 sum = _mm512_set1_ps(from[q.head_dim]);
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        const __m512 token = load_half(tokens.left(i) + d, UNIT);
        store_half(to.row(i) + d, q.head_dim - d, _mm512_fnmadd_ps(sum, token, _mm512_load_ps(from + d)));
      }
      if (q.own_values || roles == QUERY) continue;
      for (int64_t d = 0; d < q.head_dim; d += UNIT)
        store_half(to_values.row(i) + d, q.head_dim - d, _mm512_load_ps(dvalues + (i - row) * x.outputs * UNIT + d));
    }
  }
};

// Stripes of queries come first, then those of foreign keys.
int64_t stripes_of(int64_t tokens) { return round_up(tokens, STRIPE) / STRIPE; }
int64_t stripes_of(const GkaRequest& q) {
  return stripes_of(q.num_queries) + (q.own_keys ? 0 : stripes_of(q.num_keys));
}

}  // namespace

int64_t gka::backward_scratch_bfloat16(const GkaRequest& q) {
  const Plan plan(q);
  return plan.slots * slot_size_of<Backward>(q, plan) + round_up(2 * plan.heads * stripes_of(q), 16);
}

void gka_backward_bfloat16(const GkaRequest* request, float* scratch) {
  const GkaRequest& q = *request;
  if (q.cu_seqlens) {
    each_document(documents_bfloat16(q, GKA_BACKWARD), scratch, [](const GkaRequest& part, float* slot) {
      return gka_backward_bfloat16(&part, slot), 0.0f;
    });
    return;
  }
  const Plan plan(q);
  const int64_t slot_size = slot_size_of<Backward>(q, plan), stripes = stripes_of(q);
  const int64_t of_queries = stripes_of(q.num_queries);
  double* moments = reinterpret_cast<double*>(scratch + plan.slots * slot_size);  // (B, H, stripes)
  auto run = [&](const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* slot) {
    TileState tiles;
    Arena arena{slot};
    Backward head(q, plan, arena);
    head.fill(q, index);
    for (int64_t stripe = part; stripe < stripes; stripe += plan.parts) {
      const bool of_keys = stripe >= of_queries;
      const Roles roles = q.own_keys ? BOTH : of_keys ? KEY : QUERY;
      const int64_t row = (of_keys ? stripe - of_queries : stripe) * STRIPE;
      head.moment = 0.0;
      head.gather_stripe(roles, row);
      head.write(q, index, roles, row);
      moments[index * stripes + stripe] = head.moment;
    }
  };
  in_parallel(q, plan, scratch, slot_size, 0, run, [](auto&&...) {});
  add_up_dlog_sigma(q, -(q.own_keys ? 1 : 2) * LN_2, moments, stripes);  // own pairs were met twice
}

BF16_END
#endif

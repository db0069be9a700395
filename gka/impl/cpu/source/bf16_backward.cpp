// Backward in bfloat16 for own keys (gka/README.md, Gradients). With g_i = grad_y_i / (D_i + eps) and delta_i = g_i.y_i
// of y before it was rounded, as g_i.v_j - delta_i cancels where tokens have an offset in common:
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

constexpr int ROWS = 2;  // that are computed side by side

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
    products = arena.take(3 * PRODUCTS);
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
    const HalfSource from(q.grad_y, q, index), y(q.y, q, index), rest(q.rest, q, index);
    grad.copy(from);
    std::fill(delta, delta + x.padded, 0.0f);
    for (int64_t i = 0; i < x.count; i++) {
      const __m512 share = _mm512_set1_ps(1.0f / q.level[index * q.num_queries + i]);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < q.head_dim; d += UNIT) {
        Half* row = grad.rows + i * grad.depth() + d;
        const __m256i g = narrow(_mm512_mul_ps(load_half(row, UNIT), share));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), g);
        const int64_t left = q.head_dim - d;
        __m512 mixed = load_half(y.row(i) + d, left);
        if (q.rest.data) mixed = _mm512_add_ps(mixed, load_half(rest.row(i) + d, left));
        sum = _mm512_fmadd_ps(widen(g), mixed, sum);
      }
      delta[i] = _mm512_reduce_add_ps(sum);
    }
    grad.reorder(false);
  }

  Roles roles_of(int64_t row, int64_t c, Range seen, Range seeing) const {
    const Range rows{row, row + STRIPE}, columns{c, c + STRIPE};
    const bool query = !columns.within(seen).empty(), key = !columns.within(seeing).empty();
    if (row == c || (query && reach.hides(columns, rows)) || (key && reach.hides(rows, columns))) return EDGE;
    return query && key ? BOTH : query ? QUERY : KEY;
  }

  // x.x, and g.v for the rows' roles: as one sum, in EDGE blocks each by itself.
  void multiply_block(int64_t row, int64_t c, Roles roles) const {
    const Factors as_query{grad.left(row), value.right(c)}, as_key{value.left(row), grad.right(c)}, none{};
    multiply({x.left(row), x.right(c)}, none, x.steps, products);
    multiply(roles == KEY ? as_key : as_query, roles == BOTH ? as_key : none, x.steps, products + PRODUCTS);
    if (roles == EDGE) multiply(as_key, none, x.steps, products + 2 * PRODUCTS);
  }

  // M and K of a block (K for the rows as keys) as two tiles each.
  template <Roles ROLES>
  GKA_INLINE void block(int64_t row, int64_t c, Half* to_k, Half* to_m) {
    const float* products = this->products;
    using V = Vectors<2 * ROWS>;
    __m512 moments = _mm512_setzero_ps();
    const __m512 scale = _mm512_set1_ps(inverse * LOG2_E), factor = _mm512_set1_ps(inverse), one = _mm512_set1_ps(1.0f);
    const __m512 delta_columns[2] = {_mm512_load_ps(delta + c), _mm512_load_ps(delta + c + UNIT)};
    for (int64_t i = 0; i < STRIPE; i += ROWS, products += ROWS * STRIPE) {
      auto e = exponents<2 * ROWS>(products, scale, norm + row + i, norm + c);
      auto k = exp2_half<false>(e);
      auto f = V::of([&](int v) { return _mm512_load_ps(products + PRODUCTS + v * UNIT); });
      if (ROLES != KEY) f = V::of([&](int v) { return _mm512_sub_ps(f.v[v], _mm512_set1_ps(delta[row + i + v / 2])); });
      if (ROLES == KEY || ROLES == BOTH) f = V::of([&](int v) { return _mm512_sub_ps(f.v[v], delta_columns[v % 2]); });
      if (ROLES == EDGE) {
        // Hidden elements must not meet a K that is not a number, and those on the diagonal move nothing.
        GKA_UNROLL for (int v = 0; v < 2 * ROWS; v++) {
          const int64_t token = row + i + v / 2, column = c + v % 2 * UNIT;
          const __mmask16 own = lanes({token, token + 1}, column);
          const __mmask16 query = lanes(seen_from(reach, token), column) & ~own;
          const __mmask16 key = lanes(reach.seen_by(token), column) & ~own;
          const __m512 of_key = _mm512_sub_ps(_mm512_load_ps(products + 2 * PRODUCTS + v * UNIT), delta_columns[v % 2]);
          f.v[v] = _mm512_add_ps(_mm512_maskz_mov_ps(query, f.v[v]), _mm512_maskz_mov_ps(key, of_key));
          f.v[v] = _mm512_maskz_mul_ps(query | key, k.v[v], f.v[v]);
          moments = _mm512_mask3_fmadd_ps(f.v[v], e.v[v], moments, query | key);
          k.v[v] = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(key, k.v[v]), own, one);
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
    moment += _mm512_reduce_add_ps(moments);
  }

  // What a stripe gathers, in dx and dvalues.
  void gather_stripe(int64_t row) {
    bool values_begun = dvalues == dx;
    const Range seen = stripes({seen_from(reach, row).begin, seen_from(reach, row + STRIPE - 1).end}, x.padded);
    const Range seeing = stripes({reach.seen_by(row).begin, reach.seen_by(row + STRIPE - 1).end}, x.padded);
    const Range both{std::min(seen.begin, seeing.begin), std::max(seen.end, seeing.end)};
    for (int64_t begin = both.begin; begin < both.end; begin += CHUNK) {
      const Range chunk{begin, std::min(begin + CHUNK, both.end)};
      for (int64_t c = begin; c < chunk.end; c += STRIPE) {
        const Roles roles = roles_of(row, c, seen, seeing);
        multiply_block(row, c, roles);
        Half *to_k = k + (c - begin) * STRIPE, *to_m = m + (c - begin) * STRIPE;
        if (roles == BOTH) block<BOTH>(row, c, to_k, to_m);
        else if (roles == QUERY) block<QUERY>(row, c, to_k, to_m);
        else if (roles == KEY) block<KEY>(row, c, to_k, to_m);
        else block<EDGE>(row, c, to_k, to_m);
      }
      mix(m, x.mixed_from(begin), (chunk.end - begin) / STRIPE, x.outputs, begin > both.begin, dx);
      const Range keys = seeing.within(chunk);
      if (keys.empty()) continue;
      mix(k + (keys.begin - begin) * STRIPE, grad.mixed_from(keys.begin), (keys.end - keys.begin) / STRIPE, x.outputs,
          values_begun, dvalues);
      values_begun = true;
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

// Backward (docs/mathematics.md): one pass over the tiles makes K and the gradient of its exponents, and each is
// mixed along both of its sides. With g_i = grad_y_i / (D_i + eps) and delta_i = g_i.y_i,
//
//   M_rc = K_rc (v_r.g_c - delta_c)  (+ the same with r and c exchanged where half of a symmetric K stands for all)
//
// Other keys: K is W itself, g_i = grad_y_i, and delta_i = sum_j W_ij g_i.v_j is computed from the products that M has,
// not as g_i.y_i. Then M's rounding error cancels in a row where one key has nearly all the weight. That matters
// because the error is multiplied by the distance of that key, which in self-attention is 0. A block has all keys that
// its queries see, so that delta is known in time.
#include "backward_head.h"
#include "documents.h"
#include "few.h"

namespace {

using namespace gka;

// v_r.g_c - delta_c, with BOTH_WAYS + g_r.v_c - delta_r, into the block. The sums begin at -delta: subtracted from the
// finished sums, delta would round the same way in most of a row.
template <int V, bool BOTH_WAYS>
GKA_INLINE void pull(const Backward& head, const Block& block, int64_t r0, int64_t c0) {
  Vector acc[TILE_ROWS][V];
  GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++) {
    const Vector of_key = Vector::all(BOTH_WAYS ? -head.delta[r0 + i] : 0.0f);
    GKA_UNROLL for (int v = 0; v < V; v++) acc[i][v] = of_key - Vector::load(head.delta + c0 + v * Vector::LANES);
  }
  multiply(head.value.panel(r0), head.grad.panel(c0), head.head_dim, acc);
  if (BOTH_WAYS) multiply(head.grad.panel(r0), head.value.panel(c0), head.head_dim, acc);
  GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++)
    GKA_UNROLL for (int v = 0; v < V; v++) acc[i][v].store(block.m + block.at(r0 + i, c0 + v * Vector::LANES));
}

// K and M of own keys, and the sums of M.
template <bool SYMMETRIC>
struct OwnTile {
  const Backward& head;
  const Block& block;

  template <int V>
  void run(int64_t r0, int64_t c0, bool masked) const {
    constexpr int64_t L = Vector::LANES;
    pull<V, SYMMETRIC>(head, block, r0, c0);
    Vector acc[TILE_ROWS][V], down[V];
    clear(acc);
    multiply(head.key.panel(r0), head.query.panel(c0), head.head_dim, acc);
    GKA_UNROLL for (int v = 0; v < V; v++) down[v] = Vector::all(0.0f);
    const Vector inverse = Vector::all(head.inverse), zero = Vector::all(0.0f);
    Vector pairs = zero, twice = zero;  // M times exponents; diagonal units have every pair twice
    GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++) {
      const int64_t r = r0 + i;
      Vector norm = Vector::all(head.key.half_norm[r]), across = zero;
      GKA_UNROLL for (int v = 0; v < V; v++) {
        const int64_t c = c0 + v * L, o = block.at(r, c);
        Vector e = exponent(acc[i][v], norm, Vector::load(head.query.half_norm + c));
        Vector k = exp2(e);
        if (masked) k = visible(head.reach, r, c, k, zero);
        k.store(block.k + o);
        Vector m = k * Vector::load(block.m + o);
        const bool diagonal = on_diagonal<SYMMETRIC>(r, c);
        e = e - Vector::load(head.usual + c);
        if (diagonal) twice = fma(m, e, twice);
        else pairs = fma(m, e, pairs);
        m = m * inverse;
        if (r >= c && r < c + L) m = zero.keep(r - c, r - c, m);  // its factor x_i - x_i is 0, but would be rounded
        m.store(block.m + o);
        if (!diagonal) down[v] = down[v] + m;
        across = across + m;
      }
      head.key_sum[r] += double(across.sum());
    }
    GKA_UNROLL for (int v = 0; v < V; v++) down[v].add_to(head.query_sum + c0 + v * L);
    *head.dlog_sigma += double(pairs.sum()) + 0.5 * double(twice.sum());
  }
};

// Exponents for other keys, and each query's sums over its keys.
struct ForeignTile {
  const Backward& head;
  const Block& block;

  template <int V>
  void run(int64_t r0, int64_t c0, bool masked) const {
    constexpr int64_t L = Vector::LANES;
    pull<V, false>(head, block, r0, c0);
    Vector acc[TILE_ROWS][V];
    clear(acc);
    multiply(head.key.panel(r0), head.query.panel(c0), head.head_dim, acc);
    GKA_UNROLL for (int v = 0; v < V; v++) {
      const int64_t c = c0 + v * L;
      const Vector norm = Vector::load(head.query.half_norm + c), level = Vector::load(head.level + c);
      const Vector zero = Vector::all(0.0f), hidden = Vector::all(LOWEST);
      Vector weight = zero, pulled = zero, centre = zero;
      GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++) {
        const int64_t r = r0 + i, o = block.at(r, c);
        Vector e = exponent(acc[i][v], Vector::all(head.key.half_norm[r]), norm), f = Vector::load(block.m + o);
        if (masked) e = visible(head.reach, r, c, e, hidden), f = visible(head.reach, r, c, f, zero);
        e.store(block.k + o);
        const Vector w = exp2(e - level);
        weight = weight + w;
        pulled = fma(w, f, pulled);
        centre = fma(w, e, centre);
      }
      weight.add_to(head.weight + c), pulled.add_to(head.pulled + c), centre.add_to(head.centre + c);
    }
  }
};

// Turn the exponents and products of a block of other keys into W and M.
void weigh(const Backward& head, const Block& block) {
  constexpr int64_t L = Vector::LANES;
  const Vector inverse = Vector::all(head.inverse);
  for (int64_t c = block.queries.begin; c < block.queries.end; c += L) {
    const Vector weight = greater(Vector::all(1e-30f), Vector::load(head.weight + c));  // 0 if a query sees nothing
    const Vector delta = Vector::load(head.pulled + c) / weight;
    float high[L], low[L];
    for (int64_t i = 0; i < L; i++) {
      const Factor share(head.weight[c + i] < 1e-30 ? 1e30 : 1.0 / head.weight[c + i]);
      high[i] = share.high, low[i] = share.low;
    }
    const Vector share = Vector::load(high), share_left = Vector::load(low);
    const Vector centre = Vector::load(head.centre + c) / weight, level = Vector::load(head.level + c);
    const Vector zero = Vector::all(0.0f);
    const Range keys = head.reach.keys(unit_of(c)).within(block.keys);
    Vector moment = zero, sum = zero;
    for (int64_t r = keys.begin; r < keys.end; r += L) {
      const bool masked = head.reach.hides({r, r + L}, {c, c + L});
      Vector m[L], moments = zero, column = zero;  // of a few keys first: sums of many small numbers round one way
      GKA_UNROLL for (int64_t i = 0; i < L; i++) {
        m[i] = zero;
        if (r + i >= keys.end) continue;
        const int64_t o = block.at(r + i, c);
        const Vector e = Vector::load(block.k + o);
        Vector w = exp2(e - level);
        w = fma(w, share, w * share_left);
        const Vector f = Vector::load(block.m + o), above = f - delta;
        const Vector lost = ((f - above) - delta).or_zero();  // rounding error of `above`; NaN if that is infinite
        m[i] = fma(w, above, w * lost);
        if (masked) w = visible(head.reach, r + i, c, w, zero), m[i] = visible(head.reach, r + i, c, m[i], zero);
        w.store(block.k + o);
        moments = fma(m[i], e - centre, moments);
        m[i] = m[i] * inverse;
        m[i].store(block.m + o);
        column = column + m[i];
      }
      moment = moment + moments, sum = sum + column;
      sums(m).add_to(head.key_sum + r);
    }
    sum.add_to(head.query_sum + c);
    *head.dlog_sigma += double(moment.sum());
  }
}

void mix(const Backward& head, const Block& block) {
  const Term by_key{block.m, head.key.rows}, by_query{block.m, head.query.rows}, by_gradient{block.k, head.grad.rows};
  const bool own_values = head.own_values;
  if (head.reach.symmetric && own_values) {
    gather_by_queries<true>(head.reach, block, by_query, by_gradient, head.dx);
  } else {
    gather_by_queries<false>(head.reach, block, by_key, by_key, head.dx);
    if (head.reach.symmetric)
      gather_by_queries<false>(head.reach, block, by_gradient, by_gradient, head.dvalues);
  }
  if (own_values) {
    gather_by_keys<true>(head.reach, block, by_query, by_gradient, head.dkeys);
  } else {
    gather_by_keys<false>(head.reach, block, by_query, by_query, head.dkeys);
    gather_by_keys<false>(head.reach, block, by_gradient, by_gradient, head.dvalues);
  }
}

// One part of one head, up to the sums.
void run_part(const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* scratch) {
  Arena arena{scratch};
  Backward head(q, plan, arena);
  head.fill(q, index);
  head.fill_gradients(q, index);
  std::memset(scratch + head.totals, 0, (head.totals_end - head.totals) * sizeof(float));
  if (part == 0) *head.dlog_sigma = head.removed;  // which subtracting `usual` removes
  each_block(plan, head, part, [&](Range keys, Range queries) {
    Block block{keys, queries, block_stride(plan), head.k, head.m};
    if (head.reach.symmetric) {
      each_tile(head.reach, block, OwnTile<true>{head, block});
    } else if (head.own_keys) {
      each_tile(head.reach, block, OwnTile<false>{head, block});
    } else {
      each_tile(head.reach, block, ForeignTile{head, block});
      weigh(head, block);
    }
    mix(head, block);
  });
}

// out_i = mixed_i - sum_i x_i for a range of tokens, from the sums of all parts of the head.
void write(Range range, const Plan& plan, int64_t slot_size, const Sums& mixed, const double* sums,
           const Tokens& tokens, const Source& out, int64_t head_dim) {
  range = range.within({0, tokens.count});
  for (int64_t i = range.begin; i < range.end; i++) {
    if (i + AHEAD < range.end) prefetch<true>(out.row(i + AHEAD), head_dim);
    double sum = 0.0;
    for (int64_t part = 0; sums && part < plan.parts; part++) sum += in_slot(sums, part * slot_size)[i];
    for (int64_t d = 0; d < head_dim; d += Vector::LANES) {
      Vector gradient = mixed.get(i * tokens.channels + d, plan.parts, slot_size);
      if (sums) gradient = negated_fma(Vector::all(float(sum)), Vector::load(tokens.row(i) + d), gradient);
      store_channels(gradient, out.row(i), d, head_dim);
    }
  }
}

void finish(const GkaRequest& q, const Plan& plan, int64_t index, Range range, float* scratch, int64_t slot_size) {
  Arena arena{scratch};
  const Backward head(q, plan, arena);
  auto write_to = [&](const GkaTensor& t, const Sums& mixed, const double* sums, const Tokens& tokens) {
    write(range, plan, slot_size, mixed, sums, tokens, Source(t, q, index), q.head_dim);
  };
  write_to(q.dx, head.dx, head.query_sum, head.query);
  if (!q.own_keys) write_to(q.dkeys, head.dkeys, head.key_sum, head.key);
  if (!q.own_values) write_to(q.dvalues, head.dvalues, nullptr, head.key);
}

}  // namespace

int64_t gka::backward_scratch(const GkaRequest& q) {
  const Plan plan(q, !q.own_keys);
  return plan.slots * slot_size_of<Backward>(q, plan) + round_up(2 * plan.tasks(), 16);
}

void gka_backward_float32(const GkaRequest* request, float* scratch) {
  const GkaRequest& q = *request;
  if (q.cu_seqlens) {
    each_document(documents_float32(q, GKA_BACKWARD), scratch, [](const GkaRequest& part, float* slot) {
      return gka_backward_float32(&part, slot), 0.0f;
    });
    return;
  }
  if (sees_few(q)) return backward_of_few(q, scratch);
  const Plan plan(q, !q.own_keys);
  const int64_t slot_size = slot_size_of<Backward>(q, plan);
  double* partial = reinterpret_cast<double*>(scratch + plan.slots * slot_size);
  auto run = [&](const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* slot) {
    run_part(q, plan, index, part, slot);
    Arena arena{slot};
    partial[index * plan.parts + part] = *Backward(q, plan, arena).dlog_sigma;
  };
  in_parallel(q, plan, scratch, slot_size, std::max(q.num_queries, q.num_keys), run, finish);
  add_up_dlog_sigma(q, -2.0 * LN_2, partial, plan.parts);
}

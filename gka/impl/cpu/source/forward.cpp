// Forward: y_c = sum_r K_rc v_r / (sum_r K_rc + eps), without W.
//
// Self-attention: K_cc = 1 is the largest of its row, so nothing is subtracted from exponents and nothing rescaled.
// Other keys: exponents stay in the block until the largest of their rows so far is known.
#include "documents.h"
#include "few.h"
#include "tiles.h"

namespace {

using namespace gka;

struct Forward : Head {
  double* sum;                            // per query: of K
  float* moment = nullptr;                // per query of own keys: of K times exponents, 0 for K_ii
  float *top = nullptr, *peak = nullptr;  // per query: the largest exponent, of all and of a block
  Sums y;
  float* block;

  Forward(const GkaRequest& q, const Plan& plan, Arena& arena) : Head(q, arena, false) {
    sum = arena.take_doubles(query.padded);
    moment = own_keys ? arena.take(query.padded) : nullptr;
    top = own_keys ? nullptr : arena.take(query.padded);
    peak = own_keys ? nullptr : arena.take(query.padded);
    y.take(arena, query, seen(key.count));
    block = arena.take(plan.keys * block_stride(plan));
  }
};

// K and its row sums in self-attention. SYMMETRIC is a template argument: as a branch inside the loops it took a tenth
// of their time.
template <bool SYMMETRIC>
struct OwnTile {
  const Forward& head;
  const Block& block;

  template <int V>
  void run(int64_t r0, int64_t c0, bool masked) const {
    constexpr int64_t L = Vector::LANES;
    Vector acc[TILE_ROWS][V], down[V], moment[V];
    clear(acc);
    multiply(head.key.panel(r0), head.query.panel(c0), head.head_dim, acc);
    GKA_UNROLL for (int v = 0; v < V; v++) down[v] = moment[v] = Vector::all(0.0f);
    const Vector zero = Vector::all(0.0f);
    GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++) {
      const int64_t r = r0 + i;
      Vector norm = Vector::all(head.key.half_norm[r]), across = zero;
      GKA_UNROLL for (int v = 0; v < V; v++) {
        const int64_t c = c0 + v * L;
        const Vector e = exponent(acc[i][v], norm, Vector::load(head.query.half_norm + c));
        Vector k = exp2(e);
        if (masked) k = visible(head.reach, r, c, k, zero);
        k.store(block.k + block.at(r, c));
        const bool diagonal = on_diagonal<SYMMETRIC>(r, c);
        moment[v] = fma(SYMMETRIC && !diagonal ? k + k : k, e, moment[v]);
        if (!diagonal) down[v] = down[v] + k;
        if (SYMMETRIC) across = across + k;
      }
      if (SYMMETRIC) head.sum[r] += double(across.sum());
    }
    GKA_UNROLL for (int v = 0; v < V; v++) {
      const int64_t c = c0 + v * L;
      down[v].add_to(head.sum + c);
      (Vector::load(head.moment + c) + moment[v]).store(head.moment + c);
    }
  }
};

// Exponents for other keys, and the largest of the block for each query.
struct ForeignTile {
  const Forward& head;
  const Block& block;

  template <int V>
  void run(int64_t r0, int64_t c0, bool masked) const {
    constexpr int64_t L = Vector::LANES;
    Vector acc[TILE_ROWS][V], peak[V];
    clear(acc);
    multiply(head.key.panel(r0), head.query.panel(c0), head.head_dim, acc);
    GKA_UNROLL for (int v = 0; v < V; v++) peak[v] = Vector::load(head.peak + c0 + v * L);
    const Vector hidden = Vector::all(-INFINITY);
    GKA_UNROLL for (int i = 0; i < TILE_ROWS; i++) {
      const int64_t r = r0 + i;
      Vector norm = Vector::all(head.key.half_norm[r]);
      GKA_UNROLL for (int v = 0; v < V; v++) {
        const int64_t c = c0 + v * L;
        Vector e = exponent(acc[i][v], norm, Vector::load(head.query.half_norm + c));
        if (masked) e = visible(head.reach, r, c, e, hidden);
        e.store(block.k + block.at(r, c));
        peak[v] = greater(e, peak[v]);
      }
    }
    GKA_UNROLL for (int v = 0; v < V; v++) peak[v].store(head.peak + c0 + v * L);
  }
};

// The block's exponents become K, relative to the largest exponent so far, to which sums and y are brought as well.
void exponentiate(const Forward& head, const Block& block) {
  constexpr int64_t L = Vector::LANES;
  for (int64_t c = block.queries.begin; c < block.queries.end; c += L) {
    Range keys = head.reach.keys(unit_of(c)).within(block.keys);
    if (keys.empty()) continue;
    Vector old = Vector::load(head.top + c), top = greater(old, Vector::load(head.peak + c)), factor = exp2(old - top);
    top.store(head.top + c);
    Vector of_block = Vector::all(0.0f);  // by units first: sums of many equal numbers would all round one way
    for (int64_t unit = keys.begin; unit < keys.end; unit += UNIT) {
      Vector of_unit = Vector::all(0.0f);
      for (int64_t r = unit; r < std::min(unit + UNIT, keys.end); r++) {
        float* k = block.k + block.at(r, c);
        Vector weight = exp2(Vector::load(k) - top);
        weight.store(k);
        of_unit = of_unit + weight;
      }
      of_block = of_block + of_unit;
    }
    float factors[L];
    factor.store(factors);
    for (int64_t i = 0; i < L; i++)
      if (factors[i] != 1.0f) head.sum[c + i] *= factors[i], head.y.scale(c + i, factors[i]);
    of_block.add_to(head.sum + c);
  }
}

// One part of one head, up to the sums.
void run_part(const GkaRequest& q, const Plan& plan, int64_t index, int64_t part, float* scratch) {
  Arena arena{scratch};
  Forward head(q, plan, arena);
  head.fill(q, index);
  std::fill(head.sum, head.sum + head.query.padded, 0.0);
  head.y.clear();
  if (head.moment) std::fill(head.moment, head.moment + head.query.padded, 0.0f);
  if (head.top) std::fill(head.top, head.top + head.query.padded, LOWEST);
  if (head.peak) std::fill(head.peak, head.peak + head.query.padded, LOWEST);
  each_block(plan, head, part, [&](Range keys, Range queries) {
    Block block{keys, queries, block_stride(plan), head.block, nullptr};
    const Term term{block.k, head.value.rows};
    if (head.reach.symmetric) {
      each_tile(head.reach, block, OwnTile<true>{head, block});
    } else if (head.own_keys) {
      each_tile(head.reach, block, OwnTile<false>{head, block});
    } else {
      each_tile(head.reach, block, ForeignTile{head, block});
      exponentiate(head, block);
    }
    gather_by_queries<false>(head.reach, block, term, term, head.y);
    if (head.reach.symmetric) gather_by_keys<false>(head.reach, block, term, term, head.y);
  });
}

// y and level of some queries, from the sums of all parts. Returns the largest |x|^2 / sigma^2 among them.
float finish(const GkaRequest& q, const Plan& plan, int64_t index, Range queries, float* scratch, int64_t slot_size) {
  Arena arena{scratch};
  const Forward head(q, plan, arena);
  float largest = 0.0f;
  GkaRow* rows = static_cast<GkaRow*>(q.row_state) + index * q.num_queries;
  const Source to(q.y, q, index);
  for (int64_t i = queries.begin; i < queries.end; i++) {
    if (i + AHEAD < queries.end) prefetch<true>(to.row(i + AHEAD), q.head_dim);
    double sum = 0.0, moment = 0.0;
    for (int64_t part = 0; part < plan.parts; part++) {
      sum += in_slot(head.sum, part * slot_size)[i];
      if (head.moment) moment += head.moment[part * slot_size + i];
      if (head.top) head.top[i] = std::max(head.top[i], head.top[part * slot_size + i]);  // one part has this query
    }
    const double exact = sum + (q.own_keys ? double(q.eps) : 0.0);
    const Factor share(1.0 / exact);
    const Vector less = Vector::all(q.own_keys ? q.eps / float(exact) : 0.0f);  // of the mean
    const bool shifted = head.mean && q.own_values;
    float* y = to.row(i);
    for (int64_t d = 0; d < q.head_dim; d += Vector::LANES) {
      Vector mean = share.times(head.y.get(i * head.query.channels + d, plan.parts, slot_size));
      if (shifted) {
        const Vector of_keys = Vector::load(head.mean + d);
        mean = of_keys + negated_fma(of_keys, less, mean);
      }
      store_channels(mean, y, d, q.head_dim);
    }
    rows[i] = {q.own_keys ? exact : exact == 0.0 ? 0.0 : double(head.top[i]), moment};
    largest = std::max(largest, float(2.0 / LOG2_E) * head.query.half_norm[i]);
  }
  return largest;
}

}  // namespace

int64_t gka::forward_scratch(const GkaRequest& q) {
  const Plan plan(q);
  return plan.slots * slot_size_of<Forward>(q, plan);
}

float gka_forward_float32(const GkaRequest* request, float* scratch) {
  const GkaRequest& q = *request;
  if (q.cu_seqlens)
    return each_document(documents_float32(q, GKA_FORWARD), scratch, [](const GkaRequest& part, float* slot) {
      return gka_forward_float32(&part, slot);
    });
  if (gka::sees_few(q)) return gka::forward_of_few(q);
  const Plan plan(q);
  float largest = 0.0f;
  in_parallel(q, plan, scratch, slot_size_of<Forward>(q, plan), q.num_queries, run_part, [&](auto&&... arguments) {
    const float of_part = finish(arguments...);
#pragma omp critical(gka_largest)
    largest = std::max(largest, of_part);
  });
  return largest;
}

int64_t gka_size_of_GkaRequest() { return sizeof(GkaRequest); }

int64_t gka_scratch_float32(const GkaRequest* request, int32_t phase) {
  if (request->cu_seqlens) return gka::documents_float32(*request, phase).scratch();
  if (gka::sees_few(*request)) return gka::few_scratch(*request, phase);
  return phase == GKA_FORWARD ? gka::forward_scratch(*request) : gka::backward_scratch(*request);
}

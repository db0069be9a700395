// One head of a request: its tokens packed for tiles, its mask and its bandwidth; and how the work is divided.
//
// Tokens and channels are padded to units of 16. K is computed, skipped and mixed by units of 16 keys x 16 queries.
// Both steps take the units from the same two functions of `Reach`, so only computed units are mixed.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "request.h"
#include "vector.h"

namespace gka {

constexpr int64_t UNIT = 16;
constexpr int64_t PANEL = 48;   // queries that a tile reads side by side
constexpr int64_t WHOLE = 240;  // up to so many tokens K is one block
constexpr float PAD = 1e37f;    // half the squared norm of padding, in scaled panels: K is 0 there

GKA_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
GKA_INLINE int64_t unit_of(int64_t n) { return n & -UNIT; }  // rounds down, negative numbers too

// How many channels a product adds up one after another: its rounding error grows with them.
GKA_INLINE int64_t channels_at_once(int64_t head_dim) {
  return std::clamp<int64_t>(head_dim / CHANNEL_CHUNKS, 8, LARGEST_CHUNK);
}

struct Range {
  int64_t begin, end;
  GKA_INLINE Range within(Range o) const { return {std::max(begin, o.begin), std::min(end, o.end)}; }
  GKA_INLINE bool empty() const { return begin >= end; }
};

// The mask (gka/masking.py): query c sees the keys c + shift - before .. c + shift + after.
struct Reach {
  int64_t before, after, shift;
  // Only the half of K with c >= r is computed, for both of its roles.
  bool symmetric;

  explicit Reach(const GkaRequest& q) {
    const int64_t unlimited = q.num_queries + q.num_keys;
    before = q.before < 0 ? unlimited : std::min(q.before, unlimited);
    after = q.after < 0 ? unlimited : std::min(q.after, unlimited);
    shift = q.num_keys - q.num_queries;
    symmetric = q.own_keys && before == after;
  }
  // The keys that a unit of queries sees.
  GKA_INLINE Range keys(int64_t unit) const {
    Range seen{unit_of(unit + shift - before), unit_of(unit + 15 + shift + after) + UNIT};
    return symmetric ? Range{seen.begin, std::min(seen.end, unit + UNIT)} : seen;
  }
  // The queries that see a unit of keys.
  GKA_INLINE Range queries(int64_t unit) const {
    Range seen{unit_of(unit - shift - after), unit_of(unit + 15 - shift + before) + UNIT};
    return symmetric ? Range{std::max(seen.begin, unit), seen.end} : seen;
  }
  GKA_INLINE Range seen(int64_t query) const { return {query + shift - before, query + shift + after + 1}; }
  // The queries that see one key.
  GKA_INLINE Range seen_by(int64_t key) const { return {key - shift - after, key - shift + before + 1}; }
  GKA_INLINE bool hides(Range keys, Range queries) const {
    return queries.begin < seen_by(keys.end - 1).begin || queries.end > seen_by(keys.begin).end;
  }
};

// Memory of the caller, handed out in pieces; without any it only counts.
struct Arena {
  float* base;
  int64_t used = 0;
  float* take(int64_t numbers) {
    float* piece = base ? base + used : nullptr;
    used += round_up(numbers, 16);
    return piece;
  }
  double* take_doubles(int64_t numbers) { return reinterpret_cast<double*>(take(2 * numbers)); }
};

// The same piece of another slot, so many numbers of 4 bytes further on.
GKA_INLINE const double* in_slot(const double* piece, int64_t offset) {
  return reinterpret_cast<const double*>(reinterpret_cast<const char*>(piece) + 4 * offset);
}

// How the heads are divided into tasks, and K into blocks of queries by keys. With fewer heads than threads a head has
// several parts, each with every n-th block of queries and its own scratch; their sums are added at the end in a fixed
// order. With whole_rows a block has all keys that its queries see, and therefore fewer queries.
struct Plan {
  int64_t heads, parts = 1, block, keys, slots;

  explicit Plan(const GkaRequest& q, bool whole_rows = false) : heads(q.batch * q.num_heads) {
    const int64_t tokens = round_up(std::max(q.num_queries, q.num_keys), UNIT);
    const int64_t queries = round_up(q.num_queries, UNIT), most = (queries + PANEL - 1) / PANEL;
    auto rounds = [&](int64_t parts) { return double((heads * parts + q.threads - 1) / q.threads) / double(parts); };
    // A part costs the packing of its head once more, so it must pay.
    for (int64_t n = 2; n <= std::min(most, 2 * int64_t(q.threads)); n++)
      if (rounds(n) < 0.85 * rounds(parts)) parts = n;
    block = tokens <= WHOLE ? tokens : BLOCK;
    if (parts > 1) block = std::max(PANEL, std::min(BLOCK, round_up(queries / (2 * parts), PANEL)));
    keys = block;
    if (whole_rows) {
      const Reach reach(q);
      block = std::min(block, round_up(q.num_queries, UNIT));
      auto rows = [&] {
        const int64_t all = std::max(UNIT, round_up(q.num_keys, UNIT));
        return std::min(all, round_up(block + reach.before + reach.after, UNIT) + 3 * UNIT);
      };
      block = std::min(block, std::max(PANEL, WHOLE * WHOLE / rows() / PANEL * PANEL));
      keys = rows();
    }
    slots = parts > 1 ? tasks() : std::min<int64_t>(q.threads, heads);
  }
  int64_t tasks() const { return heads * parts; }
};

// Tokens of one head: as rows of padded channels, and as panels of PANEL tokens in which channels are rows. Panels may
// be scaled: those of queries and keys by sqrt(log2 e) / sigma, so that a tile finds exponents without a product.
struct Tokens {
  int64_t count, padded, channels;
  float *rows = nullptr, *panels = nullptr, *half_norm = nullptr;

  Tokens(int64_t count, int64_t head_dim)
      : count(count), padded(round_up(count, UNIT)), channels(round_up(head_dim, 16)) {}
  void take(Arena& arena, bool with_panels, bool with_norms) {
    rows = arena.take(padded * channels);
    panels = with_panels ? arena.take(round_up(padded, PANEL) * channels) : nullptr;
    half_norm = with_norms ? arena.take(padded) : nullptr;
  }
  GKA_INLINE float* panel(int64_t i) const { return panels + i / PANEL * PANEL * channels + i % PANEL; }
  GKA_INLINE float* row(int64_t i) const { return rows + i * channels; }

  // Fill the panels, and half their squared norms in the order in which a tile multiplies: K_ii is then exactly 1.
  void fill_panels(int64_t head_dim, float factor) const {
    for (int64_t i = 0; i < padded; i += 8)
      for (int64_t d = 0; d < channels; d += 8)
        transpose8(row(i) + d, channels, factor, panel(i) + d * PANEL, PANEL);
    if (!half_norm) return;
    constexpr int64_t L = Vector::LANES, VECTORS = PANEL / L;
    const int64_t chunk = channels_at_once(head_dim);
    for (int64_t i = 0; i < padded; i += PANEL) {
      Vector sum[VECTORS], some[VECTORS];
      GKA_UNROLL for (int64_t v = 0; v < VECTORS; v++) sum[v] = some[v] = Vector::all(0.0f);
      for (int64_t d = 0; d < head_dim; d++) {
        const bool ends = (d + 1) % chunk == 0 || d + 1 == head_dim;
        GKA_UNROLL for (int64_t v = 0; v < VECTORS; v++) {
          const Vector x = Vector::load(panel(i) + d * PANEL + v * L);
          some[v] = fma(x, x, some[v]);
          if (ends) sum[v] = sum[v] + some[v], some[v] = Vector::all(0.0f);
        }
      }
      for (int64_t v = 0; v < VECTORS && i + v * L < padded; v++)
        (sum[v] * Vector::all(0.5f)).store(half_norm + i + v * L);
    }
    std::fill(half_norm + count, half_norm + padded, PAD);
  }
};

// A head of one of the request's tensors.
template <typename T>
struct RowsOf {
  T* data;
  int64_t token;
  RowsOf(const GkaTensor& t, const GkaRequest& q, int64_t head)
      : data(static_cast<T*>(t.data) + head / q.num_heads * t.batch + head % q.num_heads * t.head), token(t.token) {}
  GKA_INLINE T* row(int64_t i) const { return data + i * token; }
};
using Source = RowsOf<float>;

// Prefetch a row that is needed soon. The rows of a head lie apart, so the hardware does not prefetch them.
constexpr int64_t AHEAD = 16;  // rows
template <bool TO_WRITE = false, typename T>
GKA_INLINE void prefetch(const T* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, TO_WRITE);
}

// Copy the rows of a head, less `mean` if there is one, and fill the panels if there are any.
inline void pack(const Source& source, int64_t head_dim, const float* mean, float factor, const Tokens& to) {
  for (int64_t i = 0; i < to.count; i++) {
    if (i + AHEAD < to.count) prefetch(source.row(i + AHEAD), head_dim);
    for (int64_t d = 0; d < to.channels; d += Vector::LANES) {
      Vector x = load_channels(source.row(i), d, head_dim);
      (mean ? x - Vector::load(mean + d) : x).store(to.row(i) + d);
    }
  }
  std::fill(to.row(to.count), to.row(to.padded), 0.0f);
  if (to.panels) to.fill_panels(head_dim, factor);
}

// The mean of each channel, padded with zeros. It is rounded to the ulp of the channel's largest value, so that x -
// mean is exact. Otherwise all x of one magnitude would round the same way, and with a wide sigma y is little more than
// the mean, so the error would stay in it.
inline void mean_of(const Source& source, int64_t count, int64_t head_dim, float* mean) {
  constexpr int64_t L = Vector::LANES, SIDE_BY_SIDE = 4;
  const int64_t channels = round_up(head_dim, 16);
  for (int64_t d = 0; d < channels; d += SIDE_BY_SIDE * L) {
    Vector sum[SIDE_BY_SIDE], least[SIDE_BY_SIDE], most[SIDE_BY_SIDE];
    GKA_UNROLL for (int v = 0; v < SIDE_BY_SIDE; v++) sum[v] = least[v] = most[v] = Vector::all(0.0f);
    for (int64_t i = 0; i < count; i++) {
      if (i + AHEAD < count) prefetch(source.row(i + AHEAD), head_dim);
      GKA_UNROLL for (int v = 0; v < SIDE_BY_SIDE; v++) {
        const Vector x = load_channels(source.row(i), d + v * L, head_dim);
        sum[v] = sum[v] + x, least[v] = lesser(x, least[v]), most[v] = greater(x, most[v]);
      }
    }
    for (int64_t v = 0; v < SIDE_BY_SIDE && d + v * L < channels; v++) {
      const Vector anchor = lesser(Vector::all(4.0f) * (most[v] - least[v]), Vector::all(1e38f));
      (fma(sum[v], Vector::all(1.0f / float(count)), anchor) - anchor).store(mean + d + v * L);
    }
  }
}

// exp(-2 log_sigma), clamped; NaN stays.
inline double inverse_variance(const GkaRequest& q, int64_t head) {
  float s = q.log_sigma[head % q.num_heads];
  s = s > q.bound ? q.bound : s < -q.bound ? -q.bound : s;
  return std::exp(-2.0 * double(s));
}

// dlog_sigma from its partial sums, so many for each head of the batch.
inline void add_up_dlog_sigma(const GkaRequest& q, double factor, const double* sums, int64_t per_head) {
  for (int64_t h = 0; h < q.num_heads; h++) {
    double sum = 0.0;
    for (int64_t i = 0; i < q.batch * q.num_heads * per_head; i++)
      if (i / per_head % q.num_heads == h) sum += sums[i];
    q.dlog_sigma[h] = std::abs(q.log_sigma[h]) > q.bound ? 0.0f : float(factor * sum);
  }
}

// The part of a head that forward and backward share.
struct Head {
  Tokens query, key, value;
  Reach reach;
  bool own_keys, own_values;
  int64_t head_dim;
  float inverse = 0.0f, factor = 1.0f;  // 1 / sigma^2; that of the panels of queries and keys
  float* mean = nullptr;                // of the keys, if it is subtracted

  Head(const GkaRequest& q, Arena& arena, bool value_panels)
      : query(q.num_queries, q.head_dim), key(q.num_keys, q.head_dim), value(key), reach(q), own_keys(q.own_keys),
        own_values(q.own_values), head_dim(q.head_dim) {
    query.take(arena, true, true);
    if (own_keys) key = query;
    else key.take(arena, true, true);
    if (own_values) value = key;
    else value.take(arena, value_panels, false);
    mean = q.centred ? arena.take(query.channels) : nullptr;
  }
  // The most that one token sees of so many tokens.
  int64_t seen(int64_t tokens) const { return std::min(tokens, reach.before + reach.after + 1); }
  void fill(const GkaRequest& q, int64_t head) {
    const double precise = inverse_variance(q, head);  // an error of the factor would change all exponents alike
    inverse = float(precise), factor = float(std::sqrt(LOG2_E * precise));
    if (mean) mean_of(Source(q.keys, q, head), q.num_keys, head_dim, mean);
    pack(Source(q.x, q, head), head_dim, mean, factor, query);
    if (!own_keys) pack(Source(q.keys, q, head), head_dim, mean, factor, key);
    if (!own_values) pack(Source(q.values, q, head), head_dim, nullptr, 1.0f, value);
  }
};

// gka_scratch_float32 for each phase.
int64_t forward_scratch(const GkaRequest& q);
int64_t backward_scratch(const GkaRequest& q);

// Numbers of scratch that a part of a head takes.
template <typename Kernel>
inline int64_t slot_size_of(const GkaRequest& q, const Plan& plan) {
  Arena arena{nullptr};
  Kernel kernel(q, plan, arena);
  return arena.used;
}

// Call work(keys, queries) for every block of K in which a query of `part` sees a key, always in one order.
template <typename Work>
inline void each_block(const Plan& plan, const Head& head, int64_t part, Work work) {
  for (int64_t c = part * plan.block; c < head.query.count; c += plan.parts * plan.block) {
    const Range queries{c, std::min(c + plan.block, head.query.count)};
    const int64_t last = unit_of(queries.end - 1);
    const Range seen = Range{head.reach.keys(c).begin, head.reach.keys(last).end}.within({0, head.key.count});
    for (int64_t r = seen.begin; r < seen.end; r += plan.keys)
      work(Range{r, std::min(r + plan.keys, seen.end)}, queries);
  }
}

// Call run(q, plan, head, part, slot) for the parts of all heads, and finish(q, plan, head, tokens, slot, slot_size)
// for a head when its parts are done. The result depends on the plan, not on which thread computes a part.
template <typename Run, typename Finish>
inline void in_parallel(const GkaRequest& q, const Plan& plan, float* scratch, int64_t slot_size, int64_t tokens,
                        Run run, Finish finish) {
  constexpr int64_t PIECE = 64;
  const int64_t pieces = (tokens + PIECE - 1) / PIECE, parts = plan.parts;
#pragma omp parallel num_threads(std::min<int64_t>(q.threads, plan.tasks()))
  {
    FlushDenormals flush;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < plan.tasks(); task++) {
      float* slot = scratch + (parts > 1 ? task : omp_get_thread_num()) * slot_size;
      run(q, plan, task / parts, task % parts, slot);
      if (parts == 1) finish(q, plan, task, Range{0, tokens}, slot, slot_size);
    }
    if (parts > 1) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < plan.heads * pieces; i++) {
        const int64_t head = i / pieces, begin = i % pieces * PIECE;
        Range piece{begin, std::min(begin + PIECE, tokens)};
        finish(q, plan, head, piece, scratch + head * parts * slot_size, slot_size);
      }
    }
  }
}

}  // namespace gka

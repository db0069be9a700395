// Decoding: a few queries against a cache of keys. Reading the cache takes the time, so each token is read once: a
// group of as many tokens as a register has lanes is scored together, and mixed while it is in the L1 cache.
//
// Distances are taken from differences, so nothing cancels and no norms are needed.
#include "decode_group.h"
#include "few.h"

namespace {

using namespace gka;

constexpr int64_t SMALLEST_PART = 4 * KEYS;  // tokens that are worth a thread
constexpr int64_t LARGEST_PART = 1024;       // tokens that are added up one group after another: rounding errors grow

// The work in parts: each has some groups of keys of some sequences, in the order of memory. A sequence that several
// parts share has a running result in each of them: mixed channels, a register of row sums, and the largest score.
struct Parts {
  const GkaRequest& q;
  float* memory;
  int64_t channels, row, results, total = 0, threads, parts;

  Parts(const GkaRequest& q, float* memory)
      : q(q), memory(memory), channels(round_up(q.head_dim, 16)), row(channels + 32),
        results(q.num_heads * q.num_queries) {
    for (int64_t b = 0; b < q.batch; b++) total += groups(b);
    threads = std::max<int64_t>(1, std::min<int64_t>(q.threads, total * KEYS / SMALLEST_PART));
    parts = threads * (1 + total * KEYS / (threads * LARGEST_PART));
  }
  int64_t length(int64_t b) const { return q.lengths ? q.lengths[b] : q.num_keys; }
  int64_t first(int64_t b) const {  // the first token that a query sees
    return q.before < 0 ? 0 : std::max<int64_t>(0, length(b) - q.num_queries - q.before);
  }
  int64_t groups(int64_t b) const { return (length(b) - first(b) + KEYS - 1) / KEYS; }
  int64_t begin(int64_t part) const { return total * part / parts; }
  // Part and sequence never both go back, so their sum numbers the pairs.
  int64_t scratch() const { return (q.batch + parts) * results * row + q.batch * results * channels + 2 * q.num_heads; }
  float* running(int64_t b, int64_t part, int64_t result) const {
    return memory + ((b + part) * results + result) * row;
  }
  float* query(int64_t b, int64_t result) const {
    return memory + (q.batch + parts) * results * row + (b * results + result) * channels;
  }

  // (H,), of a squared distance in log2 K
  double* factors() const { return reinterpret_cast<double*>(query(q.batch, 0)); }

  // Call work(sequence, groups of it) for all that `part` has.
  template <typename Work>
  void each_sequence(int64_t part, Work work) const {
    for (int64_t b = 0, before = 0; b < q.batch; before += groups(b), b++) {
      const Range mine = Range{begin(part) - before, begin(part + 1) - before}.within({0, groups(b)});
      if (!mine.empty()) work(b, mine);
    }
  }
};

// log2 K of a query and the keys of a group, one score in each lane. CHANNELS: how many there are, or 0 if that is not
// known at compile time; if it is, the query stays in registers.
template <int64_t CHANNELS>
GKA_INLINE Vector scores_of(const float* x, const Group& keys, float factor) {
  constexpr int64_t L = Vector::LANES;
  const int64_t channels = CHANNELS ? CHANNELS : keys.channels;
  Vector squares[KEYS];
  for (int64_t n = keys.count; n < KEYS; n++) squares[n] = Vector::all(0.0f);
  for (int64_t n = 0; n < keys.count; n++) {
    const float* key = keys.row(n);
    keys.next.prefetch(n, keys.next.derived, keys.next.compared);
    const Vector scale = Vector::all(-keys.scale[n]);
    Vector sum[2] = {Vector::all(0.0f), Vector::all(0.0f)};
    GKA_UNROLL for (int64_t d = 0; d < channels; d += L) {
      const Vector a = fma(scale, Vector::load(key + d), Vector::load(x + d));
      sum[d / L % 2] = fma(a, a, sum[d / L % 2]);
    }
    squares[n] = sum[0] + sum[1];
  }
  return sums(squares) * Vector::all(factor);
}

GKA_INLINE Vector scores(const float* x, const Group& keys, float factor) {
  if (keys.channels == 128) return scores_of<128>(x, keys, factor);
  return keys.channels == 64 ? scores_of<64>(x, keys, factor) : scores_of<0>(x, keys, factor);
}

// Add the values of some tokens to WIDE registers of channels.
template <int WIDE>
GKA_INLINE void mix(const float* weights, const Group& values, Range seen, int64_t d, float* mixed) {
  constexpr int64_t L = Vector::LANES;
  Vector sum[WIDE];
  const float* value = values.row(seen.begin) + d;
  GKA_UNROLL for (int v = 0; v < WIDE; v++) sum[v] = Vector::all(weights[seen.begin]) * Vector::load(value + v * L);
  if (d == 0) values.next.prefetch(seen.begin, values.next.compared, values.next.bytes);
  for (int64_t n = seen.begin + 1; n < seen.end; n++) {
    value += values.apart;
    if (d == 0) values.next.prefetch(n, values.next.compared, values.next.bytes);
    const Vector weight = Vector::all(weights[n]);
    GKA_UNROLL for (int v = 0; v < WIDE; v++) sum[v] = fma(weight, Vector::load(value + v * L), sum[v]);
  }
  GKA_UNROLL for (int v = 0; v < WIDE; v++) (Vector::load(mixed + d + v * L) + sum[v]).store(mixed + d + v * L);
}

// Add the tokens of a group that a query sees to its running result.
GKA_INLINE void add(Vector score, const Group& values, Range seen, float* mixed) {
  constexpr int64_t L = Vector::LANES;
  const int64_t channels = values.channels;
  float *sum = mixed + channels, &top = mixed[channels + L];
  const float peak = score.keep(seen.begin, seen.end - 1, Vector::all(LOWEST)).max();
  if (peak > top) {
    const Vector factor = Vector::all(std::exp2(top - peak));
    for (int64_t d = 0; d < channels + L; d += L) (Vector::load(mixed + d) * factor).store(mixed + d);
    top = peak;
  }
  alignas(64) float weights[KEYS];
  const Vector weight = exp2(score - Vector::all(top)).keep(seen.begin, seen.end - 1, Vector::all(0.0f));
  weight.store(weights);
  (Vector::load(sum) + weight).store(sum);
  int64_t d = 0;
  for (; d + 8 * L <= channels; d += 8 * L) mix<8>(weights, values, seen, d, mixed);
  for (; d + 4 * L <= channels; d += 4 * L) mix<4>(weights, values, seen, d, mixed);
  for (; d < channels; d += L) mix<1>(weights, values, seen, d, mixed);
}

// The running result of a query that sees only these tokens, in double: rounding errors do not average out (few.cpp).
void decode_few(const float* x, const Group& keys, const Group& values, double factor, Range seen, float* mixed) {
  constexpr int64_t L = Vector::LANES;
  const int64_t channels = keys.channels;
  double scores[KEYS], top = -INFINITY, sum = 0.0, y[MAX_CHANNELS] = {};
  for (int64_t n = seen.begin; n < seen.end; n++) {
    const float* key = keys.row(n);
    scores[n] = factor * sum_of(channels, [&](int64_t d) {
      const double apart = double(x[d]) - double(keys.scale[n]) * double(key[d]);
      return apart * apart;
    });
    top = std::max(top, scores[n]);
  }
  for (int64_t n = seen.begin; n < seen.end; n++) {
    const double weight = std::exp2(scores[n] - top);
    sum += weight;
    for (int64_t d = 0; d < channels; d++) y[d] += weight * double(values.row(n)[d]);
  }
  for (int64_t d = 0; d < channels; d++) mixed[d] = float(y[d] / sum);
  std::fill(mixed + channels, mixed + channels + L, 0.0f);
  mixed[channels] = 1.0f, mixed[channels + L] = 0.0f;  // the sum of weights, and the largest score
}

template <typename T, typename Table>
struct Decode {
  const GkaRequest& q;
  const Parts plan;
  const bool derived, own_values;  // own_values: a key is the value of its token

  Decode(const GkaRequest& q, float* scratch)
      : q(q), plan(q, scratch), derived(q.cos), own_values(!derived && q.keys.data == q.values.data) {}

  void prepare() const {
    for (int64_t h = 0; h < q.num_heads; h++) plan.factors()[h] = -0.5 * LOG2_E * inverse_variance(q, h);
    for (int64_t b = 0; b < q.batch; b++) pack_queries(b);
  }
  void pack_queries(int64_t b) const {  // padded with zeros
    for (int64_t result = 0; result < plan.results; result++) {
      const T* x = Rows<T>(q.x, b, result / q.num_queries, nullptr).row(result % q.num_queries);
      for (int64_t d = 0; d < plan.channels; d += Vector::LANES)
        channels_from(x, d, q.head_dim).store(plan.query(b, result) + d);
    }
  }

  void run(int64_t part) const {
    Group key(q.head_dim), value(q.head_dim);
    plan.each_sequence(part, [&](int64_t b, Range groups) {
      for (int64_t result = 0; result < plan.results; result++) {
        float* mixed = plan.running(b, part, result);
        std::fill(mixed, mixed + plan.channels + Vector::LANES, 0.0f);
        mixed[plan.channels + Vector::LANES] = LOWEST;
      }
      for (int64_t group = groups.begin; group < groups.end; group++)
        for (int64_t h = 0; h < q.num_heads; h++) run_group(b, part, h, plan.first(b) + group * KEYS, key, value);
    });
  }

  // The same tokens two heads further on; behind the last head come later tokens of the first ones.
  Next next(const Rows<T>& values, int64_t h, int64_t j) const {
    constexpr int64_t AHEAD = 2, BYTES = sizeof(T);
    const int64_t head = (h + AHEAD) % q.num_heads, later = (h + AHEAD) / q.num_heads * KEYS;
    const T* row = values.data + (head - h) * q.values.head + (j + later) * values.apart;
    const int64_t bytes = q.head_dim * BYTES, half = bytes / 2;
    const char* from = reinterpret_cast<const char*>(row);
    return {from, values.apart * BYTES, derived ? half : 0, derived ? bytes : half, bytes};
  }

  template <bool SCALED>
  GKA_INLINE void derive(Group& key, const Rows<T>& source, int64_t h, int64_t j, int64_t count) const {
    if (q.head_dim == 128) key.template derive<64, SCALED, Table>(source, q, h, j, count);
    else if (q.head_dim == 64) key.template derive<32, SCALED, Table>(source, q, h, j, count);
    else key.template derive<0, SCALED, Table>(source, q, h, j, count);
  }

  void run_group(int64_t b, int64_t part, int64_t h, int64_t j, Group& key, Group& value) const {
    const int64_t count = std::min(KEYS, plan.length(b) - j), shift = plan.length(b) - q.num_queries;
    const Rows<T> values(q.values, b, h, q.value_delays);
    value.read(values, j, count, q.head_dim);
    key.next = value.next = next(values, h, j);
    const Group* keys = &key;
    if (derived) {
      const Rows<T> source(q.values, b, h, q.key_delays);
      if (q.channel_scales) derive<true>(key, source, h, j, count);
      else derive<false>(key, source, h, j, count);
    } else {
      const Rows<T> source(q.keys, b, h, q.key_delays);
      if (own_values && source.delay == values.delay) keys = &value;
      else key.read(source, j, count, q.head_dim);
    }
    for (int64_t i = 0; i < q.num_queries; i++) {
      const int64_t first = q.before < 0 ? 0 : i + shift - q.before;
      const int64_t end = q.after < 0 ? plan.length(b) : i + shift + q.after + 1;
      const Range seen = Range{first - j, end - j}.within({0, count});
      if (seen.empty()) continue;
      const int64_t result = h * q.num_queries + i;
      const float* x = plan.query(b, result);
      const double factor = plan.factors()[h];
      float* mixed = plan.running(b, part, result);
      if (plan.groups(b) == 1) decode_few(x, *keys, value, factor, seen, mixed);
      else add(scores(x, *keys, float(factor)), value, seen, mixed);
    }
  }

  // y of a query from the running results of all parts that share its sequence.
  void finish(int64_t b, int64_t result) const {
    constexpr int64_t L = Vector::LANES;
    int64_t before = 0;
    for (int64_t earlier = 0; earlier < b; earlier++) before += plan.groups(earlier);
    float top = LOWEST, y[MAX_CHANNELS] = {};
    Vector sum = Vector::all(0.0f);
    auto each_part = [&](auto work) {
      for (int64_t part = 0; part < plan.parts; part++)
        if (plan.begin(part) < before + plan.groups(b) && plan.begin(part + 1) > before)
          work(plan.running(b, part, result));
    };
    each_part([&](const float* mixed) { top = std::max(top, mixed[plan.channels + L]); });
    each_part([&](const float* mixed) {
      const Vector share = Vector::all(std::exp2(mixed[plan.channels + L] - top));
      sum = fma(share, Vector::load(mixed + plan.channels), sum);
      for (int64_t d = 0; d < plan.channels; d += L)
        fma(share, Vector::load(mixed + d), Vector::load(y + d)).store(y + d);
    });
    const float total = sum.sum();
    T* to = Rows<T>(q.y, b, result / q.num_queries, nullptr).row(result % q.num_queries);
    for (int64_t d = 0; d < q.head_dim; d++) write(to + d, y[d] / total);
  }
};

template <typename T, typename Table>
void decode(const GkaRequest& q, float* scratch) {
  const Decode<T, Table> decode(q, scratch);
  decode.prepare();
#pragma omp parallel num_threads(decode.plan.threads)
  {
    FlushDenormals flush;
#pragma omp for schedule(static)
    for (int64_t part = 0; part < decode.plan.parts; part++) decode.run(part);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < q.batch * decode.plan.results; task++)
      decode.finish(task / decode.plan.results, task % decode.plan.results);
  }
}

}  // namespace

int64_t gka_scratch_decode(const GkaRequest* request) { return Parts(*request, nullptr).scratch(); }

void gka_decode(const GkaRequest* request, float* scratch) {
  const GkaRequest& q = *request;
  if (q.half) q.half_tables ? decode<uint16_t, uint16_t>(q, scratch) : decode<uint16_t, float>(q, scratch);
  else q.half_tables ? decode<float, uint16_t>(q, scratch) : decode<float, float>(q, scratch);
}

// Decoding: a few queries against a cache of keys, which is bound by reading it. Distances are taken from differences,
// so nothing cancels and no norms are needed; each key is read once, a few at a time, and mixed while it is in the L1
// cache. Sequences are cut into parts where there are fewer of them than threads.
#include "head.h"

namespace {

using namespace gka;

constexpr int64_t KEYS = 16;          // that are read together
constexpr int64_t SMALLEST_PART = 64;  // keys that are worth a task

struct Decode {
  const GkaRequest& q;
  Reach reach;
  int64_t parts, part_keys, channels, row;  // row: numbers of a running result: channels, sum, top

  explicit Decode(const GkaRequest& q) : q(q), reach(q), channels(round_up(q.head_dim, 16)), row(channels + 16) {
    parts = std::min((q.threads + q.batch - 1) / q.batch, (q.num_keys + SMALLEST_PART - 1) / SMALLEST_PART);
    part_keys = round_up((q.num_keys + parts - 1) / parts, KEYS);
    parts = (q.num_keys + part_keys - 1) / part_keys;
  }
  int64_t results() const { return q.num_heads * q.num_queries; }  // of a sequence
  int64_t scratch() const { return q.batch * (parts + 1) * results() * row; }
  float* running(int64_t batch, int64_t part, int64_t h, int64_t i) const {
    return q.scratch + ((batch * (parts + 1) + part) * results() + h * q.num_queries + i) * row;
  }
  float* query(int64_t batch, int64_t h, int64_t i) const { return running(batch, parts, h, i); }  // padded with zeros

  GKA_INLINE Vector channel(const float* token, int64_t d) const { return load_channels(token, d, q.head_dim); }

  // log2 K of the keys from j on, minus infinity for those that query i does not see. Returns the largest.
  float scores(const float* x, const Source& keys, int64_t j, int64_t count, int64_t i, float factor,
               float* score) const {
    constexpr int64_t L = Vector::LANES;
    float top = LOWEST;
    for (int64_t n = 0; n < KEYS; n++) score[n] = -INFINITY;
    for (int64_t n = 0; n < count; n++) {
      const int64_t place = i + reach.shift;
      if (j + n < place - reach.before || j + n > place + reach.after) continue;
      const float* key = keys.row(j + n);
      Vector even = Vector::all(0.0f), odd = even;
      int64_t d = 0;
      for (; d + 2 * L <= q.head_dim; d += 2 * L) {
        Vector a = Vector::load(x + d) - Vector::load(key + d), b = Vector::load(x + d + L) - Vector::load(key + d + L);
        even = fma(a, a, even), odd = fma(b, b, odd);
      }
      for (; d < channels; d += L) {
        Vector a = Vector::load(x + d) - channel(key, d);
        even = fma(a, a, even);
      }
      const float e = (even + odd).sum() * factor;
      score[n] = e < LOWEST ? LOWEST : e;
      if (!(score[n] <= top)) top = score[n];  // NaN too
    }
    return top;
  }

  // Add some keys to the running result of a query.
  void add(const float* score, float found, const Source& values, int64_t j, int64_t count, float* mixed) const {
    constexpr int64_t L = Vector::LANES, WIDE = 4;
    float &sum = mixed[channels], &top = mixed[channels + 1];
    if (!(found <= top)) {
      const float factor = std::exp2(top - found);
      for (int64_t d = 0; d < channels; d++) mixed[d] *= factor;
      sum *= factor, top = found;
    }
    float weights[KEYS];
    Vector total = Vector::all(0.0f);
    for (int64_t n = 0; n < KEYS; n += L) {
      Vector weight = exp2(Vector::load(score + n) - Vector::all(top));
      weight.store(weights + n);
      total = total + weight;
    }
    sum += total.sum();
    int64_t d = 0;
    for (; d + WIDE * L <= q.head_dim; d += WIDE * L) {
      Vector acc[WIDE];
      GKA_UNROLL for (int v = 0; v < WIDE; v++) acc[v] = Vector::load(mixed + d + v * L);
      for (int64_t n = 0; n < count; n++) {
        const float* value = values.row(j + n) + d;
        const Vector weight = Vector::all(weights[n]);
        GKA_UNROLL for (int v = 0; v < WIDE; v++) acc[v] = fma(weight, Vector::load(value + v * L), acc[v]);
      }
      GKA_UNROLL for (int v = 0; v < WIDE; v++) acc[v].store(mixed + d + v * L);
    }
    for (; d < channels; d += L) {
      Vector acc = Vector::load(mixed + d);
      for (int64_t n = 0; n < count; n++) acc = fma(Vector::all(weights[n]), channel(values.row(j + n), d), acc);
      acc.store(mixed + d);
    }
  }

  void run(int64_t batch, int64_t part) const {
    for (int64_t h = 0; h < q.num_heads; h++)
      for (int64_t i = 0; i < q.num_queries; i++) {
        float* mixed = running(batch, part, h, i);
        std::fill(mixed, mixed + channels + 1, 0.0f);
        mixed[channels + 1] = LOWEST;
      }
    const int64_t end = std::min((part + 1) * part_keys, q.num_keys);
    float score[KEYS];
    for (int64_t j = part * part_keys; j < end; j += KEYS)
      for (int64_t h = 0; h < q.num_heads; h++) {
        const int64_t head = batch * q.num_heads + h, count = std::min(KEYS, end - j);
        const Source keys(q.keys, q, head), values(q.values, q, head);
        const float factor = -0.5f * LOG2_E * inverse_variance(q, head);
        for (int64_t i = 0; i < q.num_queries; i++) {
          const float found = scores(query(batch, h, i), keys, j, count, i, factor, score);
          add(score, found, values, j, count, running(batch, part, h, i));
        }
      }
  }

  // y of a query from the running results of all parts.
  void finish(int64_t batch, int64_t h, int64_t i) const {
    float top = LOWEST, sum = 0.0f;
    for (int64_t part = 0; part < parts; part++) {
      const float found = running(batch, part, h, i)[channels + 1];
      if (!(found <= top)) top = found;
    }
    float* y = Source(q.y, q, batch * q.num_heads + h).writable(i);
    std::fill(y, y + q.head_dim, 0.0f);
    for (int64_t part = 0; part < parts; part++) {
      const float *mixed = running(batch, part, h, i), factor = std::exp2(mixed[channels + 1] - top);
      sum += factor * mixed[channels];
      for (int64_t d = 0; d < q.head_dim; d++) y[d] += factor * mixed[d];
    }
    for (int64_t d = 0; d < q.head_dim; d++) y[d] /= sum;
  }
};

}  // namespace

int64_t gka::decode_scratch(const GkaRequest& q) { return Decode(q).scratch(); }

void gka_decode_float32(const GkaRequest* request) {
  const GkaRequest& q = *request;
  const Decode decode(q);
  for (int64_t batch = 0; batch < q.batch; batch++)
    for (int64_t h = 0; h < q.num_heads; h++)
      for (int64_t i = 0; i < q.num_queries; i++) {
        float* padded = decode.query(batch, h, i);
        std::memcpy(padded, Source(q.x, q, batch * q.num_heads + h).row(i), q.head_dim * sizeof(float));
        std::fill(padded + q.head_dim, padded + decode.channels, 0.0f);
      }
#pragma omp parallel num_threads(std::min<int64_t>(q.threads, q.batch * decode.parts))
  {
    FlushDenormals flush;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < q.batch * decode.parts; task++) decode.run(task / decode.parts, task % decode.parts);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < q.batch * decode.results(); task++) {
      const int64_t result = task % decode.results();
      decode.finish(task / decode.results(), result / q.num_queries, result % q.num_queries);
    }
  }
}

int64_t gka_scratch_float32(const GkaRequest* request, int32_t phase) {
  if (phase == GKA_FORWARD) return gka::forward_scratch(*request);
  return phase == GKA_BACKWARD ? gka::backward_scratch(*request) : gka::decode_scratch(*request);
}

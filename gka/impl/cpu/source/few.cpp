// Queries that see at most FEW keys are computed in double: in sums of few terms rounding errors do not average out.
// Distances are taken from differences, and each number of the result is rounded once.
#include "few.h"

namespace {

using namespace gka;

constexpr int64_t PIECE = 64;  // tokens of a task

struct FewHead {
  const GkaRequest& q;
  Source x, keys, values;
  Reach reach;
  double inverse;  // 1 / sigma^2
  int64_t index;
  double* scratch;

  FewHead(const GkaRequest& q, int64_t index, double* scratch)
      : q(q), x(q.x, q, index), keys(q.keys, q, index), values(q.values, q, index), reach(q),
        inverse(inverse_variance(q, index)), index(index), scratch(scratch) {}
  Range seen(int64_t query) const { return reach.seen(query).within({0, q.num_keys}); }
  GkaRow& state(int64_t query) const { return static_cast<GkaRow*>(q.row_state)[index * q.num_queries + query]; }
  // Backward: W and M of the keys that a query sees.
  double* weights(int64_t query) const { return scratch + (index * q.num_queries + query) * 2 * FEW; }
  double* pulls(int64_t query) const { return weights(query) + FEW; }
};

// Exponents of the keys that a query sees, K relative to the largest of them (own keys: to K_ii), and the row's sum.
struct Row {
  Range seen;
  double exponent[FEW], k[FEW], top = 0.0, sum = 0.0;

  Row(const FewHead& head, int64_t query) : seen(head.seen(query)) {
    const float* x = head.x.row(query);
    for (int64_t j = seen.begin; j < seen.end; j++) {
      const float* key = head.keys.row(j);
      const double distance2 = sum_of(head.q.head_dim, [&](int64_t d) {
        const double apart = double(x[d]) - double(key[d]);
        return apart * apart;
      });
      exponent[j - seen.begin] = -0.5 * head.inverse * distance2;
    }
    if (!head.q.own_keys && !seen.empty()) top = *std::max_element(exponent, exponent + seen.end - seen.begin);
    for (int64_t j = 0; j < seen.end - seen.begin; j++) sum += k[j] = std::exp(exponent[j] - top);
  }
};

void write(const double* from, float* to, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d++) to[d] = float(from[d]);
}

void forward(const FewHead& head, int64_t query) {
  const GkaRequest& q = head.q;
  const Row row(head, query);
  double mixed[MOST_CHANNELS] = {};
  for (int64_t j = row.seen.begin; j < row.seen.end; j++) {
    const float* value = head.values.row(j);
    for (int64_t d = 0; d < q.head_dim; d++) mixed[d] += row.k[j - row.seen.begin] * double(value[d]);
  }
  const double total = row.sum + (q.own_keys ? double(q.eps) : 0.0);
  for (int64_t d = 0; d < q.head_dim; d++) mixed[d] /= total;
  write(mixed, Source(q.y, q, head.index).row(query), q.head_dim);
  head.state(query) = {q.own_keys ? total : row.top * LOG2_E, 0.0};  // nothing cancels here, nothing is centred
}

// W and M of a query. Returns its sum of M times exponents.
double pull(const FewHead& head, int64_t query) {
  const GkaRequest& q = head.q;
  const Row row(head, query);
  const float* gradient = Source(q.grad_y, q, head.index).row(query);
  const double total = q.own_keys ? head.state(query).level : row.sum;
  double *w = head.weights(query), *m = head.pulls(query), delta = 0.0, moment = 0.0;
  const int64_t count = row.seen.end - row.seen.begin;
  for (int64_t j = 0; j < count; j++) {
    const float* value = head.values.row(row.seen.begin + j);
    w[j] = row.k[j] / total;
    m[j] = sum_of(q.head_dim, [&](int64_t d) { return double(value[d]) * double(gradient[d]); });
    delta += w[j] * m[j];
  }
  for (int64_t j = 0; j < count; j++) m[j] = w[j] * (m[j] - delta), moment += m[j] * row.exponent[j];
  return moment;
}

// Gradients of a token as query, as key and as value; roles that share a tensor share the sum.
void differentiate(const FewHead& head, int64_t token) {
  const GkaRequest& q = head.q;
  const Source grad_y(q.grad_y, q, head.index);
  double of_query[MOST_CHANNELS] = {}, of_key[MOST_CHANNELS] = {}, of_value[MOST_CHANNELS] = {};
  double* to_key = q.own_keys ? of_query : of_key;
  double* to_value = q.own_values ? to_key : of_value;
  auto move = [&](double* sum, double pull, const float* from, const float* to) {
    for (int64_t d = 0; d < q.head_dim; d++) sum[d] += head.inverse * pull * (double(to[d]) - double(from[d]));
  };
  if (token < q.num_queries) {
    const Range seen = head.seen(token);
    for (int64_t j = seen.begin; j < seen.end; j++)
      move(of_query, head.pulls(token)[j - seen.begin], head.x.row(token), head.keys.row(j));
  }
  const Range seen_by = token < q.num_keys ? head.reach.seen_by(token).within({0, q.num_queries}) : Range{0, 0};
  for (int64_t i = seen_by.begin; i < seen_by.end; i++) {
    const int64_t j = token - head.seen(i).begin;
    const double weight = head.weights(i)[j];
    const float* gradient = grad_y.row(i);
    move(to_key, head.pulls(i)[j], head.keys.row(token), head.x.row(i));
    for (int64_t d = 0; d < q.head_dim; d++) to_value[d] += weight * double(gradient[d]);
  }
  if (token < q.num_queries) write(of_query, Source(q.dx, q, head.index).row(token), q.head_dim);
  if (token >= q.num_keys) return;
  if (!q.own_keys) write(of_key, Source(q.dkeys, q, head.index).row(token), q.head_dim);
  if (!q.own_values) write(of_value, Source(q.dvalues, q, head.index).row(token), q.head_dim);
}

// Call work(head, token, task) for all tokens of all heads, a task of several at a time.
template <typename Work>
void each_token(const GkaRequest& q, int64_t tokens, double* scratch, Work work) {
  const int64_t pieces = (tokens + PIECE - 1) / PIECE, tasks = q.batch * q.num_heads * pieces;
#pragma omp parallel for schedule(static) num_threads(std::max<int64_t>(1, std::min<int64_t>(q.threads, tasks)))
  for (int64_t task = 0; task < tasks; task++) {
    const FewHead head(q, task / pieces, scratch);
    const int64_t begin = task % pieces * PIECE;
    for (int64_t token = begin; token < std::min(begin + PIECE, tokens); token++) work(head, token, task);
  }
}

int64_t tasks_of(const GkaRequest& q) { return q.batch * q.num_heads * ((q.num_queries + PIECE - 1) / PIECE); }
int64_t numbers_of_weights(const GkaRequest& q) { return q.batch * q.num_heads * q.num_queries * 2 * FEW; }

}  // namespace

int64_t gka::few_scratch(const GkaRequest& q, int32_t phase) {
  return phase == GKA_FORWARD ? 0 : 2 * (numbers_of_weights(q) + tasks_of(q));
}

float gka::forward_of_few(const GkaRequest& q) {
  each_token(q, q.num_queries, nullptr, [](const FewHead& head, int64_t query, int64_t) { forward(head, query); });
  return 0.0f;  // of |x|^2 / sigma^2, which is not expanded here: nothing is lost
}

void gka::backward_of_few(const GkaRequest& q, float* scratch) {
  double* const weights = reinterpret_cast<double*>(scratch);
  double* const moments = weights + numbers_of_weights(q);
  std::fill(moments, moments + tasks_of(q), 0.0);
  each_token(q, q.num_queries, weights, [&](const FewHead& head, int64_t query, int64_t task) {
    moments[task] += pull(head, query);
  });
  each_token(q, std::max(q.num_queries, q.num_keys), weights, [](const FewHead& head, int64_t token, int64_t) {
    differentiate(head, token);
  });
  add_up_dlog_sigma(q, -2.0, moments, (q.num_queries + PIECE - 1) / PIECE);
}

// One head in the backward pass: its gradients, the sums that M needs or that are taken of M, and blocks of K and M.
#pragma once
#include "tiles.h"

namespace gka {

// The mean exponent of a row in self-attention, weighted by K. dlog_sigma needs sum_j M_ij e_ij. The sum of M over a
// row is nearly 0 but has a rounding error, which large exponents would multiply: subtracting their mean first avoids
// that. Where K_ii = 1 is most of the row, less is subtracted: M_ii has about three times the rounding error of delta,
// and the exponent 0 of K_ii keeps it out of the sum.
inline float usual_exponent(double row_sum, double moment) {
  constexpr double OWN = 3.0 * 3.0;
  return float(moment * row_sum / (row_sum * row_sum + OWN));
}

struct Backward : Head {
  Tokens grad;
  float *delta, *level, *k, *m;
  Sums dx, dkeys, dvalues;
  double *query_sum, *key_sum;       // of M
  double *weight, *pulled, *centre;  // of foreign keys: sums of 2^(exponent - level), of that times g.v and exponents
  double* dlog_sigma;                // sum of M times exponents
  float* usual;                      // of each query with own keys: `usual_exponent`
  double removed = 0.0;              // the part of *dlog_sigma that subtracting `usual` from the exponents removes
  int64_t totals, totals_end;        // where in the slot the sums lie

  Backward(const GkaRequest& q, const Plan& plan, Arena& arena) : Head(q, arena, true), grad(query) {
    grad.take(arena, true, false);
    delta = arena.take(query.padded);
    level = own_keys ? nullptr : arena.take(query.padded);
    usual = own_keys ? arena.take(query.padded) : nullptr;
    totals = arena.used;
    dlog_sigma = arena.take_doubles(1);
    query_sum = arena.take_doubles(query.padded);
    key_sum = own_keys ? query_sum : arena.take_doubles(key.padded);
    for (double** sum : {&weight, &pulled, &centre}) *sum = arena.take_doubles(own_keys ? 0 : query.padded);
    dx.take(arena, query, seen(key.count));
    if (own_keys) dkeys = dx;
    else dkeys.take(arena, key, seen(query.count));
    if (own_values) dvalues = dkeys;
    else dvalues.take(arena, key, seen(query.count));
    totals_end = arena.used;
    k = arena.take(plan.keys * block_stride(plan));
    m = arena.take(plan.keys * block_stride(plan));
  }

  void fill_gradients(const GkaRequest& q, int64_t index) {
    const Source from(q.grad_y, q, index), y(q.y, q, index);
    const GkaRow* states = static_cast<const GkaRow*>(q.row_state) + index * q.num_queries;
    const bool shifted = mean && own_values;
    for (int64_t i = 0; i < query.count; i++) {
      if (i + AHEAD < query.count) prefetch(from.row(i + AHEAD), head_dim), prefetch(y.row(i + AHEAD), head_dim);
      const Factor share(own_keys ? 1.0 / states[i].level : 1.0);
      Vector sum = Vector::all(0.0f);
      for (int64_t d = 0; d < grad.channels; d += Vector::LANES) {
        const Vector g = share.times(load_channels(from.row(i), d, head_dim));
        g.store(grad.row(i) + d);
        if (!own_keys) continue;
        const Vector mixed = load_channels(y.row(i), d, head_dim);
        sum = fma(g, shifted ? mixed - Vector::load(mean + d) : mixed, sum);
      }
      delta[i] = sum.sum();
      if (level) level[i] = float(states[i].level);
    }
    std::fill(grad.row(grad.count), grad.row(grad.padded), 0.0f);
    std::fill(delta + query.count, delta + query.padded, 0.0f);
    if (!own_keys) {
      std::fill(level + query.count, level + query.padded, 0.0f);
    } else {
      fill_usual(states, double(q.eps), shifted);
    }
    grad.fill_panels(head_dim, own_values ? 1.0f / factor : 1.0f);  // against the scaled panels of the values
  }

  // M of a query adds up to eps g.y. delta is g.(y - mean) if a mean was subtracted, so g.mean is added here.
  void fill_usual(const GkaRow* states, double eps, bool shifted) {
    double sums_of_m = 0.0, sums_of_k = 0.0, moments = 0.0;
    for (int64_t i = 0; i < query.count; i++) {
      Vector of_mean = Vector::all(0.0f);
      for (int64_t d = 0; shifted && d < grad.channels; d += Vector::LANES)
        of_mean = fma(Vector::load(grad.row(i) + d), Vector::load(mean + d), of_mean);
      const double sum_of_m = eps * double(delta[i] + of_mean.sum());
      sums_of_m += sum_of_m, sums_of_k += states[i].level, moments += states[i].moment;
      if (reach.symmetric) continue;
      usual[i] = usual_exponent(states[i].level, states[i].moment);
      removed += usual[i] * sum_of_m;
    }
    if (reach.symmetric) {  // an element of M stands for two queries, so all queries share one mean exponent
      const double count = double(query.count);
      const float common = usual_exponent(sums_of_k / count, moments / count);
      std::fill(usual, usual + query.count, common);
      removed = common * sums_of_m;
    }
    std::fill(usual + query.count, usual + query.padded, 0.0f);
  }
};

}  // namespace gka

// What the backward pass has of one head: its gradients, the sums that M needs and makes, and blocks of K and M.
#pragma once
#include "tiles.h"

namespace gka {

// The mean exponent of own keys, weighted by K: sums of M times exponents less that are free of what rounding leaves of
// the sum of M, which is nearly 0. Where K_ii = 1 is most of the row it is less: the exponent 0 of K_ii keeps the
// rounding of M_ii out, about three times that of delta.
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
  double left = 0.0;                 // what taking it from all exponents takes from that sum
  int64_t totals, totals_end;        // where in the slot lies what is added up

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
    const GkaRow* kept = static_cast<const GkaRow*>(q.row_state) + index * q.num_queries;
    const bool shifted = mean && own_values;
    for (int64_t i = 0; i < query.count; i++) {
      if (i + AHEAD < query.count) prefetch(from.row(i + AHEAD), head_dim), prefetch(y.row(i + AHEAD), head_dim);
      const Factor share(own_keys ? 1.0 / kept[i].level : 1.0);
      Vector sum = Vector::all(0.0f);
      for (int64_t d = 0; d < grad.channels; d += Vector::LANES) {
        const Vector g = share.times(load_channels(from.row(i), d, head_dim));
        g.store(grad.row(i) + d);
        if (!own_keys) continue;
        const Vector mixed = load_channels(y.row(i), d, head_dim);
        sum = fma(g, shifted ? mixed - Vector::load(mean + d) : mixed, sum);
      }
      delta[i] = sum.sum();
      if (level) level[i] = float(kept[i].level);
    }
    std::fill(grad.row(grad.count), grad.row(grad.padded), 0.0f);
    std::fill(delta + query.count, delta + query.padded, 0.0f);
    if (!own_keys) {
      std::fill(level + query.count, level + query.padded, 0.0f);
    } else {
      fill_usual(kept, double(q.eps), shifted);
    }
    grad.fill_panels(head_dim, own_values ? 1.0f / factor : 1.0f);  // against the scaled panels of the values
  }

  // M of a query adds up to eps g.y, and delta is g.y, less what the mean that was subtracted has of it.
  void fill_usual(const GkaRow* kept, double eps, bool shifted) {
    double sums_of_m = 0.0, sums_of_k = 0.0, moments = 0.0;
    for (int64_t i = 0; i < query.count; i++) {
      Vector of_mean = Vector::all(0.0f);
      for (int64_t d = 0; shifted && d < grad.channels; d += Vector::LANES)
        of_mean = fma(Vector::load(grad.row(i) + d), Vector::load(mean + d), of_mean);
      const double sum_of_m = eps * double(delta[i] + of_mean.sum());
      sums_of_m += sum_of_m, sums_of_k += kept[i].level, moments += kept[i].moment;
      if (reach.symmetric) continue;
      usual[i] = usual_exponent(kept[i].level, kept[i].moment);
      left += usual[i] * sum_of_m;
    }
    if (reach.symmetric) {  // M has both of its queries in one number, so that all have the same
      const double count = double(query.count);
      const float common = usual_exponent(sums_of_k / count, moments / count);
      std::fill(usual, usual + query.count, common);
      left = common * sums_of_m;
    }
    std::fill(usual + query.count, usual + query.padded, 0.0f);
  }
};

}  // namespace gka

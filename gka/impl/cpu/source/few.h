// Requests whose queries see few keys, as in a short text or a narrow window. decode.cpp has its own version.
#pragma once
#include "head.h"

namespace gka {

constexpr int64_t FEW = 12, MOST_CHANNELS = 128;

// sum_d term(d), eight at a time for the compiler's registers.
template <typename Term>
inline double sum_of(int64_t head_dim, Term term) {
  double sums[8] = {};
  int64_t d = 0;
  for (; d + 8 <= head_dim; d += 8)
    for (int64_t i = 0; i < 8; i++) sums[i] += term(d + i);
  for (; d < head_dim; d++) sums[0] += term(d);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

inline bool sees_few(const GkaRequest& q) {
  const Reach reach(q);
  return q.head_dim <= MOST_CHANNELS && std::min(q.num_keys, reach.before + reach.after + 1) <= FEW;
}

int64_t few_scratch(const GkaRequest& q, int32_t phase);
float forward_of_few(const GkaRequest& q);
void backward_of_few(const GkaRequest& q, float* scratch);

}  // namespace gka

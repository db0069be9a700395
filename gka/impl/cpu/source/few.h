// Requests whose queries see few keys each: a short text, a narrow window.
#pragma once
#include "head.h"

namespace gka {

constexpr int64_t FEW = 12, MOST_CHANNELS = 128;

inline bool sees_few(const GkaRequest& q) {
  const Reach reach(q);
  return std::min(q.num_keys, reach.before + reach.after + 1) <= FEW;
}

int64_t few_scratch(const GkaRequest& q, int32_t phase);
void forward_of_few(const GkaRequest& q);
void backward_of_few(const GkaRequest& q);

}  // namespace gka

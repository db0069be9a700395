// The C interface of decoding: a few queries against a cache of keys and values, forward only
// (gka/impl/cpu/decoding.py packs it). Every member has 8 bytes.
//
// Legend: B sequences, Tq queries, Tk tokens of the cache, H heads, D head_dim.
#pragma once
#include "request.h"

struct GkaDecode {
  GkaTensor x, keys, values, y;  // (B, Tq | Tk, H, D); keys are the values where equal, and not read with tables
  const void *cos, *sin;         // null, or (Tk or more, D / 2) side by side: keys are values, turned and normalised
  const float* channel_scales;   // (H, D), what the values are multiplied with before they are turned; null: nothing
  const int64_t* lengths;        // (B,) tokens that each sequence has of Tk, at least Tq; null: all
  const int64_t *key_delays, *value_delays;  // (H,) or null: token j stands for the key, the value of token j - delay
  const float* log_sigma;                    // (H,)
  int64_t batch, num_queries, num_keys, num_heads, head_dim;
  int64_t before, after;  // a query at i sees the tokens i - before .. i + after; -1: no limit
  int64_t half, half_tables;  // x, keys, values and y, or the tables, are bfloat16, else float32
  int64_t threads;
  double bound, eps;  // |log_sigma| is clamped to bound; eps is that of the norm
};

GKA_EXPORT int64_t gka_decode_scratch(const GkaDecode* request);  // numbers of scratch
GKA_EXPORT void gka_decode(const GkaDecode* request, float* scratch);  // with anything in it

// The C interface of decoding: a few queries against a cache of keys and values, forward only
// (gka/impl/cpu/decoding.py packs the arguments).
//
// Legend: B sequences, Tq queries, Tk tokens of the cache, H heads, D head_dim.
#pragma once
#include "request.h"

struct GkaDecode {
  GkaTensor x, keys, values, y;  // (B, Tq or Tk, H, D); with tables `keys` is not read
  const void *cos, *sin;         // (Tk or more, D / 2) tables, contiguous: keys are rotated, normalised values; or null
  const float* channel_scales;   // (H, D): the values are multiplied by it before they are rotated; null: by 1
  const int64_t* lengths;        // (B,) tokens of each sequence, Tq to Tk; null: Tk
  const int64_t *key_delays, *value_delays;  // (H,): the key (value) at place j is that of token j - delay; null: 0
  const float* log_sigma;                    // (H,)
  int64_t batch, num_queries, num_keys, num_heads, head_dim;
  int64_t before, after;      // the query at i sees the tokens i - before .. i + after; -1: no limit
  int64_t half, half_tables;  // x, keys, values and y (the tables) are bfloat16; 0: float32
  int64_t threads;
  double bound, eps;  // |log_sigma| is clamped to bound; eps is that of the RMS norm of rotated keys
};

GKA_EXPORT int64_t gka_size_of_GkaDecode();                            // in bytes
GKA_EXPORT int64_t gka_decode_scratch(const GkaDecode* request);       // float32 numbers of scratch
GKA_EXPORT void gka_decode(const GkaDecode* request, float* scratch);  // scratch is not initialised

// The C interface: what one call of the operator gives to a kernel (gka/impl/cpu/call.py fills it in).
//
// Legend: B batch, Tq queries, Tk keys, H heads, D head_dim. The same request serves every phase and dtype; a phase
// reads what it needs. Nothing is allocated and nothing is kept: memory belongs to the caller.
#pragma once
#include <cstdint>

// (B, T, H, D). Strides count numbers, not bytes; channels lie side by side.
struct GkaTensor {
  void* data;
  int64_t batch, token, head;
};

// What float32 keeps of a query: with own keys D_i + eps and the sum of K_ij log2 K_ij over j, which with a symmetric
// mask add up right over queries alone; with others log2 of the largest K, and 0.
struct GkaRow {
  double level, moment;
};

struct GkaRequest {
  GkaTensor x;                       // queries (B, Tq, H, D)
  GkaTensor keys, values;            // (B, Tk, H, D); equal to x, equal to the keys, where the two flags below say so
  GkaTensor y;                       // written by forward, read by backward
  GkaTensor grad_y;                  // read by backward
  GkaTensor dx, dkeys, dvalues;      // written by backward; dkeys and dvalues only where keys and values are not own
  GkaTensor rest;                    // bfloat16 alone: what rounding took from y; written by forward, unless null, for
                                     // backward
  const float* log_sigma;            // (H,)
  void* level;                       // written by forward for backward: in float32 a GkaRow for each query (B, H, Tq);
                                     // in bfloat16 a float, of own keys D_i + eps, of others log2 of the row sum
                                     // without the query's norm
  float* largest;                    // (1,), written by forward: the largest |x|^2 / sigma^2, in float32 after centring
  float* dlog_sigma;                 // (H,), written by backward
  float* scratch;                    // gka_scratch_* numbers, aligned to 64 bytes, with anything in them
  int64_t batch, num_queries, num_keys, num_heads, head_dim;
  int64_t before, after;             // a query at i sees the keys i - before .. i + after; -1: no limit
  float eps;                         // added to the row sums of own keys
  float bound;                       // |log_sigma| is clamped to it, with gradient 0 outside
  int32_t own_keys, own_values;      // the keys are x; the values are the keys
  int32_t centred;                   // subtract the mean of the keys, which distances do not see
  int32_t threads;                   // the result may depend on it in the last bits, and on nothing else
};

enum GkaPhase { GKA_FORWARD = 0, GKA_BACKWARD = 1 };

// One set of functions for each dtype of the features: gka_*_float32 here.
#define GKA_EXPORT extern "C" __attribute__((visibility("default")))
GKA_EXPORT int64_t gka_scratch_float32(const GkaRequest* request, int32_t phase);  // numbers of scratch
GKA_EXPORT void gka_forward_float32(const GkaRequest* request);
GKA_EXPORT void gka_backward_float32(const GkaRequest* request);

// In bfloat16: x, values, y, rest and the gradients are bfloat16, all else is float32. gka_ready_bfloat16 comes first:
// 0 if this machine cannot run the others, 1 if they run on AVX512-BF16, 2 on AMX, which `tiles` allows.
GKA_EXPORT int32_t gka_ready_bfloat16(int32_t tiles);
GKA_EXPORT int64_t gka_scratch_bfloat16(const GkaRequest* request, int32_t phase);
GKA_EXPORT void gka_forward_bfloat16(const GkaRequest* request);
GKA_EXPORT void gka_backward_bfloat16(const GkaRequest* request);

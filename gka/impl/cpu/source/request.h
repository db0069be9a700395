// The C interface: the arguments of one call of a kernel (gka/impl/cpu/call.py and decoding.py pack them).
//
// Legend: B batch, Tq queries, Tk keys, H heads, D head_dim. The same struct serves every phase and dtype; a phase
// reads the members that it needs. The library keeps nothing, and allocates a list of documents only: memory belongs to
// the caller.
// Decoding is a few queries against a cache of keys and values, forward only.
#pragma once
#include <cstdint>

// A tensor (B, T, H, D). Strides count numbers, not bytes; the channels of a token are contiguous.
struct GkaTensor {
  void* data;
  int64_t batch, token, head;
};

// Forward's state per query in float32, for backward. Self-attention: {sum_j K_ij + eps, sum_j K_ij log2 K_ij}; under a
// symmetric mask only the total of the second over all queries is right. Other keys: {max_j log2 K_ij, 0}.
struct GkaRow {
  double level, moment;
};

struct GkaRequest {
  GkaTensor x;                   // queries (B, Tq, H, D)
  GkaTensor keys, values;        // (B, Tk, H, D); the same as x, the same as the keys, where the two flags below say so
  GkaTensor y;                   // written by forward, read by backward
  GkaTensor grad_y;              // read by backward
  GkaTensor dx, dkeys, dvalues;  // written by backward; dkeys and dvalues only where the flags below are 0
  GkaTensor residual;            // bfloat16 only: y before rounding minus y; written by forward, unless null, and read
                                 // by backward
  const float* log_sigma;        // (H,)
  void* row_state;               // written by forward for backward, (B, H, Tq): in float32 a GkaRow; in bfloat16 a
                                 // float: sum_j K_ij + eps in self-attention, else log2 of the row sum without the
                                 // query's norm
  float* dlog_sigma;             // (H,), written by backward
  const int32_t* cu_seqlens;     // or null: B documents, of which b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1
                                 // of tensors (1, Tq, H, D), Tq being Tk; row_state is (H, tokens) for one after another
  const void *cos, *sin;         // decoding: (Tk or more, D / 2) tables, contiguous: keys are rotated, normalised
                                 // values, and `keys` is not read; or null
  const float* channel_scales;   // decoding: (H, D): values are multiplied by it before they are rotated; null: by 1
  const int64_t* lengths;        // decoding: (B,) tokens of each sequence, Tq to Tk; null: Tk
  const int64_t *key_delays, *value_delays;  // decoding: (H,): the key (value) at place j is that of token j - delay;
                                             // null: 0
  int64_t batch, num_queries, num_keys, num_heads, head_dim;
  int64_t before, after;         // the query at i sees the keys i - before .. i + after; -1: no limit
  float eps;                     // added to the row sums of self-attention; decoding: of the RMS norm of rotated keys
  float bound;                   // |log_sigma| is clamped to it; the gradient is 0 outside
  int32_t own_keys, own_values;  // the keys are x; the values are the keys
  int32_t centred;               // subtract the mean of the keys first: distances do not change
  int32_t half, half_tables;     // decoding: x, keys, values and y (the tables) are bfloat16; 0: float32
  int32_t threads;               // affects at most the last bits of a result
};

enum GkaPhase { GKA_FORWARD = 0, GKA_BACKWARD = 1 };

// One set of functions for each dtype of the features. scratch: gka_scratch_* float32 numbers, aligned to 64 bytes, not
// initialised. Forward returns the largest |x|^2 / sigma^2, in float32 after centring.
#define GKA_EXPORT extern "C" __attribute__((visibility("default")))
GKA_EXPORT int64_t gka_size_of_GkaRequest();  // in bytes, to be compared with the caller's
GKA_EXPORT int64_t gka_scratch_float32(const GkaRequest* request, int32_t phase);
GKA_EXPORT float gka_forward_float32(const GkaRequest* request, float* scratch);
GKA_EXPORT void gka_backward_float32(const GkaRequest* request, float* scratch);

// In bfloat16: x, values, y, residual and the gradients are bfloat16, all else is float32. Call gka_ready_bfloat16
// before the others: it returns 0 if this machine cannot run them, 1 if they run on AVX512-BF16, 2 if on AMX, which it
// uses only if `tiles` is not 0.
GKA_EXPORT int32_t gka_ready_bfloat16(int32_t tiles);
GKA_EXPORT int64_t gka_scratch_bfloat16(const GkaRequest* request, int32_t phase);
GKA_EXPORT float gka_forward_bfloat16(const GkaRequest* request, float* scratch);
GKA_EXPORT void gka_backward_bfloat16(const GkaRequest* request, float* scratch);

GKA_EXPORT int64_t gka_scratch_decode(const GkaRequest* request);  // float32 numbers, as above
GKA_EXPORT void gka_decode(const GkaRequest* request, float* scratch);

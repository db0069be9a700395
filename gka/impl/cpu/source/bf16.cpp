// How this machine multiplies bfloat16, and the scratch that its kernels take.
#include "request.h"

#if defined(__AVX512F__) && defined(__x86_64__)
#include "bf16_head.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

int32_t gka_ready_bfloat16(int32_t tiles) {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: the operating system saves tiles on demand
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 0;                     // avx512_bf16
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 30 & 1) || !(b >> 31 & 1)) return 0;  // avx512bw, avx512vl
  const bool amx = (d >> 22 & 1) && (d >> 24 & 1);                                             // amx_bf16, amx_tile
  gka::has_tiles = tiles && amx && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return gka::has_tiles ? 2 : 1;
}

int64_t gka_scratch_bfloat16(const GkaRequest* request, int32_t phase) {
  return phase == GKA_FORWARD ? gka::forward_scratch_bfloat16(*request) : gka::backward_scratch_bfloat16(*request);
}

#else
int32_t gka_ready_bfloat16(int32_t) { return 0; }
#endif

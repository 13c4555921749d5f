// Row-wise operations: RMSNorm, rotation angles, SwiGLU.
#pragma once
#include <math.h>

#include "simd.h"

namespace baton {

// out[0:n) = x * rsqrt(mean(x^2) + eps) * weight, rounded once to T; out is zero from n to `padded` (a multiple of W).
template <class T>
void rms_norm(const float* x, const float* weight, int n, int padded, float eps, typename T::elem* out) {
  vf sum[4] = {vzero(), vzero(), vzero(), vzero()};
  int j = 0;
  for (int i = 0; i < n; i += W, ++j) {
    const vf v = vload_n(x + i, n - i);
    sum[j & 3] = vfma(v, v, sum[j & 3]);
  }
  const float mean = vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3]))) / (float)n;
  const vf scale = vset(1.0f / sqrtf(mean + eps));
  for (int i = 0; i < padded; i += W)
    T::store(out + i, vmul(vmul(vload_n(x + i, n - i), scale), vload_n(weight + i, n - i)));
}

// cos and sin of position * inv_freq[i]; each row of `half` is padded to a multiple of W.
static inline void rotation(int64_t position, const float* inv_freq, int half, float* cos_out, float* sin_out) {
  for (int i = 0; i < half; ++i) {
    const float angle = (float)position * inv_freq[i];
    sincosf(angle, sin_out + i, cos_out + i);
  }
}

template <class T>
static inline vf silu(vf x) {
  return vdiv(x, vadd(vset(1.0f), vexp2<T>(vmul(x, vset(-1.4426950408889634f)))));
}

// The index of the largest of n values, the first of equals; -1 where a value is not finite.
static inline int64_t argmax(const float* x, int n) {
  constexpr int RUN = 1024;  // only the run that holds the largest is searched one by one
  float top = -INFINITY;
  int at = 0;
  vf finite = vzero();
  for (int r = 0; r < n; r += RUN) {
    const int end = r + RUN < n ? r + RUN : n;
    vf best = vset(-INFINITY);
    for (int i = r; i < end; i += W) {
      const vf v = vkeep(vload_n(x + i, end - i), end - i, vset(-INFINITY));
      best = vmax(best, v);
      finite = vfma(vload_n(x + i, end - i), vzero(), finite);
    }
    const float highest = vhmax(best);
    if (highest > top) top = highest, at = r;
  }
  if (vsum(finite) != 0.0f) return -1;
  while (x[at] != top) ++at;
  return at;
}

}  // namespace baton

/* float32 to 16 bits. -DTO=F16 or BF16, -DSATURATE.

The `_twice` loops also store the rounded number as a float32: what emulated arithmetic computes with
next. `wide` may be `from` itself. */

#include "formats.h"

void round_stochastic(const float *restrict from, TO *restrict to, int64_t count, uint32_t start,
                      uint32_t low, uint32_t high, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++)
    to[i] = NAME(stochastic_, TO)(from[i], hash(start + (uint32_t)i, low, high));
}

void round_stochastic_twice(const float *from, TO *restrict to, float *wide, int64_t count,
                            uint32_t low, uint32_t high, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    TO rounded = NAME(stochastic_, TO)(from[i], hash((uint32_t)i, low, high));
    to[i] = rounded;
    wide[i] = NAME(load_, TO)(rounded);
  }
}

void round_nearest_twice(const float *from, TO *restrict to, float *wide, int64_t count,
                         int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    TO rounded = NAME(nearest_, TO)(from[i]);
    to[i] = rounded;
    wide[i] = NAME(load_, TO)(rounded);
  }
}

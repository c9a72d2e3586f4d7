/* float32 to 16 bits, stochastically. -DTO=F16 or BF16, -DSATURATE. */

#include "formats.h"

void round_stochastic(const float *restrict from, TO *restrict to, int64_t count, uint32_t start,
                      uint32_t low, uint32_t high, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++)
    to[i] = NAME(stochastic_, TO)(from[i], hash(start + (uint32_t)i, low, high));
}

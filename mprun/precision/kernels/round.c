/* float32 to 16 bits. -DTO=F16 or BF16, -DSATURATE.

The `_twice` functions also store the rounded number as a float32: what emulated arithmetic computes
with next. `wide` may be `from` itself. */

#include "steps.h"

#ifdef SATURATE
#define SATURATES 1
#else
#define SATURATES 0
#endif

static void round_range(const void *given, int64_t start, int64_t stop) {
  Rounding job = *(const Rounding *)given;
  job.format = NAME(FORMAT_, TO);
  job.saturate = SATURATES;
  round_blocks(&job, start, stop);
}

void round_stochastic(const float *from, TO *to, int64_t count, uint32_t start, uint32_t low,
                      uint32_t high, int threads) {
  const uint32_t key[] = {low, high};
  Rounding job = {.from = from, .to = to, .key = key, .start = start};
  in_threads(round_range, &job, count, threads);
}

void round_stochastic_twice(const float *from, TO *to, float *wide, int64_t count, uint32_t low,
                            uint32_t high, int threads) {
  const uint32_t key[] = {low, high};
  Rounding job = {.from = from, .to = to, .wide = wide, .key = key};
  in_threads(round_range, &job, count, threads);
}

void round_nearest_twice(const float *from, TO *to, float *wide, int64_t count, int threads) {
  Rounding job = {.from = from, .to = to, .wide = wide};
  in_threads(round_range, &job, count, threads);
}

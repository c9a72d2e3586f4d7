/* The kernels of the wheel: every storage and rule, chosen while they run.

round.c and update.c are compiled for one combination of dtypes; there are hundreds. A wheel holds
this file instead. It is compiled for several LEVELs, the bits of a processor's vectors (0: any
processor's); Python knows which one to call. */

#include "steps.h"

#define AT_LEVEL(name, level) NAME(name##_, level)

static void round_range(const void *job, int64_t start, int64_t stop) {
  round_blocks(job, start, stop);
}

void AT_LEVEL(mprun_round, LEVEL)(const float *from, void *to, float *wide, int64_t count,
                                  uint32_t start, const uint32_t *key, int format, int saturate,
                                  int threads) {
  Rounding job = {from, to, wide, key, start, format, saturate};
  in_threads(round_range, &job, count, threads);
}

typedef struct {
  const Storage *as;
  Update update;
} Chosen;

static void update_range(const void *given, int64_t start, int64_t stop) {
  const Chosen *job = given;
  update_range_as(job->as, &job->update, start, stop);
}

void AT_LEVEL(mprun_update, LEVEL)(const Storage *as, void *param, const void *grad, void *first,
                                   void *second, void *remainder, float *first_scales,
                                   float *second_scales, const float *maps, int64_t count,
                                   uint32_t start, const float *hyper, const uint32_t *keys,
                                   int threads) {
  Chosen job = {as,
                {param, first, second, grad, remainder, first_scales, second_scales, maps, start,
                 hyper, keys}};
  in_threads(update_range, &job, count, threads);
}

#if LEVEL == 0

/* Which sources this was built from: Python compares it with those beside it. */
uint32_t mprun_sources(void) { return SOURCES; }

#endif

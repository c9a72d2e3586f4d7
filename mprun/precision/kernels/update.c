/* One optimizer step over a tensor: load, compute in float32, round once on the way back.

-DPARAM -DGRAD -DFIRST -DSECOND  how parameter, gradient and the two moments are stored
-DRULE_...    how parameters are rounded: NEAREST, STOCHASTIC, KAHAN or SPLIT
-DFIRST_...   how the first moment is: NEAREST or STOCHASTIC (the second one always is stochastic)
-DFORMULA     that of the optimizer, as steps.h calls it
-DHAS_FIRST, -DHAS_SECOND  whether there is such a moment; -DROOT: the second one is kept as its root

The compiler knows them all, and drops the branches of steps.h that are not taken. */

#include "steps.h"

static const Storage STORAGE = {
    .param = NAME(FORMAT_, PARAM),
    .grad = NAME(FORMAT_, GRAD),
    .formula = FORMULA,
#ifdef HAS_FIRST
    .first = NAME(FORMAT_, FIRST),
#endif
#ifdef HAS_SECOND
    .second = NAME(FORMAT_, SECOND),
#endif
#if defined(RULE_STOCHASTIC)
    .rule = STOCHASTIC,
#elif defined(RULE_KAHAN)
    .rule = KAHAN,
#elif defined(RULE_SPLIT)
    .rule = SPLIT,
#endif
#ifdef FIRST_STOCHASTIC
    .first_stochastic = 1,
#endif
#ifdef ROOT
    .root = 1,
#endif
#ifdef SATURATE
    .saturate = 1,
#endif
};

static void update_range(const void *job, int64_t start, int64_t stop) {
  update_range_as(&STORAGE, job, start, stop);
}

void update(void *param, const void *grad, void *first, void *second, void *remainder,
            float *first_scales, float *second_scales, const float *maps, int64_t count,
            uint32_t start, const float *hyper, const uint32_t *keys, int threads) {
  Update job = {param, first, second, grad, remainder, first_scales, second_scales, maps,
                start, hyper, keys};
  in_threads(update_range, &job, count, threads);
}

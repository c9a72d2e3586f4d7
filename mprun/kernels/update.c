/* One optimizer step over a tensor: load, compute in float32, round once on the way back.

-DPARAM -DGRAD -DFIRST -DSECOND  how parameter, gradient and the two moments are stored
-DRULE_...    how parameters are rounded: NEAREST, STOCHASTIC or KAHAN
-DFIRST_...   how the first moment is: NEAREST or STOCHASTIC (the second one always is stochastic)
-DOPTIMIZER_...  ADAMW, SGD, NESTEROV or RMSPROP; the formulas are those of mprun/optim, term by term
-DHAS_FIRST, -DHAS_SECOND  whether there is such a moment; -DROOT: the second one is kept as its root

`hyper` holds what the formula needs, its first entry the factor of the gradient; `keys` a pair of
words each for parameter, first and second moment. */

#include "formats.h"

void update(PARAM *restrict param, const GRAD *restrict grad, FIRST *restrict first,
            SECOND *restrict second, int16_t *restrict remainder, int64_t count, uint32_t start,
            const float *restrict hyper, const uint32_t *restrict keys, int threads) {
  const float factor = hyper[0], h1 = hyper[1], h2 = hyper[2], h3 = hyper[3], h4 = hyper[4],
              h5 = hyper[5], h6 = hyper[6], h7 = hyper[7], h8 = hyper[8];
  const uint32_t k0 = keys[0], k1 = keys[1], k2 = keys[2], k3 = keys[3], k4 = keys[4],
                 k5 = keys[5];
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const uint32_t index = start + (uint32_t)i;
#ifdef RULE_KAHAN
    float w = NAME(merge_, PARAM)(param[i], remainder[i]);
#else
    float w = NAME(load_, PARAM)(param[i]);
#endif
    float g = NAME(load_, GRAD)(grad[i]) * factor, m = 0.0f, v = 0.0f;
#ifdef HAS_FIRST
    m = NAME(load_, FIRST)(first[i]);
#endif
#ifdef HAS_SECOND
    v = NAME(load_, SECOND)(second[i]);
#ifdef ROOT
    v = v * v;
#endif
#endif

#if defined(OPTIMIZER_ADAMW)
    m = m * h1 + g * h2;
    v = v * h3 + (g * g) * h4;
    const float decay = number(choose((pattern(w) & MAGNITUDE) < INFINITE, pattern(w * h5), 0u));
    const float change = decay + h6 * (m / (sqrtf(v) * h7 + h8));
#elif defined(OPTIMIZER_SGD)
    g = g + w * h1;
    m = m * h2 + g * h4;
    const float change = h3 * m;
#elif defined(OPTIMIZER_NESTEROV)
    g = g + w * h1;
    m = m * h2 + g;
    const float change = h3 * (g + m * h2);
#elif defined(OPTIMIZER_RMSPROP)
    g = g + w * h1;
    v = v * h2 + (g * g) * h3;
    m = m * h4 + g / (sqrtf(v) + h5);
    const float change = h6 * m;
#endif
    const float old = w;
    w = old - change;

#if defined(RULE_KAHAN)
    int16_t rest;
    param[i] = NAME(split_, PARAM)(w, &rest);
    remainder[i] = rest;
#elif defined(RULE_STOCHASTIC)
    const uint32_t word = hash(index, k0, k1);
    param[i] = NAME(stochastic_, PARAM)(settle(w, old, change, word), word);
#else
    param[i] = NAME(nearest_, PARAM)(w);
#endif
#ifdef HAS_FIRST
#ifdef FIRST_STOCHASTIC
    first[i] = NAME(stochastic_, FIRST)(m, hash(index, k2, k3));
#else
    first[i] = NAME(nearest_, FIRST)(m);
#endif
#endif
#ifdef HAS_SECOND
#ifdef ROOT
    v = sqrtf(v);
#endif
    second[i] = NAME(stochastic_, SECOND)(v, hash(index, k4, k5));
#endif
  }
}

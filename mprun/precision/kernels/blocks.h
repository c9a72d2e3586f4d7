/* Blocks of numbers between memory and float32 arrays: the loops of formats.h over a block.

Compilers do not find all conversions that processors have, so some are named here: those between 16
and 32 bits, and those of float16. The latter take float32 numbers that float16 has exactly, or
round to nearest, with the same result as formats.h. */

#include "formats.h"

#if defined(__AVX512F__) || (defined(__F16C__) && defined(__AVX__))
#include <immintrin.h>
#endif

/* Numbers of a block, whose arrays stay in the nearest cache. Loops whose storage is known take SHORT
ones: two vectors of AVX-512 stay in its 32 registers, and two can be computed side by side. With
AVX2's 16 registers that would take a sixth longer. PARTs of a group of codes are two vectors. */
#if defined(__AVX512F__)
#define BLOCK 64
#define SHORT 32
#define PART 32
#else
#define BLOCK 128
#define SHORT 128
#define PART 16
#endif

/* S16 is 2^6 times the number in float16, at most the largest: see SCALE in mprun/optim. */
/* C8 are codes of 8 bits with a scale for each GROUP: see mprun/optim/formulas.py. */
enum { FORMAT_NONE, FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_S16, FORMAT_C8 };

#define GROUP 256
#define CODES 256

/* Words of 16 bits as words of 32. */
INLINE void widen(const uint16_t *from, int n, uint32_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_si512(to + i,
                        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_si256((void *)(to + i),
                        _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = from[i];
}

/* The lower halves of words, whose upper halves are 0. */
INLINE void narrow(const uint32_t *from, int n, uint16_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((void *)(to + i), _mm512_cvtepi32_epi16(_mm512_loadu_si512(from + i)));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    __m256i words = _mm256_loadu_si256((const void *)(from + i));
    _mm_storeu_si128((void *)(to + i), _mm_packus_epi32(_mm256_castsi256_si128(words),
                                                        _mm256_extracti128_si256(words, 1)));
  }
#endif
  for (; i < n; i++) to[i] = (uint16_t)from[i];
}

/* Bytes with a sign as words. */
INLINE void widen_bytes(const int8_t *from, int n, uint32_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_si512(to + i, _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + i))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_si256((void *)(to + i),
                        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = (uint32_t)from[i];
}

INLINE void widen_codes(const uint8_t *from, int n, uint32_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_si512(to + i, _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(from + i))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_si256((void *)(to + i),
                        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = from[i];
}

/* The lowest bytes of words. */
INLINE void narrow_bytes(const uint32_t *from, int n, uint8_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm_storeu_si128((void *)(to + i), _mm512_cvtepi32_epi8(_mm512_loadu_si512(from + i)));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    __m256i words = _mm256_loadu_si256((const void *)(from + i));
    words = _mm256_and_si256(words, _mm256_set1_epi32(0xff));
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words),
                                      _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((void *)(to + i), _mm_packus_epi16(halves, halves));
  }
#endif
  for (; i < n; i++) to[i] = (uint8_t)from[i];
}

/* As `memcpy`, which moves pieces of half a vector: a load of the whole would wait for both. */
INLINE void copy(const float *from, int n, float *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, _mm512_loadu_ps(from + i));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_loadu_ps(from + i));
#endif
  for (; i < n; i++) to[i] = from[i];
}

INLINE void widen_F16(const F16 *from, int n, float *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = load_F16(from[i]);
}

/* To nearest; overflows become infinite. */
INLINE void narrow_F16(const float *from, int n, F16 *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((void *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 8));
#elif defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 8));
#endif
  for (; i < n; i++) to[i] = nearest_to_F16(from[i], 0x7c00u);
}

/* `x` stochastically rounded to a number of float16, as a float32; larger finite numbers become
`limit`, a pattern. */
INLINE float drawn_F16(float x, uint32_t word, uint32_t limit) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  float shift = number(choose((int32_t)magnitude < (int32_t)QUANTUM, QUANTUM, 0u));
  uint32_t y = (pattern(number(magnitude) + shift) + (word >> 19)) & ~0x1fffu;
  y = pattern(number(y) - shift);
  y = y > limit ? limit : y;
  y = (int32_t)magnitude < (int32_t)INFINITE ? y : magnitude; /* infinities and NaN as they are */
  return number(y | (bits & ~MAGNITUDE));
}

#define LARGEST_AS_F32 0x477fe000u /* float16's largest number */

INLINE void widen_BF16(const BF16 *from, int n, float *restrict to) {
  uint32_t words[BLOCK];
  widen(from, n, words);
  EACH(i, n) to[i] = number(words[i] << 16);
}

/* Remainders of Kahan sums, which have a sign. */
INLINE void widen_rest(const int16_t *from, int n, uint32_t *restrict to) {
  widen((const uint16_t *)from, n, to);
  EACH(i, n) to[i] = (uint32_t)((int32_t)(to[i] << 16) >> 16);
}

INLINE void load(const void *from, int format, int64_t at, int n, float *restrict to) {
  if (format == FORMAT_F32)
    copy((const float *)from + at, n, to);
  else if (format == FORMAT_BF16)
    widen_BF16((const BF16 *)from + at, n, to);
  else
    widen_F16((const F16 *)from + at, n, to);
  if (format == FORMAT_S16)
    EACH(i, n) to[i] = to[i] * 0x1p-6f;
}

/* Random bits of the elements from `index` on. */
INLINE void draw(uint32_t *restrict words, int n, const uint32_t *key, uint32_t index) {
  const uint32_t low = key[0], high = key[1];
  EACH(i, n) words[i] = hash(index + (uint32_t)i, low, high);
}

INLINE void store_BF16(BF16 *restrict to, uint32_t top, int n, const float *from,
                              const uint32_t *words) {
  uint32_t rounded[BLOCK];
  if (words)
    EACH(i, n) rounded[i] = stochastic_to_BF16(from[i], words[i], top);
  else
    EACH(i, n) rounded[i] = nearest_to_BF16(from[i], top);
  narrow(rounded, n, to);
}

INLINE void store_F16(F16 *restrict to, float factor, int saturate, int n,
                             const float *from, float *restrict scratch, const uint32_t *words) {
  const uint32_t limit = saturate ? LARGEST_AS_F32 : INFINITE;
  if (words) {
    EACH(i, n) scratch[i] = drawn_F16(from[i] * factor, words[i], limit);
  } else {
    EACH(i, n) {
      uint32_t bits = pattern(from[i] * factor), magnitude = bits & MAGNITUDE;
      uint32_t y = magnitude > limit ? limit : magnitude;
      scratch[i] = number((magnitude < INFINITE ? y : magnitude) | (bits & ~MAGNITUDE));
    }
  }
  narrow_F16(scratch, n, to);
}

/* Rounded stochastically with `words`, or to nearest where it is NULL. */
INLINE void store(void *to, int format, int saturate, int64_t at, int n, const float *from,
                         float *restrict scratch, const uint32_t *words) {
  if (format == FORMAT_F32)
    copy(from, n, (float *)to + at);
  else if (format == FORMAT_BF16)
    store_BF16((BF16 *)to + at, saturate ? 0x7f7fu : 0x7f80u, n, from, words);
  else if (format == FORMAT_S16)
    store_F16((F16 *)to + at, 0x1p6f, 1, n, from, scratch, words);
  else
    store_F16((F16 *)to + at, 1.0f, saturate, n, from, scratch, words);
}

INLINE void merge(const void *from, const int16_t *remainder, int format, int64_t at, int n,
                         float *restrict to) {
  uint32_t rest[BLOCK];
  widen_rest(remainder + at, n, rest);
  if (format == FORMAT_BF16) {
    widen_BF16((const BF16 *)from + at, n, to);
    EACH(i, n) to[i] = merged_BF16(to[i], rest[i]);
  } else {
    widen_F16((const F16 *)from + at, n, to);
    EACH(i, n) to[i] = merged_F16(to[i], rest[i]);
  }
}

INLINE void split(void *to, int16_t *remainder, int format, int64_t at, int n,
                         const float *from, float *restrict nearest) {
  uint32_t rest[BLOCK], rounded[BLOCK];
  if (format == FORMAT_BF16) {
    EACH(i, n) rounded[i] = split_BF16(from[i], rest + i);
    narrow(rounded, n, (BF16 *)to + at);
  } else {
    narrow_F16(from, n, (F16 *)to + at);
    widen_F16((const F16 *)to + at, n, nearest);
    EACH(i, n) rest[i] = cut_F16(from[i], nearest[i]);
  }
  narrow(rest, n, (uint16_t *)remainder + at);
}

INLINE void merge_masters(const void *from, const int8_t *rest, int format, int64_t at, int n,
                          float *restrict to) {
  const int is_BF16 = format == FORMAT_BF16, cut = is_BF16 ? 16 : 13;
  const int32_t top = is_BF16 ? 0x7f80 : 0x7c00;
  uint32_t words[BLOCK], more[BLOCK];
  widen((const uint16_t *)from + at, n, words);
  widen_bytes(rest + at, n, more);
  EACH(i, n) {
    uint32_t own = words[i] & 0x7fffu, sign = (words[i] & 0x8000u) << 16;
    uint32_t finite = (int32_t)own < top;
    uint32_t whole = merge_master(own, cut, finite ? more[i] : 0u);
    if (!is_BF16) whole = finite ? number_F16(whole) : own << 13 | INFINITE;
    to[i] = number(whole | sign);
  }
}

INLINE void split_masters(void *to, int8_t *rest, int format, int64_t at, int n, const float *from,
                          const uint32_t *words) {
  uint32_t rounded[BLOCK], more[BLOCK];
  if (format == FORMAT_BF16)
    EACH(i, n)
      rounded[i] = split_master(from[i], integer_BF16(from[i]), 16, 0x7f80u, words[i], more + i);
  else
    EACH(i, n)
      rounded[i] = split_master(from[i], integer_F16(from[i]), 13, 0x7c00u, words[i], more + i);
  narrow(rounded, n, (uint16_t *)to + at);
  narrow_bytes(more, n, (uint8_t *)rest + at);
}

/* ---- codes of 8 bits ----

The maps of mprun/optim/formulas.py, computed: vectors have no fast look-up in 256 values. A number of
a map has a place among the magnitudes: 0 for 0, or 1 in the map of roots, and so on up to 1.0. The
places from 2^k to 2^(k+1) are those of a decade, and their numbers lie on a line. It is added up from
two: the first is exact in float32, the second is what that leaves, so the sum is rounded once, as
the map is. */

typedef struct {
  float high[8], high_step[8], low[8], low_step[8]; /* by k - 1 modulo 8 */
  float end[8], rate[8], offset[8]; /* by decade: its end, and the line from numbers to places */
  float top; /* the place of 1.0 */
} Lines;

/* Of the decade that ends at `size`, whose places begin at `first`. `quantum` is 2^-22 times the next
power of two, so that the first line has at most 24 bits; the sum with 1.5 * 2^52 quanta rounds. */
#define STEP(size, first) (0.9 * (size) / (first))
#define BASE(size, first) ((size) * (0.45 / (first) - 0.8))
#define CUT(x, quantum) ((x) + 0x1.8p52 * (quantum) - 0x1.8p52 * (quantum))
#define HIGH(x, quantum) ((float)CUT(x, quantum))
#define LOW(x, quantum) ((float)((x) - CUT(x, quantum)))
#define RATE(size, first) ((float)(1 / STEP(size, first)))
#define OFFSET(size, first) ((float)(-BASE(size, first) / STEP(size, first)))

/* `times` is 1, or 2 in the map of roots, whose decades have twice as many places. */
#define DECADE(X, n, times) /* X of the decade's end, its first place and its quantum */ \
  X(1e-6 * TENS_##n, (times * (1 << n)), QUANTUM_##n)
#define TENS_0 1
#define TENS_1 10
#define TENS_2 1e2
#define TENS_3 1e3
#define TENS_4 1e4
#define TENS_5 1e5
#define TENS_6 1e6
#define QUANTUM_0 0x1p-41
#define QUANTUM_1 0x1p-38
#define QUANTUM_2 0x1p-35
#define QUANTUM_3 0x1p-31
#define QUANTUM_4 0x1p-28
#define QUANTUM_5 0x1p-25
#define QUANTUM_6 0x1p-22
#define DECADES_1_TO_6(X, times) \
  DECADE(X, 1, times), DECADE(X, 2, times), DECADE(X, 3, times), DECADE(X, 4, times), \
      DECADE(X, 5, times), DECADE(X, 6, times)
#define HIGH_BASE(size, first, quantum) HIGH(BASE(size, first), quantum)
#define HIGH_STEP(size, first, quantum) HIGH(STEP(size, first), quantum)
#define LOW_BASE(size, first, quantum) LOW(BASE(size, first), quantum)
#define LOW_STEP(size, first, quantum) LOW(STEP(size, first), quantum)
#define THE_RATE(size, first, quantum) RATE(size, first)
#define THE_OFFSET(size, first, quantum) OFFSET(size, first)
#define ENDS {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 2, 2}

static const Lines SIGNED_LINES = {
    /* the place of 1.0 has a decade of its own; decade 0 is the last entry */
    .high = {DECADES_1_TO_6(HIGH_BASE, 1), 1, DECADE(HIGH_BASE, 0, 1)},
    .high_step = {DECADES_1_TO_6(HIGH_STEP, 1), 0, DECADE(HIGH_STEP, 0, 1)},
    .low = {DECADES_1_TO_6(LOW_BASE, 1), 0, DECADE(LOW_BASE, 0, 1)},
    .low_step = {DECADES_1_TO_6(LOW_STEP, 1), 0, DECADE(LOW_STEP, 0, 1)},
    .end = ENDS,
    .rate = {DECADE(THE_RATE, 0, 1), DECADES_1_TO_6(THE_RATE, 1)},
    .offset = {DECADE(THE_OFFSET, 0, 1), DECADES_1_TO_6(THE_OFFSET, 1)},
    .top = 128,
};

static const Lines ROOT_LINES = {
    /* the last entry is the line from place 1, which is 0, to place 256, which is 1.0 */
    .high = {DECADE(HIGH_BASE, 0, 2), DECADES_1_TO_6(HIGH_BASE, 2), -0x1p-8f},
    .high_step = {DECADE(HIGH_STEP, 0, 2), DECADES_1_TO_6(HIGH_STEP, 2), 0x1p-8f},
    .low = {DECADE(LOW_BASE, 0, 2), DECADES_1_TO_6(LOW_BASE, 2), (float)(-0x1p-8 / 255)},
    .low_step = {DECADE(LOW_STEP, 0, 2), DECADES_1_TO_6(LOW_STEP, 2), (float)(0x1p-8 / 255)},
    .end = ENDS,
    .rate = {DECADE(THE_RATE, 0, 2), DECADES_1_TO_6(THE_RATE, 2)},
    .offset = {DECADE(THE_OFFSET, 0, 2), DECADES_1_TO_6(THE_OFFSET, 2)},
    .top = 256,
};

/* The entries of a table by the last three bits of `slots`. */
INLINE void pick(const float *table, int n, const uint32_t *slots, float *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  const __m256 half = _mm256_loadu_ps(table);
  const __m512 twice = _mm512_insertf32x8(_mm512_castps256_ps512(half), half, 1);
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(_mm512_loadu_si512(slots + i), twice));
#elif defined(__AVX2__)
  const __m256 all = _mm256_loadu_ps(table);
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_permutevar8x32_ps(
                                 all, _mm256_loadu_si256((const void *)(slots + i))));
#endif
  for (; i < n; i++) to[i] = table[slots[i] & 7];
}

/* The magnitudes of the map at these places, whole numbers; without AVX2 they are looked up. */
INLINE void at_places(const float *map, int roots, int n, const float *places,
                      float *restrict to) {
#if defined(__AVX2__)
  const Lines *lines = roots ? &ROOT_LINES : &SIGNED_LINES;
  float high[PART], high_step[PART], low[PART], low_step[PART];
  uint32_t slots[PART];
  (void)map;
  EACH(i, n) slots[i] = pattern(places[i]) >> 23;
  pick(lines->high, n, slots, high);
  pick(lines->high_step, n, slots, high_step);
  pick(lines->low, n, slots, low);
  pick(lines->low_step, n, slots, low_step);
  EACH(i, n) {
    float x = (high[i] + places[i] * high_step[i]) + (low[i] + places[i] * low_step[i]);
    to[i] = roots || places[i] > 0 ? x : 0.0f;
  }
#else
  const float *magnitudes = roots ? map - 1 : map + 127;
  for (int i = 0; i < n; i++) to[i] = magnitudes[(int32_t)places[i]];
#endif
}

INLINE void decode_part(const uint8_t *from, float scale, const float *map, int roots, int n,
                        float *restrict to) {
  uint32_t codes[PART];
  float places[PART], values[PART];
  widen_codes(from, n, codes);
  EACH(i, n)
    places[i] = roots ? (float)(int32_t)(codes[i] + 1) : fabsf((float)((int32_t)codes[i] - 127));
  at_places(map, roots, n, places, values);
  EACH(i, n) {
    uint32_t sign = roots ? 0u : (codes[i] - 127) & ~MAGNITUDE;
    to[i] = number(pattern(values[i]) | sign) * scale;
  }
}

/* The numbers of one group. */
OUTLINE void decode(const uint8_t *from, float scale, const float *map, int roots,
                    float *restrict to) {
  if (roots)
    for (int i = 0; i < GROUP; i += PART) decode_part(from + i, scale, map, 1, PART, to + i);
  else
    for (int i = 0; i < GROUP; i += PART) decode_part(from + i, scale, map, 0, PART, to + i);
}

/* The number of largest magnitude; NaN where one is not finite. */
INLINE float largest(const float *from, int n) {
  int32_t all = 0, positive = 0; /* the patterns of negative numbers are negative */
  EACH(i, n) {
    int32_t bits = (int32_t)pattern(from[i]), magnitude = bits & (int32_t)MAGNITUDE;
    all = magnitude > all ? magnitude : all;
    positive = bits > positive ? bits : positive;
  }
  if (all >= (int32_t)INFINITE) return number(0x7fc00000u);
  return number(all > positive ? (uint32_t)all | ~MAGNITUDE : (uint32_t)all);
}

/* The place that a number's decade's line gives: the last one whose number is not larger, or the
next. */
INLINE void find_places(int roots, int n, const float *ratios, float *restrict to) {
  const Lines *lines = roots ? &ROOT_LINES : &SIGNED_LINES;
  float end[PART], rate[PART], offset[PART];
  uint32_t decades[PART];
  EACH(i, n) { /* a pattern grows nearly as the logarithm: this decade or the one before */
    int32_t above = (int32_t)(pattern(ratios[i]) & MAGNITUDE) - 0x33d6bf95; /* 1e-7 */
    above = above > 0 ? above : 0;
    decades[i] = (uint32_t)(int32_t)((float)above * 3.588557e-8f - 0.03f);
  }
  pick(lines->end, n, decades, end);
  EACH(i, n) decades[i] += fabsf(ratios[i]) >= end[i];
  pick(lines->rate, n, decades, rate);
  pick(lines->offset, n, decades, offset);
  /* The sum with 1.5 * 2^23 rounds to a whole number. */
  EACH(i, n) to[i] = (fabsf(ratios[i]) * rate[i] + offset[i] + 0x1.8p23f) - 0x1.8p23f;
}

/* The place on the other side of a number, which is beside `place`, whose number is `here`. */
INLINE void find_neighbours(int roots, int n, const float *ratios, const float *places,
                            const float *here, float *restrict to) {
  const float top = roots ? ROOT_LINES.top : SIGNED_LINES.top;
  EACH(i, n) {
    float place = places[i] + (fabsf(ratios[i]) < here[i] ? -1.0f : 1.0f);
    to[i] = place < top ? place : top;
  }
}

/* The codes of numbers between two places: with `words` either, else the nearer. */
INLINE void choose_codes(uint8_t *restrict to, int roots, int n, const float *ratios,
                         const float *places, const float *here, const float *others,
                         const float *there, const uint32_t *words) {
  uint32_t codes[PART];
  int32_t lower[PART];
  EACH(i, n) lower[i] = (int32_t)places[i];
  EACH(i, n) lower[i] = (int32_t)others[i] < lower[i] ? (int32_t)others[i] : lower[i];
  EACH(i, n) {
    float x = fabsf(ratios[i]), low = here[i] < there[i] ? here[i] : there[i];
    float high = here[i] < there[i] ? there[i] : here[i];
    int32_t negative = roots ? 0 : (int32_t)pattern(ratios[i]) >> 31; /* all bits or none */
    int32_t place = lower[i];
    /* Up is towards 0 where the number is negative. */
    float rest = negative ? high - x : x - low;
    /* The middles of 2^16 equal parts of 0 to 1. */
    float drawn = words ? number(0x3f800040u | ((words[i] >> 9) & 0x7fff80u)) - 1.0f : 0.5f;
    float part = drawn * (high - low);
    int32_t up = words ? rest > part : rest >= part;
    int32_t code = (roots ? place - 1 : 127 + (place ^ negative)) + up;
    int32_t least = roots ? x > 0.0f : 0; /* a positive root never becomes 0 */
    code = code > least ? code : least;
    codes[i] = (uint32_t)(code < CODES - 1 ? code : CODES - 1);
  }
  narrow_bytes(codes, n, to);
}

/* In several loops: one would be a long chain of results that wait for each other. */
INLINE void encode_group(uint8_t *restrict to, float size, const float *map, int roots,
                         const float *from, const uint32_t *key, uint32_t index) {
  float ratios[GROUP], places[GROUP], here[GROUP], others[GROUP];
  for (int i = 0; i < GROUP; i += PART) {
    EACH(k, PART) {
      float ratio = from[i + k] / size;
      ratios[i + k] = ratio == ratio ? ratio : 0.0f; /* 0 / 0, or a group that is not finite */
    }
    find_places(roots, PART, ratios + i, places + i);
  }
  for (int i = 0; i < GROUP; i += PART) {
    at_places(map, roots, PART, places + i, here + i);
    find_neighbours(roots, PART, ratios + i, places + i, here + i, others + i);
  }
  for (int i = 0; i < GROUP; i += PART) {
    float there[PART];
    uint32_t words[PART];
    if (key) draw(words, PART, key, index + (uint32_t)i);
    at_places(map, roots, PART, others + i, there);
    choose_codes(to + i, roots, PART, ratios + i, places + i, here + i, others + i, there,
                 key ? words : NULL);
  }
}

/* The codes of one group and its scale; rounded stochastically with the bits of `key` from `index` on,
or to nearest where it is NULL. */
OUTLINE void encode(uint8_t *restrict to, float *scale, const float *map, int roots,
                    const float *from, const uint32_t *key, uint32_t index) {
  const float size = *scale = largest(from, GROUP);
  if (roots)
    encode_group(to, size, map, 1, from, key, index);
  else if (key)
    encode_group(to, size, map, 0, from, key, index);
  else
    encode_group(to, size, map, 0, from, NULL, index);
}

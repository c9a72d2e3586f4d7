/* float32, float16 and bfloat16, and the roundings between them.

The same operations as mprun/precision/rounding.py and random_bits.py, which explain them; results
are equal bit for bit, but for what is inside a NaN. Written without branches, so that compilers
vectorise the loops. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Where formats and rules are constants, a step is one loop that keeps its numbers in registers: only
if every function is a part of it. */
#define INLINE static inline __attribute__((always_inline))

#define OUTLINE static __attribute__((noinline, unused))
/* Compilers shall make vectors of a short loop, not unroll it. */
#define EACH(i, n) _Pragma("GCC unroll 1") for (int i = 0; i < n; i++)

typedef uint16_t F16;
typedef uint16_t BF16;

INLINE uint32_t pattern(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE uint32_t choose(uint32_t condition, uint32_t yes, uint32_t no) {
  uint32_t mask = -condition;
  return (yes & mask) | (no & ~mask);
}

INLINE uint32_t hash(uint32_t index, uint32_t low, uint32_t high) {
  uint32_t word = (index ^ low) * 0xed5ad4bbu;
  word ^= word >> 11;
  word = (word ^ high) * 0xac4c1b51u;
  word = (word ^ (word >> 15)) * 0x31848babu;
  return word ^ (word >> 14);
}

/* The difference a - b or its neighbour, so that the mean is exact: the lower 16 bits decide. */
INLINE float settle(float difference, float a, float b, uint32_t word) {
  float back = difference - a, rest = (a - (difference - back)) - (b + back);
  uint32_t bits = pattern(difference);
  uint32_t by = (uint32_t)((int32_t)(pattern(rest) ^ bits) >> 31) | 1u; /* -1 or 1 */
  float gap = fabsf(number(bits + by) - difference);
  float drawn = number(0x3f800040u | ((word << 7) & 0x7fff80u)) - 1.0f; /* 2^-16 (word + 1/2) */
  return number(fabsf(rest) > drawn * gap ? bits + by : bits);
}

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u /* float32's infinity */
#define QUANTUM 0x38800000u  /* 2^-14, float16's smallest normal */
#define REBIAS (112u << 23)  /* between the exponents of float32 and float16 */

/* ---- bfloat16 ---- */

/* `top` is what overflows become: infinity, which both roundings give by themselves, or the largest
number. */
INLINE uint32_t finish_BF16(float x, uint32_t rounded, uint32_t top) {
  uint32_t bits = pattern(x), sign = bits & ~MAGNITUDE;
  if (top != INFINITE >> 16)
    rounded = (((rounded & MAGNITUDE) >= top << 16) & ((bits & MAGNITUDE) < INFINITE))
                  ? top << 16 | sign
                  : rounded;
  rounded = x != x ? sign | 0x7fc00000u : rounded;
  return rounded >> 16;
}

INLINE uint32_t nearest_to_BF16(float x, uint32_t top) {
  uint32_t bits = pattern(x);
  return finish_BF16(x, bits + 0x7fffu + ((bits >> 16) & 1u), top);
}

/* A carry never reaches the sign, but for NaN. */
INLINE uint32_t stochastic_to_BF16(float x, uint32_t word, uint32_t top) {
  return finish_BF16(x, pattern(x) + (word >> 16), top);
}

/* The remainder is a word of 16 bits with a sign; its upper half is 0. */
INLINE uint32_t split_BF16(float x, uint32_t *remainder) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  uint32_t finite = magnitude < INFINITE;
  uint32_t rounded = (magnitude + choose(finite, 0x8000u, 0u)) >> 16;
  *remainder = choose(finite, (magnitude - (rounded << 16)) & 0xffffu, 0u);
  rounded = choose(magnitude > INFINITE, 0x7fc0u, rounded);
  return rounded | ((bits >> 16) & 0x8000u);
}

/* `x`, a number of bfloat16, with its remainder, which has a sign. */
INLINE float merged_BF16(float x, uint32_t remainder) {
  uint32_t wide = pattern(x), magnitude = wide & MAGNITUDE;
  uint32_t whole = magnitude + remainder; /* a huge one where below zero */
  return number(choose(whole > INFINITE, magnitude, whole) | (wide & ~MAGNITUDE));
}

/* ---- float16 ---- */

INLINE float load_F16(F16 x) {
  uint32_t bits = x, magnitude = (bits & 0x7fffu) << 13;
  uint32_t normal = magnitude + REBIAS + choose(magnitude >= (31u << 23), REBIAS, 0u);
  uint32_t small = pattern((float)(int32_t)(bits & 0x3ffu) * 0x1p-24f);
  return number(choose(magnitude < (1u << 23), small, normal) | ((bits & 0x8000u) << 16));
}

/* `top` is what overflows become: infinity or the largest number. */
INLINE F16 finish_F16(uint32_t bits, uint32_t normal, uint32_t small, uint32_t top) {
  uint32_t magnitude = bits & MAGNITUDE;
  uint32_t rounded = choose(magnitude < QUANTUM, small, normal);
  rounded = choose((rounded >= top) & (magnitude < INFINITE), top, rounded);
  rounded = choose(magnitude == INFINITE, 0x7c00u, rounded);
  rounded = choose(magnitude > INFINITE, 0x7e00u, rounded);
  return rounded | ((bits >> 16) & 0x8000u);
}

INLINE F16 nearest_to_F16(float x, uint32_t top) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  /* Adding 1/2 to a subnormal rounds it to a multiple of 2^-24, once. */
  uint32_t small = pattern(number(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal = (magnitude - REBIAS + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  return finish_F16(bits, normal, small, top);
}

/* The remainder of `x`, of which `rounded` is the nearest number of float16. */
INLINE uint32_t cut_F16(float x, float rounded) {
  uint32_t wide = pattern(rounded) & MAGNITUDE, magnitude = pattern(x) & MAGNITUDE;
  uint32_t small = pattern(number(magnitude) + 0x1p-14f) - pattern(number(wide) + 0x1p-14f);
  uint32_t difference = choose(wide < QUANTUM, small, magnitude - wide);
  return choose(wide < INFINITE, difference & 0xffffu, 0u);
}

/* `x`, a number of float16, with its remainder. */
INLINE float merged_F16(float x, uint32_t add) {
  uint32_t bits = pattern(x), wide = bits & MAGNITUDE;
  /* Below zero it has a sign, and so is a huge one here. */
  uint32_t small = pattern(number(pattern(number(wide) + 0x1p-14f) + add) - 0x1p-14f);
  uint32_t whole = choose(wide < QUANTUM, small, wide + add);
  return number(choose((whole > INFINITE) | (wide >= INFINITE), wide, whole) | (bits & ~MAGNITUDE));
}

/* ---- masters of 24 bits: mprun/precision/rounding.py ---- */

/* The integer whose upper bits are the magnitude of the 16-bit parameter. */
INLINE uint32_t integer_BF16(float x) { return pattern(x) & MAGNITUDE; }

INLINE uint32_t integer_F16(float x) {
  uint32_t magnitude = pattern(x) & MAGNITUDE;
  uint32_t low = pattern(number(magnitude) + 0x1p-14f) - QUANTUM;
  return choose(magnitude < QUANTUM, low, magnitude - (QUANTUM - 0x800000u));
}

INLINE uint32_t number_BF16(uint32_t integer) { return integer; }

INLINE uint32_t number_F16(uint32_t integer) {
  uint32_t low = pattern(number(integer + QUANTUM) - 0x1p-14f);
  return choose(integer < 0x800000u, low, integer + (QUANTUM - 0x800000u));
}

/* The parameter, and the 8 bits beside it, which have a sign. `cut` bits of the integer are below
the parameter; `top` is its infinity, which larger ones become. */
INLINE uint32_t split_master(float x, uint32_t integer, int cut, uint32_t top, uint32_t word,
                             uint32_t *rest) {
  const int unit = cut - 8;
  uint32_t master = (integer + (word >> (32 - unit))) >> unit;
  uint32_t parameter = (master + 0x80u) >> 8;
  *rest = parameter < top ? master - (parameter << 8) : 0u; /* its last 8 bits */
  parameter = parameter < top ? parameter : top;
  parameter = x != x ? 0x7fffu : parameter;
  return parameter | ((pattern(x) >> 16) & 0x8000u);
}

/* The integer of a parameter with its 8 bits; without them where they carry it past zero. `own` is
the parameter's magnitude. */
INLINE uint32_t merge_master(uint32_t own, int cut, uint32_t rest) {
  int32_t master = (int32_t)((own << cut) + (rest << (cut - 8)));
  return master < 0 ? own << cut : (uint32_t)master;
}

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)

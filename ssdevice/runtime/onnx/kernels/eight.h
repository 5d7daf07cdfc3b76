// Eight floats or integers at once, with the instructions of AVX2 (and FMA and F16C) or of NEON.
// What is written with them is written once for both. SSDEVICE_EIGHT is defined where a compiler
// has them, and kEight is true where a CPU does; functions that use them are SSDEVICE_EIGHT. Every
// operation rounds to float as it does for one number.
#pragma once

#include "half.h"

constexpr int kLanes = 8;  // floats of 256 bits

#if defined(SSDEVICE_AVX2)
#define SSDEVICE_EIGHT __attribute__((target("avx2,fma,f16c")))
#define SSDEVICE_EACH SSDEVICE_EIGHT inline
using Eight = __m256;
using EightInts = __m256i;
inline const bool kEight = [] {
  // Clang before 19 does not know "f16c".
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}();

SSDEVICE_EACH Eight All(float x) { return _mm256_set1_ps(x); }
SSDEVICE_EACH Eight Load(const float* from) { return _mm256_loadu_ps(from); }
SSDEVICE_EACH Eight Load(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SSDEVICE_EACH void Store(Eight x, float* to) { _mm256_storeu_ps(to, x); }
SSDEVICE_EACH void Store(Eight x, Half* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SSDEVICE_EACH Eight Add(Eight x, Eight y) { return _mm256_add_ps(x, y); }
SSDEVICE_EACH Eight Sub(Eight x, Eight y) { return _mm256_sub_ps(x, y); }
SSDEVICE_EACH Eight Mul(Eight x, Eight y) { return _mm256_mul_ps(x, y); }
SSDEVICE_EACH Eight Div(Eight x, Eight y) { return _mm256_div_ps(x, y); }
// Of a number and none, Max and Min are y on x86 and the number on ARM: let y be one.
SSDEVICE_EACH Eight Max(Eight x, Eight y) { return _mm256_max_ps(x, y); }
SSDEVICE_EACH Eight Min(Eight x, Eight y) { return _mm256_min_ps(x, y); }
SSDEVICE_EACH Eight Abs(Eight x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
// x y + z and z - x y, rounded once.
SSDEVICE_EACH Eight Fma(Eight x, Eight y, Eight z) { return _mm256_fmadd_ps(x, y, z); }
SSDEVICE_EACH Eight Fnma(Eight x, Eight y, Eight z) { return _mm256_fnmadd_ps(x, y, z); }
// Where x < y, the one, elsewhere the other.
SSDEVICE_EACH Eight IfLess(Eight x, Eight y, Eight one, Eight other) {
  return _mm256_blendv_ps(other, one, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
SSDEVICE_EACH Eight Round(Eight x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
SSDEVICE_EACH EightInts Nearest(Eight x) { return _mm256_cvtps_epi32(x); }
// 2^n for an integer n.
SSDEVICE_EACH Eight Power(Eight n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(Nearest(n), _mm256_set1_epi32(127)), 23));
}
// Eight sums of eight lanes each, pairwise as in PairwiseSum.
SSDEVICE_EACH Eight Pairwise(const Eight* a) {
  const __m256 b0 = _mm256_hadd_ps(a[0], a[1]);
  const __m256 b1 = _mm256_hadd_ps(a[2], a[3]);
  const __m256 b2 = _mm256_hadd_ps(a[4], a[5]);
  const __m256 b3 = _mm256_hadd_ps(a[6], a[7]);
  const __m256 c0 = _mm256_hadd_ps(b0, b1);
  const __m256 c1 = _mm256_hadd_ps(b2, b3);
  return _mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20), _mm256_permute2f128_ps(c0, c1, 0x31));
}
SSDEVICE_EACH float Largest(Eight x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
SSDEVICE_EACH int32_t Sum(EightInts x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
SSDEVICE_EACH EightInts Add(EightInts x, EightInts y) { return _mm256_add_epi32(x, y); }
// 32 integers, none outside the type's range.
SSDEVICE_EACH void Store(const EightInts (&x)[4], int16_t* to) {
  for (int i = 0; i < 2; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i,
                        _mm256_permute4x64_epi64(_mm256_packs_epi32(x[2 * i], x[2 * i + 1]), 0xD8));
}
SSDEVICE_EACH __m256i Bytes(const EightInts (&x)[4]) {
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
SSDEVICE_EACH void Store(const EightInts (&x)[4], int8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), Bytes(x));
}
// 128 more than the integers.
SSDEVICE_EACH void Store(const EightInts (&x)[4], uint8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_xor_si256(Bytes(x), _mm256_set1_epi8(-128)));
}

#elif defined(__aarch64__) && !defined(SSDEVICE_PORTABLE)
#define SSDEVICE_EIGHT
#define SSDEVICE_EACH inline
struct Eight {
  float32x4_t low, high;
};
struct EightInts {
  int32x4_t low, high;
};
constexpr bool kEight = true;

SSDEVICE_EACH Eight All(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
SSDEVICE_EACH Eight Load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
SSDEVICE_EACH Eight Load(const Half* from) {
  const float16x8_t halves =
      vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(from)));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
SSDEVICE_EACH void Store(Eight x, float* to) {
  vst1q_f32(to, x.low);
  vst1q_f32(to + 4, x.high);
}
SSDEVICE_EACH void Store(Eight x, Half* to) {
  vst1q_u16(reinterpret_cast<uint16_t*>(to),
            vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
}
SSDEVICE_EACH Eight Add(Eight x, Eight y) {
  return {vaddq_f32(x.low, y.low), vaddq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Sub(Eight x, Eight y) {
  return {vsubq_f32(x.low, y.low), vsubq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Mul(Eight x, Eight y) {
  return {vmulq_f32(x.low, y.low), vmulq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Div(Eight x, Eight y) {
  return {vdivq_f32(x.low, y.low), vdivq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Max(Eight x, Eight y) {
  return {vmaxnmq_f32(x.low, y.low), vmaxnmq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Min(Eight x, Eight y) {
  return {vminnmq_f32(x.low, y.low), vminnmq_f32(x.high, y.high)};
}
SSDEVICE_EACH Eight Abs(Eight x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
SSDEVICE_EACH Eight Fma(Eight x, Eight y, Eight z) {
  return {vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)};
}
SSDEVICE_EACH Eight Fnma(Eight x, Eight y, Eight z) {
  return {vfmsq_f32(z.low, x.low, y.low), vfmsq_f32(z.high, x.high, y.high)};
}
SSDEVICE_EACH Eight IfLess(Eight x, Eight y, Eight one, Eight other) {
  return {vbslq_f32(vcltq_f32(x.low, y.low), one.low, other.low),
          vbslq_f32(vcltq_f32(x.high, y.high), one.high, other.high)};
}
SSDEVICE_EACH Eight Round(Eight x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
SSDEVICE_EACH EightInts Nearest(Eight x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }
SSDEVICE_EACH Eight Power(Eight n) {
  const EightInts whole = Nearest(n);
  const int32x4_t bias = vdupq_n_s32(127);
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole.low, bias), 23)),
          vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole.high, bias), 23))};
}
SSDEVICE_EACH Eight Pairwise(const Eight* a) {
  float32x4_t two[4];  // of two vectors, two halves of each
  for (int i = 0; i < 4; ++i)
    two[i] = vpaddq_f32(vpaddq_f32(a[2 * i].low, a[2 * i].high),
                        vpaddq_f32(a[2 * i + 1].low, a[2 * i + 1].high));
  return {vpaddq_f32(two[0], two[1]), vpaddq_f32(two[2], two[3])};
}
SSDEVICE_EACH float Largest(Eight x) { return vmaxnmvq_f32(vmaxnmq_f32(x.low, x.high)); }
SSDEVICE_EACH int32_t Sum(EightInts x) { return vaddvq_s32(vaddq_s32(x.low, x.high)); }
SSDEVICE_EACH EightInts Add(EightInts x, EightInts y) {
  return {vaddq_s32(x.low, y.low), vaddq_s32(x.high, y.high)};
}
SSDEVICE_EACH int16x8_t Shorts(EightInts x) {
  return vcombine_s16(vqmovn_s32(x.low), vqmovn_s32(x.high));
}
SSDEVICE_EACH void Store(const EightInts (&x)[4], int16_t* to) {
  for (int i = 0; i < 4; ++i) vst1q_s16(to + 8 * i, Shorts(x[i]));
}
SSDEVICE_EACH void Store(const EightInts (&x)[4], int8_t* to) {
  for (int i = 0; i < 2; ++i)
    vst1q_s8(to + 16 * i,
             vcombine_s8(vqmovn_s16(Shorts(x[2 * i])), vqmovn_s16(Shorts(x[2 * i + 1]))));
}
#endif

// [count] floats to the nearest halves.
#ifdef SSDEVICE_EIGHT
SSDEVICE_EACH void StoreHalves(const float* from, int64_t count, Half* to) {
  for (int64_t i = 0; i < count; i += kLanes) Store(Load(from + i), to + i);
}
#endif

inline void HalvesOf(const float* from, int64_t count, Half* to) {
  int64_t done = 0;
#ifdef SSDEVICE_EIGHT
  if (kEight) StoreHalves(from, done = count / kLanes * kLanes, to);
#endif
  for (; done < count; ++done) to[done] = HalfOf(from[done]);
}

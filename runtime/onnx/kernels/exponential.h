// Float arithmetic that every CPU rounds alike: e^x for x <= 0 (degree 6 after reduction by ln 2; Cody and Waite), and the
// sum of eight lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernel.h"

constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kLeastExp = -87.0f;
constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr float kFirst = 1.9875691500e-4f;

inline float PairwiseSum(const float* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

inline float Exp(float x) {
  if (x < kLeastExp) return 0.0f;
  const float n = std::nearbyint(x * kLog2e);
  const float r = std::fma(-n, kLn2Low, std::fma(-n, kLn2High, x));
  float p = kFirst;
  for (const float term : kTerms) p = std::fma(p, r, term);
  const float y = std::fma(p * r, r, r) + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return y * power;
}

#ifdef SSDEVICE_AVX2
__attribute__((target("avx2,fma"))) inline __m256 Exp(__m256 x) {
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 high = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), x);
  const __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), high);
  __m256 p = _mm256_set1_ps(kFirst);
  for (const float term : kTerms) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(term));
  const __m256 y = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 power = _mm256_mul_ps(y, _mm256_castsi256_ps(bits));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(kLeastExp), _CMP_LT_OQ), power);
}
#endif

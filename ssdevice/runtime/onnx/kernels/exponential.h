// Float arithmetic that every CPU rounds alike: e^x for x <= 0 (degree 6 after reduction by ln 2;
// Cody and Waite), and the sum of eight lanes.
#pragma once

#include <cmath>

#include "eight.h"

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kLeastExp = -87.0f;
constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                            5.0000001201e-1f};
constexpr float kFirst = 1.9875691500e-4f;

inline float PairwiseSum(const float* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

inline float Exp(float x) {
  if (!(x >= kLeastExp)) return x < kLeastExp ? 0.0f : x;  // no number stays none
  const float n = std::nearbyint(x * kLog2e);
  const float r = std::fma(-n, kLn2Low, std::fma(-n, kLn2High, x));
  float p = kFirst;
  for (const float term : kTerms) p = std::fma(p, r, term);
  const float y = std::fma(p * r, r, r) + 1.0f;
  return y * BitCast<float>((static_cast<int32_t>(n) + 127) << 23);
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EACH Eight Exp(Eight x) {
  const Eight n = Round(Mul(x, All(kLog2e)));
  const Eight r = Fnma(n, All(kLn2Low), Fnma(n, All(kLn2High), x));
  Eight p = All(kFirst);
  for (const float term : kTerms) p = Fma(p, r, All(term));
  const Eight y = Add(Fma(Mul(p, r), r, r), All(1.0f));
  return IfLess(x, All(kLeastExp), All(0.0f), Mul(y, Power(n)));
}
#endif

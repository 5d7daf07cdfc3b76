// Passes over all logits of a row, for compilers to vectorize: without branches, and integers are compared where a comparison of floats
// could trap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define SSDEVICE_ALSO_AVX2 __attribute__((target_clones("avx2", "default")))  // the CPU at hand decides
#else
#define SSDEVICE_ALSO_AVX2
#endif

constexpr int kLanes = 16;

// The largest of `size` logits, at least one; `wrong` becomes true if one is NaN, which the largest then need not be.
inline float largest(const float* logits, int size, bool& wrong) {
  float most[kLanes], found = logits[0];
  const int whole = size / kLanes * kLanes;
  for (int lane = 0; lane < kLanes; ++lane) most[lane] = found;
  for (int at = 0; at < whole; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = logits[at + lane];
      most[lane] = most[lane] < x ? x : most[lane];
    }
  }
  for (int at = whole; at < size; ++at) most[0] = std::max(most[0], logits[at]);
  for (const float each : most) found = std::max(found, each);
  int bad = 0;
  for (int at = 0; at < size; ++at) bad |= logits[at] != logits[at];
  wrong |= bad != 0;
  return found;
}

// 2^x for x <= 0, to 1e-5 of it, and 2^-126 below that: a polynomial of the fraction, shifted by the whole.
inline float power_of_two(float x) {
  constexpr auto kSign = static_cast<int32_t>(0x80000000), kLowest = static_cast<int32_t>(0xC2FC0000);  // -126
  int32_t bits = 0, whole = 0, sum = 0;
  std::memcpy(&bits, &x, 4);
  bits |= kSign;  // 0 is -0, and lower numbers have larger bits
  bits = bits > kLowest ? kLowest : bits;
  std::memcpy(&x, &bits, 4);
  const float rounded = x + 12582912.0f, f = x - (rounded - 12582912.0f);  // 1.5 * 2^23: no room for a fraction
  const float p = 0.99999928f + f * (0.69312179f + f * (0.24024746f + f * (0.05591786f + f * 0.00957009f)));
  std::memcpy(&whole, &rounded, 4), std::memcpy(&sum, &p, 4);
  sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + (static_cast<uint32_t>(whole) << 23));
  float found = 0;
  std::memcpy(&found, &sum, 4);
  return found;
}

// The sum of exp((logit - most) / temperature) of logits that are not above `most`, to 2e-5 of it.
SSDEVICE_ALSO_AVX2 static double weight_of_all(const float* logits, int size, float most, float temperature) {
  const float scale = 1.44269504f / temperature;
  double total = 0;
  for (int start = 0; start < size; start += 64 * kLanes) {
    const int end = std::min(size, start + 64 * kLanes), whole = start + (end - start) / kLanes * kLanes;
    float sums[kLanes] = {};
    for (int at = start; at < whole; at += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += power_of_two((logits[at + lane] - most) * scale);
    }
    for (int at = whole; at < end; ++at) sums[0] += power_of_two((logits[at] - most) * scale);
    for (const float sum : sums) total += sum;
  }
  return total;
}

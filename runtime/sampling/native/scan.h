// Passes over all logits of a row, for compilers to vectorize: without branches, and integers are compared where a comparison of floats
// could trap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define SSDEVICE_CLONED __attribute__((target_clones("avx2", "default")))  // the CPU at hand decides
#else
#define SSDEVICE_CLONED
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

// x <= 0, or -126 below that.
inline float bounded(float x) {
  constexpr auto kSign = static_cast<int32_t>(0x80000000), kLowest = static_cast<int32_t>(0xC2FC0000);  // -126
  int32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  bits |= kSign;  // 0 is -0, and lower numbers have larger bits
  bits = bits > kLowest ? kLowest : bits;
  std::memcpy(&x, &bits, 4);
  return x;
}

// 2^x of a bounded x, to 2e-7 of it: a polynomial of the fraction, shifted by the whole. `mask`: 0 for 0 instead.
inline float power_of_two(float x, int32_t mask = -1) {
  int32_t whole = 0, sum = 0;
  const float rounded = x + 12582912.0f, f = x - (rounded - 12582912.0f);  // 1.5 * 2^23: no room for a fraction
  const float p = 1 + f * (0.69314718f + f * (0.24022651f + f * (0.05550411f + f * (0.00961813f + f * (0.00133336f + f * 0.00015403f)))));
  std::memcpy(&whole, &rounded, 4), std::memcpy(&sum, &p, 4);
  sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + (static_cast<uint32_t>(whole) << 23)) & mask;
  float found = 0;
  std::memcpy(&found, &sum, 4);
  return found;
}

// The largest of each `group` logits. Whether one of all is NaN, which the largest then need not be.
SSDEVICE_CLONED static bool set_largest(const float* logits, int size, int group, float* out) {
  bool wrong = false;
  for (int start = 0; start < size; start += group) *out++ = largest(logits + start, std::min(group, size - start), wrong);
  return wrong;
}

// Of exp(x), the weight of a token: the sum, and the sum of its products with x.
struct Sums {
  double weight = 0, moment = 0;
};

constexpr float kLog2e = 1.44269504f;

// An integer that is larger for a larger float.
inline int32_t order_of(float x) {
  int32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// x = (logit - most) / temperature of logits up to `most`, those of a `bound` and above left out; each weight to 3e-7 of it, and as
// much as x was rounded; the sums to 2e-6.
SSDEVICE_CLONED static Sums sums_of(const float* logits, int size, float most, float temperature, float bound) {
  const float scale = kLog2e / temperature;
  const int32_t end_of = order_of(bound);
  double weight = 0, moment = 0;
  for (int start = 0; start < size; start += 64 * kLanes) {
    const int end = std::min(size, start + 64 * kLanes), whole = start + (end - start) / kLanes * kLanes;
    float weights[kLanes] = {}, moments[kLanes] = {};
    for (int at = start; at < whole; at += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float logit = logits[at + lane], x = bounded((logit - most) * scale);
        const float w = power_of_two(x, order_of(logit) < end_of ? -1 : 0);
        weights[lane] += w, moments[lane] += w * x;
      }
    }
    for (int at = whole; at < end; ++at) {
      const float x = bounded((logits[at] - most) * scale), w = logits[at] < bound ? power_of_two(x) : 0.0f;
      weights[0] += w, moments[0] += w * x;
    }
    for (int lane = 0; lane < kLanes; ++lane) weight += weights[lane], moment += moments[lane];
  }
  return {weight, moment / kLog2e};
}

SSDEVICE_CLONED static double weight_of_all(const float* logits, int size, float most, float temperature) {
  const float scale = kLog2e / temperature;
  double weight = 0;
  for (int start = 0; start < size; start += 64 * kLanes) {
    const int end = std::min(size, start + 64 * kLanes), whole = start + (end - start) / kLanes * kLanes;
    float weights[kLanes] = {};
    for (int at = start; at < whole; at += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) weights[lane] += power_of_two(bounded((logits[at + lane] - most) * scale));
    }
    for (int at = whole; at < end; ++at) weights[0] += power_of_two(bounded((logits[at] - most) * scale));
    for (const float each : weights) weight += each;
  }
  return weight;
}

// Passes over the logits of a row: loops without branches, which compilers vectorize for the CPU at
// hand. Integers are compared where a comparison of floats could trap.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__GNUC__)
#define SSDEVICE_INLINE __attribute__((always_inline))
#else
#define SSDEVICE_INLINE
#endif

#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
using Fused = std::true_type;  // the CPU multiplies and adds in one instruction
#else
using Fused = std::false_type;
#endif

#if defined(__GNUC__) && defined(__x86_64__) && !defined(SSDEVICE_PORTABLE)
template <typename Pass>
__attribute__((target("avx512f,avx512bw"))) auto with_avx512(const Pass& pass) {
  return pass(std::true_type());
}

template <typename Pass>
__attribute__((target("avx2,fma"))) auto with_avx2(const Pass& pass) {
  return pass(std::true_type());
}

inline const bool kAvx2Fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef SSDEVICE_WITHOUT_VNNI
constexpr bool kAvx512 = false;
#else
inline const bool kAvx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
#endif

// What a pass returns, which is a function of whether there are fused instructions, compiled for
// the CPU at hand.
template <typename Pass>
auto fastest(const Pass& pass) {
  return kAvx512 ? with_avx512(pass) : kAvx2Fma ? with_avx2(pass) : pass(Fused());
}
#else
template <typename Pass>
auto fastest(const Pass& pass) {
  return pass(Fused());
}
#endif

constexpr int kLanes = 32;   // numbers side by side
constexpr int kGroup = 256;  // tokens that a pass looks at together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename To, typename From>
SSDEVICE_INLINE inline To bits_of(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// The logits of a group, with -infinity after the last one.
SSDEVICE_INLINE inline const float* group_at(const float* logits, int start, int size,
                                             float (&room)[kGroup]) {
  if (size - start >= kGroup) return logits + start;
  std::fill(std::copy(logits + start, logits + size, room), room + kGroup, -kInfinity);
  return room;
}

// Finds the largest of each group, and of its logits with the same number modulo kLanes. Returns
// whether any is NaN, which the largest then need not be.
inline bool set_largest(const float* logits, int size, float* largest, float* of_lanes) {
  return fastest([=](auto) SSDEVICE_INLINE {
    int wrong = 0;
    float room[kGroup];
    for (int start = 0; start < size; start += kGroup) {
      const float* group = group_at(logits, start, size, room);
      float most[kLanes];
      int bad[kLanes] = {};
      for (int lane = 0; lane < kLanes; ++lane) most[lane] = -kInfinity;
      for (int at = 0; at < kGroup; at += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x = group[at + lane];
          most[lane] = most[lane] < x ? x : most[lane];
          bad[lane] |= x != x;
        }
      }
      std::copy(most, most + kLanes, of_lanes + start / kGroup * kLanes);
      for (int half = kLanes / 2; half; half /= 2) {
        for (int lane = 0; lane < half; ++lane) {
          const float x = most[half + lane];
          most[lane] = most[lane] < x ? x : most[lane];
          bad[lane] |= bad[half + lane];
        }
      }
      largest[start / kGroup] = most[0];
      wrong |= bad[0];
    }
    return wrong != 0;
  });
}

constexpr float kLog2e = 1.44269504f;

// x <= 0, or -126 below that: lower numbers have larger bits.
SSDEVICE_INLINE inline float bounded(float x) {
  constexpr uint32_t kLowest = 0xC2FC0000;  // -126
  const auto bits = bits_of<uint32_t>(x);
  return bits_of<float>(bits > kLowest ? kLowest : bits);
}

template <bool kFused>
SSDEVICE_INLINE inline float times_plus(float x, float y, float z) {
  return kFused ? std::fma(x, y, z) : x * y + z;
}

// 2^x of a bounded x, to 2e-7 of it: a polynomial of the fraction, shifted by the whole.
template <bool kFused>
SSDEVICE_INLINE inline float power_of_two(float x) {
  const float rounded = x + 12582912.0f;  // 1.5 * 2^23: no room for a fraction
  const float f = x - (rounded - 12582912.0f);
  float p = times_plus<kFused>(0.0013264727f, f, 0.009671513f);
  p = times_plus<kFused>(times_plus<kFused>(p, f, 0.055507336f), f, 0.24022242f);
  p = times_plus<kFused>(times_plus<kFused>(p, f, 0.693147f), f, 1.0f);
  return bits_of<float>(bits_of<uint32_t>(p) + (bits_of<uint32_t>(rounded) << 23));
}

// A row's logits, the largest of each group and of all. They weigh exp((logit - most) /
// temperature): each to 3e-7 of it, and as much as the exponent was rounded; sums to 2e-6.
struct Row {
  const float *logits, *largest;
  int size;
  float most, temperature;
};

// Of weights: all, those multiplied by their exponents, and those of logits that are not below a
// bound.
struct Sums {
  double weight = 0, moment = 0, above = 0;
};

constexpr int kTerms = 16;  // added up side by side

// The sums over the groups whose largest logit is at least `from` and below `end`; the moment, and
// `above`, only where they are asked for.
template <bool kMoment, bool kAbove>
Sums sums_of(const Row& row, float bound = 0, float from = -kInfinity, float end = kInfinity) {
  return fastest([=](auto fused) SSDEVICE_INLINE {
    double weight[kTerms] = {}, moment[kTerms] = {}, above[kTerms] = {};
    float room[kGroup];
    for (int start = 0; start < row.size; start += kGroup) {
      if (row.largest[start / kGroup] < from || row.largest[start / kGroup] >= end) continue;
      const float* group = group_at(row.logits, start, row.size, room);
      float weights[kTerms] = {}, moments[kTerms] = {}, aboves[kTerms] = {};
      for (int at = 0; at < kGroup; at += kTerms) {
        for (int term = 0; term < kTerms; ++term) {
          const float logit = group[at + term];
          const float x = bounded((logit - row.most) * (kLog2e / row.temperature));
          const float w = power_of_two<fused.value>(x);
          weights[term] += w;
          if (kMoment) moments[term] = times_plus<fused.value>(w, x, moments[term]);
          if (kAbove)
            aboves[term] +=
                bits_of<float>(bits_of<int32_t>(w) & -static_cast<int32_t>(logit >= bound));
        }
      }
      for (int term = 0; term < kTerms; ++term) {
        weight[term] += weights[term];
        if (kMoment) moment[term] += moments[term];
        if (kAbove) above[term] += aboves[term];
      }
    }
    Sums sums;
    for (int term = 0; term < kTerms; ++term) {
      sums.weight += weight[term];
      sums.moment += moment[term] / kLog2e;
      sums.above += above[term];
    }
    return sums;
  });
}

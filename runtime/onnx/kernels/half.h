// float16 as the cache holds it: to floats exactly, and from floats to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernel.h"

#if defined(__aarch64__) && !defined(SSDEVICE_PORTABLE)
inline float FloatOf(Half half) {
  __fp16 value;
  std::memcpy(&value, &half, 2);
  return value;
}

inline Half HalfOf(float value) {
  const __fp16 rounded = static_cast<__fp16>(value);
  Half half;
  std::memcpy(&half, &rounded, 2);
  return half;
}
#else
inline float FloatOf(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000) << 16, rest = half.bits & 0x7fff;
  // The exponent counts from 15 instead of 127: a multiplication moves it, and makes normal numbers of those below 2^-14.
  const uint32_t moved = rest << 13;
  float value;
  std::memcpy(&value, &moved, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (rest >= 0x7c00 ? 0x7f800000 | moved : bits) | sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline Half HalfOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};   // not a number
  if (size >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more
  if (size < 0x38800000) {  // below 2^-14: added to a number whose last place is 2^-24, which rounds as it should
    float small;
    std::memcpy(&small, &size, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000))};
  }
  const uint32_t odd = size >> 13 & 1;
  return {static_cast<uint16_t>(sign | ((size - 0x38000000 + 0xfff + odd) >> 13))};
}
#endif

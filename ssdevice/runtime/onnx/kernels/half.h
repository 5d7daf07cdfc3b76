// float16 as the cache holds it: to floats exactly, and from floats to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernel.h"

// A value of another type with the same bits.
template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The four bytes at a place.
template <typename To = int32_t>
To Word(const void* at) {
  To word;
  std::memcpy(&word, at, 4);
  return word;
}

#if defined(__aarch64__) && !defined(SSDEVICE_PORTABLE)
inline float FloatOf(Half half) { return BitCast<__fp16>(half); }
inline Half HalfOf(float value) { return BitCast<Half>(static_cast<__fp16>(value)); }
#else
inline float FloatOf(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  const uint32_t rest = half.bits & 0x7fff;
  // The exponent counts from 15 instead of 127: a multiplication moves it, and makes normal numbers
  // of those below 2^-14.
  const uint32_t moved = rest << 13;
  const uint32_t scaled = BitCast<uint32_t>(BitCast<float>(moved) * 0x1p112f);
  return BitCast<float>((rest >= 0x7c00 ? 0x7f800000 | moved : scaled) | sign);
}

inline Half HalfOf(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};   // not a number
  if (size >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more
  if (size < 0x38800000) {  // below 2^-14: added to a number whose last place is 2^-24, which
                            // rounds as it should
    const uint32_t rounded = BitCast<uint32_t>(BitCast<float>(size) + 0.5f);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000))};
  }
  const uint32_t odd = size >> 13 & 1;
  return {static_cast<uint16_t>(sign | ((size - 0x38000000 + 0xfff + odd) >> 13))};
}
#endif

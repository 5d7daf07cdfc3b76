// Sizes are what a graph says, and a graph may say anything: whoever adds or multiplies them does
// it here.
#pragma once

#include <cstdint>
#include <stdexcept>

inline void Require(bool holds, const char* otherwise) {
  if (!holds) throw std::runtime_error(otherwise);
}

constexpr const char* kTooLarge = "a size is too large";

inline int64_t Plus(int64_t a, int64_t b) {
  Require(!__builtin_add_overflow(a, b, &a), kTooLarge);
  return a;
}

inline int64_t Times(int64_t a, int64_t b) {
  Require(!__builtin_mul_overflow(a, b, &a), kTooLarge);
  return a;
}

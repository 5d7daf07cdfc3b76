// Weights of four bits in groups of columns, rows of eight bits in blocks, and their products: what
// ``Int4Linear`` and the first half of ``Int8Argmax`` share.
#pragma once

#include "linears.h"

constexpr int kZero = 8;                          // the code of zero
constexpr size_t kCodes = kBlock / 2 * kColumns;  // bytes of the codes of a block of a group

// A unit of a group is two blocks: the codes of both, then the scales of both: none (each is 1),
// the upper halves of floats whose lower halves are zero (bfloat16), or whole floats.
enum class Scales : size_t {
  kNone = 0,
  kShort = 2 * kColumns,
  kWhole = 4 * kColumns
};  // bytes of a block

constexpr size_t UnitOf(Scales scales) { return 2 * (kCodes + static_cast<size_t>(scales)); }

// Bytes of a group: its units.
inline size_t UnitsOf(int64_t inputs, Scales scales) {
  return UnitOf(scales) * static_cast<size_t>((Blocks(inputs) + 1) / 2);
}

// Where in the codes of a block the byte of inputs k (its low half) and 16 + k (its high half) of
// column c lies: there are 4 rows of 4 * kColumns bytes, and columns are side by side with four
// inputs of each in a row, so sums need no shuffling.
constexpr size_t ByteAt(int k, int c) {
  return static_cast<size_t>(4 * kColumns * (k / 4) + 4 * c + k % 4);
}

// Where in a group the codes of a block begin, and its scales.
inline size_t CodesAt(int block, Scales scales) {
  return UnitOf(scales) * static_cast<size_t>(block / 2) + kCodes * static_cast<size_t>(block % 2);
}

inline size_t ScalesAt(int block, Scales scales) {
  return UnitOf(scales) * static_cast<size_t>(block / 2) + 2 * kCodes +
         static_cast<size_t>(scales) * static_cast<size_t>(block % 2);
}

// Rows in eight bits: [blocks, R], each with its codes, the scale, and the amount that the zero
// code takes from a product.
struct BlockRows {
  struct Part {
    int8_t codes[kBlock];
    float scale;
    int32_t zero;
  };
  std::vector<Part> parts;
};

void Quantize(Context& context, const float* x, int64_t count, int64_t inputs, BlockRows* out);

// The products of this machine with weights that have such scales. Without scales, sums are
// integers: floats hold them up to 2^24, so there may be kMostUnscaled inputs.
ProductsOf<BlockRows> Int4Products(Scales scales);
constexpr int64_t kMostUnscaled = (1 << 24) / (127 * kZero);

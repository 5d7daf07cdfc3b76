// Products of few rows with quantized weights: what verifying a draft tree needs. The weights are
// read once for all rows, and every row is computed in the same way however many there are, so its
// bits do not depend on the others.
//
// Int4Linear(x [.., R, K] float, codes [N, K / 32, 16] uint8, scales [N, K / 32] float) -> [.., R,
// N] float: the operands of com.microsoft::MatMulNBits with bits = 4 and block_size = 32, zero at
// code 8. Per row r and block b of 32 inputs:
//   a[r, b] = max |x| / 127,  q = round to even(x * (127 / max |x|)),  d[r, n, b] = sum of q *
//   (code - 8), an integer y[r, n] = sum over b, in order, of d * (scales[n, b] * a[r, b]), every
//   operation rounded to float
// Kernels for different CPUs only differ in how they compute d, so all give the same bits.

#include <cmath>
#include <cstring>

#include "int4.h"

namespace {

constexpr float kLeast = 1e-35f;  // rows below are zeros: 127 / kLeast is still a number

using Rows = BlockRows;

Scales ScalesOf(const float* scales, int64_t count) {
  const bool halves = std::all_of(
      scales, scales + count, [](float scale) { return (BitCast<uint32_t>(scale) & 0xFFFF) == 0; });
  return halves ? Scales::kShort : Scales::kWhole;
}

Weights Packed(int64_t outputs, int64_t inputs, const uint8_t* codes, const float* scales,
               Scales kind) {
  const int blocks = Blocks(inputs);
  Weights made(kind == Scales::kShort ? "Int4Linear, short" : "Int4Linear", outputs, inputs,
               UnitsOf(inputs, kind));
  const size_t bytes = static_cast<size_t>(kind) / kColumns;
  for (int64_t n = 0; n < outputs; ++n) {
    const int c = static_cast<int>(n % kColumns);
    uint8_t* group = made.Group(n / kColumns);
    for (int b = 0; b < blocks; ++b) {
      uint8_t* block = group + CodesAt(b, kind);
      const uint8_t* from =
          codes + (n * blocks + b) * 16;  // two inputs a byte, the first in the low half
      for (int k = 0; k < 16; ++k) {
        const uint8_t low = from[k / 2] >> (4 * (k % 2)) & 15;
        const uint8_t high = from[8 + k / 2] >> (4 * (k % 2)) & 15;
        block[ByteAt(k, c)] = static_cast<uint8_t>(low | high << 4);
      }
      const uint32_t whole = BitCast<uint32_t>(scales[n * blocks + b]);
      const uint32_t bits = kind == Scales::kShort ? whole >> 16 : whole;
      std::memcpy(group + ScalesAt(b, kind) + bytes * static_cast<size_t>(c), &bits, bytes);
    }
  }
  return made;
}

void QuantizeBlock(const float* x, int count, Rows::Part* out) {
  float peak = 0;
  for (int k = 0; k < count; ++k) peak = std::max(peak, std::fabs(x[k]));
  const float inverse = peak > kLeast ? 127.0f / peak : 0.0f;
  int32_t sum = 0;
  for (int k = 0; k < kBlock; ++k) {
    out->codes[k] = k < count ? static_cast<int8_t>(std::nearbyint(x[k] * inverse)) : 0;
    sum += out->codes[k];
  }
  out->scale = peak * (1.0f / 127.0f);
  out->zero = -kZero * sum;
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EIGHT void QuantizeEight(const float* x, Rows::Part* out) {
  Eight v[4];
  Eight most = All(0.0f);
  for (int i = 0; i < 4; ++i) {
    v[i] = Load(x + kLanes * i);
    most = Max(most, Abs(v[i]));
  }
  const float peak = Largest(most);
  const Eight inverse = All(peak > kLeast ? 127.0f / peak : 0.0f);
  EightInts q[4];
  for (int i = 0; i < 4; ++i) q[i] = Nearest(Mul(v[i], inverse));
  Store(q, out->codes);
  out->scale = peak * (1.0f / 127.0f);
  // Of what is no number it wraps around.
  out->zero =
      static_cast<int32_t>(-static_cast<uint32_t>(kZero) *
                           static_cast<uint32_t>(Sum(Add(Add(q[0], q[1]), Add(q[2], q[3])))));
}
#endif

void QuantizeRow(const float* x, int64_t inputs, int64_t stride, Rows::Part* to) {
  for (int64_t at = 0; at < inputs; at += kBlock, to += stride) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, inputs - at));
#ifdef SSDEVICE_EIGHT
    if (kEight && count == kBlock) {
      QuantizeEight(x + at, to);
      continue;
    }
#endif
    QuantizeBlock(x + at, count, to);
  }
}

class Int4 : public Kernel {
 public:
  explicit Int4(const Info& info) {
    const auto [codes, scales] = Constants(info);
    const Shape& sizes = codes.shape;
    Require(
        sizes.Rank() == 3 && sizes[2] == kBlock / 2 && scales.shape.Count() == sizes[0] * sizes[1],
        "expected codes [N, K / 32, 16] and scales [N, K / 32]");
    kind_ = ScalesOf(scales.As<float>(), scales.shape.Count());
    weights_ =
        Shared(Packed(sizes[0], sizes[1] * kBlock, codes.As<uint8_t>(), scales.As<float>(), kind_));
  }

  void Compute(Context& context) const override {
    Multiply(*weights_, context, Int4Products(kind_));
  }

 private:
  Scales kind_;
  std::shared_ptr<const Weights> weights_;
};

}  // namespace

void Quantize(Context& context, const float* x, int64_t count, int64_t inputs, BlockRows* out) {
  out->parts.resize(static_cast<size_t>(count) * Blocks(inputs));
  context.EachRow(count, inputs, [=](int64_t row) {
    QuantizeRow(x + row * inputs, inputs, count, out->parts.data() + row);
  });
}

Operator Int4Linear() {
  return {"Int4Linear", Make<Int4>, {Type::kFloat, Type::kUint8, Type::kFloat}};
}

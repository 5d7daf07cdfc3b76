// Products with weights in float16, for the few that are not quantized: half of what float32 would
// read.
//
// HalfLinear(x [.., R, K] float, weight [K, N] half) -> [.., R, N] float. Products of inputs k, k +
// 4, k + 8 .. are added by fused multiply-adds in order, for each k < 4, and the four sums
// pairwise.

#include <cmath>

#include "linears.h"

namespace {

constexpr int kChains = 4;  // an addition takes four cycles

// For each group of columns [K, kColumns] halves.
Weights Packed(int64_t inputs, int64_t outputs, const Half* from) {
  Weights made(
      "HalfLinear", outputs, inputs,
      sizeof(Half) * kColumns * static_cast<size_t>(Whole(static_cast<size_t>(inputs), kChains)));
  for (int64_t k = 0; k < inputs; ++k)
    for (int64_t n = 0; n < outputs; ++n)
      reinterpret_cast<Half*>(made.Group(n / kColumns))[k * kColumns + n % kColumns] =
          from[k * outputs + n];
  return made;
}

void Portable(const float* x, int64_t inputs, const Half* weights, float* out) {
  float sums[kChains][kColumns] = {};
  for (int64_t k = 0; k < inputs; ++k, weights += kColumns)
    for (int c = 0; c < kColumns; ++c)
      sums[k % kChains][c] = std::fma(x[k], FloatOf(weights[c]), sums[k % kChains][c]);
  for (int c = 0; c < kColumns; ++c) out[c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EACH void Accumulate(float x, const Half* weights, Eight (&sums)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) sums[v] = Fma(All(x), Load(weights + kLanes * v), sums[v]);
}

SSDEVICE_EIGHT void InVectors(const float* x, int64_t inputs, const Half* weights, float* out) {
  Eight sums[kChains][kVectors];
  for (auto& chain : sums)
    for (Eight& sum : chain) sum = All(0.0f);
  int64_t k = 0;
  for (; k + kChains <= inputs; k += kChains) {
    const Half* from = weights + k * kColumns;
    Prefetch(reinterpret_cast<const uint8_t*>(from) + kAhead, kChains * kColumns * sizeof(Half));
    SSDEVICE_UNROLL for (int i = 0; i < kChains; ++i)
        Accumulate(x[k + i], from + i * kColumns, sums[i]);
  }
  for (; k < inputs; ++k) Accumulate(x[k], weights + k * kColumns, sums[k % kChains]);
  for (int v = 0; v < kVectors; ++v)
    Store(Add(Add(sums[0][v], sums[1][v]), Add(sums[2][v], sums[3][v])), out + kLanes * v);
}
#endif

class HalfWeighted : public Kernel {
 public:
  explicit HalfWeighted(const Info& info) {
    const Tensor weight = info.Constant(1);
    Require(weight.data && weight.shape.Rank() == 2, "its weight is no constant [K, N]");
    weights_ = Shared(Packed(weight.shape[0], weight.shape[1], weight.As<Half>()));
  }

  void Compute(Context& context) const override {
    const Tensor x = context.Input(0);
    const int64_t inputs = weights_->inputs;
    const int64_t outputs = weights_->outputs;
    const int64_t rows = x.shape.Rows();
    Require(x.shape.Last() == inputs, "the rows have another width than the weights");
    float* y = context.Output<float>(0, x.shape.WithLast(outputs));
#ifdef SSDEVICE_EIGHT
    const auto product = kEight ? InVectors : Portable;
#else
    const auto product = Portable;
#endif
    context.Each(weights_->Groups(), [&](int64_t group) {
      const int64_t first = group * kColumns;
      const int64_t columns = std::min<int64_t>(kColumns, outputs - first);
      float out[kColumns];
      for (int64_t r = 0; r < rows; ++r) {
        product(x.As<float>() + r * inputs, inputs,
                reinterpret_cast<const Half*>(weights_->Group(group)), out);
        std::copy(out, out + columns, y + r * outputs + first);
      }
    });
  }

 private:
  std::shared_ptr<const Weights> weights_;
};

}  // namespace

Operator HalfLinear() { return {"HalfLinear", Make<HalfWeighted>, {Type::kFloat, Type::kHalf}}; }

// What stands between the linears of a layer, one node for each.
//
// GatedSilu(x [.., 2 F]) -> [.., F] float: g * sigmoid(g) * u from left to right, where g is the
// first half of a row and u the other. sigmoid(g) = 1 / (1 + e) or, for g < 0, e / (1 + e), with e
// = e^-|g|.
//
// RotarySplit(x [1, R, (H + 2 N) D], cos [1, R, E], sin [1, R, E]; heads = H, kv_heads = N)
//     -> queries [1, R, H D], keys [1, R, N D], values [1, R, N D]
// Of every head of queries and keys, the halves of the first 2 E of its D elements are rotated:
// (a, b) -> (a cos - b sin, b cos + a sin), every operation rounded to float.
//
// AddNorm(x [.., F], y [.., F], weight [F]; epsilon) -> normed [.., F], sum [.., F] float: sum = x
// + y, and normed = sum * scale * weight from left to right with scale = 1 / sqrt(squares / F +
// epsilon). The squares are added by fused multiply-adds in eight lanes (element i in lane i % 8),
// and the lanes pairwise.

#include <algorithm>
#include <cmath>

#include "exponential.h"

namespace {

float Silu(float g, float u) {
  const float e = Exp(-std::fabs(g));
  return g * ((g < 0 ? e : 1.0f) / (1.0f + e)) * u;
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EIGHT void SiluEight(const float* gate, const float* up, int64_t count, float* y) {
  const Eight zero = All(0.0f);
  const Eight one = All(1.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Eight g = Load(gate + i);
    const Eight e = Exp(Sub(zero, Abs(g)));
    Store(Mul(Mul(g, Div(IfLess(g, zero, e, one), Add(one, e))), Load(up + i)), y + i);
  }
}
#endif

void GateRow(const float* gate, int64_t width, float* y) {
  const float* up = gate + width;
  int64_t done = 0;
#ifdef SSDEVICE_EIGHT
  if (kEight) SiluEight(gate, up, done = width / kLanes * kLanes, y);
#endif
  for (; done < width; ++done) y[done] = Silu(gate[done], up[done]);
}

struct Gate : Kernel {
  explicit Gate(const Info&) {}

  void Compute(Context& context) const override {
    const Tensor input = context.Input(0);
    const int64_t width = input.shape.Last() / 2;
    const int64_t rows = input.shape.Rows();
    Require(input.shape.Last() % 2 == 0, "its rows have no two halves");
    const float* x = input.As<float>();
    float* y = context.Output<float>(0, input.shape.WithLast(width));
    context.EachRow(rows, width,
                    [=](int64_t row) { GateRow(x + 2 * row * width, width, y + row * width); });
  }
};

void Rotate(const float* x, int64_t heads, int64_t dim, int64_t half, const float* cos,
            const float* sin, float* y) {
  for (int64_t head = 0; head < heads; ++head, x += dim, y += dim) {
    for (int64_t i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    std::copy(x + 2 * half, x + dim, y + 2 * half);
  }
}

class Split : public Kernel {
 public:
  explicit Split(const Info& info) : heads_(info.Int("heads")), kv_heads_(info.Int("kv_heads")) {
    Require(heads_ > 0 && kv_heads_ > 0, "a number of heads is not positive");
    all_ = Plus(heads_, Times(2, kv_heads_));
  }

  void Compute(Context& context) const override {
    const Tensor input = context.Input(0);
    const Tensor cosines = context.Input(1);
    const Tensor sines = context.Input(2);
    const Shape& whole = input.shape;
    const Shape& angles = cosines.shape;
    Require(whole.Rank() == 3 && whole[0] == 1 && angles.Rank() == 3 && angles[0] == 1 &&
                angles[1] == whole[1] && angles == sines.shape && whole[2] % all_ == 0 &&
                2 * angles[2] <= whole[2] / all_,
            "the angles do not fit the rows");
    const int64_t rows = whole[1];
    const int64_t dim = whole[2] / all_;
    const int64_t half = angles[2];
    const int64_t counts[] = {heads_, kv_heads_, kv_heads_};
    float* outputs[3];
    for (size_t i = 0; i < 3; ++i)
      outputs[i] = context.Output<float>(i, {1, rows, counts[i] * dim});
    context.EachRow(rows, whole[2], [&](int64_t row) {
      const float* x = input.As<float>() + row * whole[2];
      const float* cos = cosines.As<float>() + row * half;
      const float* sin = sines.As<float>() + row * half;
      for (size_t i = 0; i < 3; ++i) {
        const int64_t size = counts[i] * dim;
        float* y = outputs[i] + row * size;
        if (i < 2) Rotate(x, counts[i], dim, half, cos, sin, y);
        if (i == 2) std::copy(x, x + size, y);
        x += size;
      }
    });
  }

 private:
  int64_t heads_, kv_heads_, all_;
};

void AddScalar(const float* x, const float* y, int64_t first, int64_t end, float* sum,
               float* lanes) {
  for (int64_t i = first; i < end; ++i) {
    sum[i] = x[i] + y[i];
    lanes[i % kLanes] = std::fma(sum[i], sum[i], lanes[i % kLanes]);
  }
}

void ScaleScalar(const float* sum, const float* weight, float scale, int64_t first, int64_t end,
                 float* normed) {
  for (int64_t i = first; i < end; ++i) normed[i] = sum[i] * scale * weight[i];
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EIGHT void AddEight(const float* x, const float* y, int64_t end, float* sum,
                             float* lanes) {
  Eight squares = All(0.0f);
  for (int64_t i = 0; i < end; i += kLanes) {
    const Eight total = Add(Load(x + i), Load(y + i));
    Store(total, sum + i);
    squares = Fma(total, total, squares);
  }
  Store(squares, lanes);
}

SSDEVICE_EIGHT void ScaleEight(const float* sum, const float* weight, float scale, int64_t end,
                               float* normed) {
  const Eight by = All(scale);
  for (int64_t i = 0; i < end; i += kLanes)
    Store(Mul(Mul(Load(sum + i), by), Load(weight + i)), normed + i);
}
#endif

void Normalize(const float* x, const float* y, const float* weight, int64_t width, float epsilon,
               float* normed, float* sum) {
  float lanes[kLanes] = {};
  int64_t done = 0;
#ifdef SSDEVICE_EIGHT
  if (kEight) AddEight(x, y, done = width / kLanes * kLanes, sum, lanes);
#endif
  AddScalar(x, y, done, width, sum, lanes);
  const float scale = 1.0f / std::sqrt(PairwiseSum(lanes) / static_cast<float>(width) + epsilon);
#ifdef SSDEVICE_EIGHT
  if (kEight) ScaleEight(sum, weight, scale, done, normed);
#endif
  ScaleScalar(sum, weight, scale, done, width, normed);
}

class Norm : public Kernel {
 public:
  explicit Norm(const Info& info) : epsilon_(info.Float("epsilon")) {}

  void Compute(Context& context) const override {
    const Tensor x = context.Input(0);
    const Tensor y = context.Input(1);
    const Tensor weight = context.Input(2);
    const int64_t width = x.shape.Last();
    const int64_t rows = x.shape.Rows();
    Require(x.shape == y.shape && weight.shape == Shape{width},
            "its rows do not fit each other or the weight");
    auto* normed = context.Output<float>(0, x.shape);
    auto* sum = context.Output<float>(1, x.shape);
    context.EachRow(rows, width, [&](int64_t row) {
      const int64_t at = row * width;
      Normalize(x.As<float>() + at, y.As<float>() + at, weight.As<float>(), width, epsilon_,
                normed + at, sum + at);
    });
  }

 private:
  float epsilon_;
};

}  // namespace

Operator AddNorm() {
  return {"AddNorm", Make<Norm>, {Type::kFloat, Type::kFloat, Type::kFloat}, 2};
}
Operator GatedSilu() { return {"GatedSilu", Make<Gate>, {Type::kFloat}}; }
Operator RotarySplit() {
  return {"RotarySplit", Make<Split>, {Type::kFloat, Type::kFloat, Type::kFloat}, 3};
}

// For processors with NEON's dot product: how many results of a linear differ in a bit from what its source says at the top.
// Compiled with INT4, INT4_WHOLE (scales of 32 bits), INT8 or ARGMAX, and run under an emulator, where there is no ONNX Runtime to call the kernels.

#include <cstdio>
#include <random>

#include "crew.h"
#include "rows.cpp"

#ifdef INT8
#include "int8.cpp"
#else
#include "int4_products.cpp"
#ifdef ARGMAX
#include "argmax.cpp"
#else
#include "int4.cpp"
#endif
#endif

// Nothing is called through ONNX Runtime here.
int CrewSize() { return 0; }
void For(const ort::Api&, ort::KernelContext*, int, size_t total, Work work, void* data) {
  for (size_t i = 0; i < total; ++i) work(data, i);
}

namespace {

using Floats = std::vector<float>;

float Peak(const float* x, int64_t count) {
  float peak = 0;
  for (int64_t k = 0; k < count; ++k) peak = std::fabs(x[k]) > peak ? std::fabs(x[k]) : peak;
  return peak;
}

int64_t Product(const float* x, float inverse, const int* levels, int64_t count, bool divide) {
  int64_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += static_cast<int64_t>(std::nearbyint(divide ? x[k] / inverse : x[k] * inverse)) * levels[k];
  return sum;
}

#if defined(INT8) || defined(ARGMAX)
constexpr int kLeastLevel = -128, kLevels = 256;

int64_t ScalesOf(int64_t outputs, int64_t) { return outputs; }

auto Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels, const Floats& scales) {
  std::vector<int8_t> codes(levels.size());
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k) codes[k * outputs + n] = static_cast<int8_t>(levels[n * inputs + k]);
  return Packed(inputs, outputs, codes.data(), scales.data());
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column, const Floats& scales) {
  const float scale = Peak(x, inputs) * (1.0f / 127.0f);
  return static_cast<float>(Product(x, scale, levels, inputs, true)) * scales[column] * scale;
}
#else
#ifdef INT4_WHOLE
constexpr auto kScales = Scales::kWhole;
#else
constexpr auto kScales = Scales::kShort;
#endif
constexpr int kLeastLevel = -8, kLevels = 16;

int64_t ScalesOf(int64_t outputs, int64_t inputs) { return outputs * (inputs / kBlock); }

Weights Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels, const Floats& scales) {
  std::vector<uint8_t> codes(levels.size() / 2);
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint8_t>((levels[2 * i] + kZero) | ((levels[2 * i + 1] + kZero) << 4));
  return Packed(outputs, inputs, codes.data(), scales.data(), kScales);
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column, const Floats& scales) {
  float y = 0;
  for (int64_t b = 0; b < inputs / kBlock; ++b, x += kBlock, levels += kBlock) {
    const float peak = Peak(x, kBlock);
    const int64_t d = Product(x, 127.0f / peak, levels, kBlock, false);
    y += static_cast<float>(d) * (scales[column * (inputs / kBlock) + b] * (peak * (1.0f / 127.0f)));
  }
  return y;
}
#endif

// How many of [count] rows, or of their products, differ, and of how many.
template <typename Made>
std::pair<int64_t, int64_t> Differ(const Made& weights, const Floats& x, int64_t count, int64_t outputs, int64_t inputs,
                                   const std::vector<int>& levels, const Floats& scales) {
  Floats expected(count * outputs);
  for (int64_t i = 0; i < count * outputs; ++i)
    expected[i] = Expected(&x[i / outputs * inputs], &levels[i % outputs * inputs], inputs, i % outputs, scales);
  int64_t wrong = 0;
#ifdef ARGMAX
  Rows rows;
  std::vector<int64_t> best(count);
  rows.Fill(x.data(), count, inputs);
  BestColumns(ort::Api(nullptr), nullptr, 0, weights, rows, count, best.data());
  for (int64_t r = 0; r < count; ++r) {
    const float* row = &expected[r * outputs];
    wrong += best[r] != std::max_element(row, row + outputs) - row;
  }
  return {wrong, count};
#else
#ifdef INT8
  ByteRows rows;
  const ProductsOf<ByteRows> products{kDotProducts, kTile};
#else
  BlockRows rows;
  const ProductsOf<BlockRows> products = Int4Products(kScales);
#endif
  Floats y(count * outputs);
  Quantize(x.data(), count, inputs, &rows);
  CallOf<decltype(rows)>{weights, rows, products, count, 1, y.data()}.Run(0);
  for (int64_t i = 0; i < count * outputs; ++i) wrong += y[i] != expected[i];
  return {wrong, count * outputs};
#endif
}

}  // namespace

int main() {
  std::mt19937 drawn(0);
  std::normal_distribution<float> normal;
  int64_t wrong = kDot ? 0 : 1, all = 0;
  for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{96, 576}, {37, 64}, {48, 1536}}) {
    std::vector<int> levels(outputs * inputs);
    for (int& level : levels) level = static_cast<int>(drawn() % kLevels) + kLeastLevel;
    Floats scales(ScalesOf(outputs, inputs));
    for (float& scale : scales) scale = std::exp(normal(drawn));
#if !defined(INT8) && !defined(ARGMAX) && !defined(INT4_WHOLE)
    for (float& scale : scales) {
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      bits &= 0xFFFF0000;
      std::memcpy(&scale, &bits, 4);
    }
#endif
    const auto weights = Made(outputs, inputs, levels, scales);
    for (const int64_t count : {1, 2, 3, 4, 5, 7, 11}) {
      Floats x(count * inputs);
      for (float& value : x) value = normal(drawn);
      const auto [differing, of] = Differ(weights, x, count, outputs, inputs, levels, scales);
      wrong += differing;
      all += of;
    }
  }
  std::printf("%lld of %lld differ\n", static_cast<long long>(wrong), static_cast<long long>(all));
  return wrong != 0;
}

// The bits of what operators compute from fixed numbers: a line for each operator and shape, the
// same on every processor.

#include <cmath>
#include <cstdio>
#include <cstring>

#include "half.h"
#include "stand_in.h"

Operator AddNorm();
Operator GatedSilu();
Operator HalfLinear();
Operator HalfTreeAttention();
Operator Int4Linear();
Operator Int8Linear();
Operator LowRank1();
Operator TreeAttention();

namespace {

// Numbers of about -4 to 4 that every processor computes alike.
float Next() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<float>(static_cast<int32_t>(state >> 40) - (1 << 23)) * 0x1p-21f;
}

template <typename T>
struct Array {
  std::vector<T> values;
  Shape shape;

  template <typename Make>
  Array(Shape sizes, Make make) : values(static_cast<size_t>(sizes.Count())), shape(sizes) {
    for (T& value : values) value = make();
  }
  operator Tensor() const { return {values.data(), shape, TypeOf(T{})}; }
};

Array<float> Floats(Shape shape) { return {shape, Next}; }
Array<Half> Halves(Shape shape) {
  return {shape, [] { return HalfOf(Next()); }};
}

void Say(const Operator& op, const std::vector<Tensor>& inputs, int64_t kv_heads = 0) {
  Given given;
  given.ints["kv_heads"] = kv_heads;
  given.inputs = inputs;
  Call<float> call;
  call.inputs = inputs;
  op.make(given)->Compute(call);
  uint64_t hash = 14695981039346656037u;
  for (const auto& [index, values] : call.outputs) {
    for (const float value : values) {
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      hash = (hash ^ bits) * 1099511628211u;
    }
  }
  const float first = call.outputs[0][0];
  std::printf("%s %g %016llx\n", op.name, static_cast<double>(first),
              static_cast<unsigned long long>(hash));
}

template <typename Cached>
void SayAttention(const Operator& op, int64_t rows, int64_t past, int64_t heads, int64_t groups,
                  int64_t dim, Cached cached) {
  const int64_t width = heads * dim;
  const auto q = Floats({1, rows, groups * width}), keys = Floats({1, rows, width}),
             values = Floats({1, rows, width});
  const auto past_keys = cached({past, width}), past_values = cached({past, width});
  int64_t at = 0;
  const Array<float> mask(
      {rows, 1, past + rows}, [&] {  // a chain over all of the cache but its last two rows
        const int64_t row = at / (past + rows), column = at++ % (past + rows);
        return column < past - 2 || (column >= past && column - past <= row) ? 0.0f : -1e9f;
      });
  const auto none = Floats({0, width});
  Say(op, {q, past_keys, keys, none, past_values, values, none, mask}, heads);
}

}  // namespace

int main() {
  for (const int64_t width : {576, 41, 8}) {
    Say(AddNorm(), {Floats({1, 3, width}), Floats({1, 3, width}), Floats({width})});
    auto gates = Floats({1, 3, 2 * width});
    gates.values[0] = 0.0f;
    gates.values[1] = -0.0f;
    gates.values[2] = -300.0f;
    gates.values[3] = 300.0f;
    Say(GatedSilu(), {gates});
  }
  for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{576, 48}, {70, 37}, {3, 5}}) {
    auto x = Floats({1, 5, inputs});
    std::fill_n(x.values.begin(), inputs, 0.0f);
    Say(HalfLinear(), {x, Halves({inputs, outputs})});
    const Array<int8_t> codes({inputs, outputs}, [] { return static_cast<int8_t>(Next() * 31); });
    Say(Int8Linear(), {x, codes, Floats({outputs}), Tensor{}});
    Say(LowRank1(),
        {Floats({1, 5, 96}), x, codes, Floats({outputs}), Tensor{}, Floats({outputs, 96})});
    const int64_t blocks = (inputs + 31) / 32;
    const Array<uint8_t> nibbles({outputs, blocks, 16}, [] {
      return static_cast<uint8_t>(static_cast<int>(Next() * 1000));
    });
    Say(Int4Linear(), {Floats({1, 5, 32 * blocks}), nibbles, Floats({outputs, blocks})});
  }
  for (const int64_t dim : {64, 24, 12}) {
    for (const auto& [rows, past, groups] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 256, 3}, {4, 67, 5}, {5, 9, 1}}) {
      SayAttention(TreeAttention(), rows, past, 3, groups, dim, Floats);
      SayAttention(HalfTreeAttention(), rows, past, 3, groups, dim, Halves);
    }
  }
}

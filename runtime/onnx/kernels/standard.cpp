// Operators of ONNX as steps of a region: positions, masks, choices and views. They are so small that a node of its own takes longer
// for each of them than they do. All have the bits that ONNX Runtime's have: they move elements, or round one operation at a time.

#include <cmath>
#include <type_traits>

#include "standard.h"

namespace {

// Element by element, T of two T2.
template <typename T2, typename Op>
void Pairs(Context& context, Op op) {
  using T = decltype(op(T2{}, T2{}));
  const Tensor a = context.Input(0), b = context.Input(1);
  const Shape whole = Repeated(a.shape, b.shape);
  T* y = context.Output<T>(0, whole);
  EachLine<2>(whole, {a.shape, b.shape}, [&](int64_t to, const int64_t* from, const int64_t* step, int64_t width) {
    const T2 *first = a.As<T2>() + from[0], *second = b.As<T2>() + from[1];
    for (int64_t i = 0; i < width; ++i) y[to + i] = op(first[i * step[0]], second[i * step[1]]);
  });
}

template <typename Op>
void OfNumbers(Context& context, Op op) {
  const Type type = context.Input(0).type;
  Require(context.Input(1).type == type, "its inputs have two types");
  AsNumber(type, [&](auto number) {
    using T = decltype(number);
    Pairs<T>(context, [&](T a, T b) { return op(a, b); });
  });
}

// A number as operators calculate with it: integers wrap around.
float Wrapping(float x) { return x; }
template <typename T>
std::make_unsigned_t<T> Wrapping(T x) { return static_cast<std::make_unsigned_t<T>>(x); }

void Add(Context& context) { OfNumbers(context, [](auto a, auto b) { return static_cast<decltype(a)>(Wrapping(a) + Wrapping(b)); }); }
void Sub(Context& context) { OfNumbers(context, [](auto a, auto b) { return static_cast<decltype(a)>(Wrapping(a) - Wrapping(b)); }); }
void Mul(Context& context) { OfNumbers(context, [](auto a, auto b) { return static_cast<decltype(a)>(Wrapping(a) * Wrapping(b)); }); }
void Less(Context& context) { OfNumbers(context, [](auto a, auto b) { return a < b; }); }
void LessOrEqual(Context& context) { OfNumbers(context, [](auto a, auto b) { return a <= b; }); }
void Equal(Context& context) { OfNumbers(context, [](auto a, auto b) { return a == b; }); }

void And(Context& context) {
  Require(context.Input(0).type == Type::kBool && context.Input(1).type == Type::kBool, "its inputs are not true or false");
  Pairs<uint8_t>(context, [](uint8_t a, uint8_t b) { return a && b; });
}

void Where(Context& context) {
  const Tensor when = context.Input(0), x = context.Input(1), y = context.Input(2);
  Require(when.type == Type::kBool && x.type == y.type, "its inputs have other types");
  const Shape whole = Repeated(when.shape, Repeated(x.shape, y.shape));
  void* out = context.Output(0, whole, x.type);
  AsElement(x.type, [&](auto element) {
    using T = decltype(element);
    EachLine<3>(whole, {when.shape, x.shape, y.shape}, [&](int64_t to, const int64_t* from, const int64_t* step, int64_t width) {
      const uint8_t* holds = when.As<uint8_t>() + from[0];
      const T *first = x.As<T>() + from[1], *second = y.As<T>() + from[2];
      for (int64_t i = 0; i < width; ++i) static_cast<T*>(out)[to + i] = holds[i * step[0]] ? first[i * step[1]] : second[i * step[2]];
    });
  });
}

// Of matrices.
void MatMul(Context& context) {
  const Tensor a = context.Input(0), b = context.Input(1);
  Require(a.type == Type::kFloat && b.type == Type::kFloat && a.shape.Rank() == 2 && b.shape.Rank() == 2 && a.shape[1] == b.shape[0],
          "its matrices do not fit each other");
  const int64_t rows = a.shape[0], inner = a.shape[1], columns = b.shape[1];
  float* y = context.Output<float>(0, {rows, columns});
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < inner; ++k) sum = std::fma(a.As<float>()[r * inner + k], b.As<float>()[k * columns + c], sum);
      y[r * columns + c] = sum;
    }
}

// Of the last axis, which goes; the first of several.
void ArgMax(Context& context) {
  const Tensor x = context.Input(0);
  Require(x.type == Type::kFloat && x.shape.Rank() > 0 && x.shape.Last() > 0, "it takes rows of floats");
  Shape rows;
  for (size_t i = 0; i + 1 < x.shape.Rank(); ++i) rows.Append(x.shape[i]);
  auto* y = context.Output<int64_t>(0, rows);
  const int64_t width = x.shape.Last();
  for (int64_t r = 0; r < rows.Count(); ++r) {
    const float* row = x.As<float>() + r * width;
    y[r] = std::max_element(row, row + width) - row;
  }
}

}  // namespace

std::vector<Operator> MovingOperators();

const std::vector<Operator>& StandardOperators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> operators = MovingOperators();
    operators.insert(operators.end(), {
      {"Add", Make<Plain<Add>>, {kAny, kAny}},
      {"And", Make<Plain<And>>, {kAny, kAny}},
      {"ArgMax", Make<Plain<ArgMax>>, {kAny}},
      {"Equal", Make<Plain<Equal>>, {kAny, kAny}},
      {"Less", Make<Plain<Less>>, {kAny, kAny}},
      {"LessOrEqual", Make<Plain<LessOrEqual>>, {kAny, kAny}},
      {"MatMul", Make<Plain<MatMul>>, {kAny, kAny}},
      {"Mul", Make<Plain<Mul>>, {kAny, kAny}},
      {"Sub", Make<Plain<Sub>>, {kAny, kAny}},
      {"Where", Make<Plain<Where>>, {kAny, kAny, kAny}},
    });
    return operators;
  }();
  return all;
}

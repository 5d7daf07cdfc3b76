// Operators of ONNX that move elements, make numbers of shapes, or change a type, as steps of a region; see standard.cpp.

#include <cstring>

#include "eight.h"
#include "standard.h"

namespace {

constexpr int64_t kMostCounted = 1 << 24;  // by Range, which makes positions: a context has 2^20 at most

// A number, or every number, of a vector of indices.
int64_t IndexAt(const Tensor& from, int64_t at) {
  Require(from.type == Type::kInt32 || from.type == Type::kInt64, "indices are no integers");
  Require(at < from.shape.Count(), "an index is missing");
  return from.type == Type::kInt32 ? from.As<int32_t>()[at] : from.As<int64_t>()[at];
}

Shape ShapeFrom(const Tensor& sizes) {
  Shape shape;
  for (int64_t i = 0; i < sizes.shape.Count(); ++i) shape.Append(IndexAt(sizes, i));
  return shape;
}

int64_t Product(const Shape& shape, size_t first, size_t end) {
  int64_t product = 1;
  for (size_t i = first; i < end; ++i) product *= shape[i];
  return product;
}

size_t AxisOf(int64_t axis, const Shape& shape) {
  if (axis < 0) axis += static_cast<int64_t>(shape.Rank());
  Require(axis >= 0 && axis < static_cast<int64_t>(shape.Rank()), "there is no such axis");
  return static_cast<size_t>(axis);
}

// How many numbers there are from one to another.
int64_t CountOf(int64_t first, int64_t end, int64_t step) { return first < end ? (Minus(end, first) - 1) / step + 1 : 0; }

// A step along an axis.
template <void (*Do)(Context&, int64_t)>
struct Along : Kernel {
  explicit Along(const Info& info) : axis(info.Int("axis")) {}
  void Compute(Context& context) const override { Do(context, axis); }
  int64_t axis;
};

void Copy(Context& context, const Tensor& from, const Shape& shape) {
  Require(shape.Count() == from.shape.Count(), "the shape has another number of elements");
  const size_t bytes = static_cast<size_t>(shape.Count()) * BytesOf(from.type);
  void* to = context.Output(0, shape, from.type);
  if (bytes > 0) std::memcpy(to, from.data, bytes);
}

void Reshape(Context& context) {
  const Tensor x = context.Input(0), sizes = context.Input(1);
  Shape shape;
  size_t open = Shape::kMost;  // the axis whose size is -1: what is left
  for (int64_t i = 0; i < sizes.shape.Count(); ++i) {
    const size_t axis = shape.Rank();
    int64_t size = IndexAt(sizes, i);
    if (size == 0 && axis < x.shape.Rank()) size = x.shape[axis];
    if (size == -1 && open == Shape::kMost) open = axis, size = 1;
    shape.Append(size);
  }
  if (open < shape.Rank()) shape = shape.With(open, shape.Count() ? x.shape.Count() / shape.Count() : 0);
  Copy(context, x, shape);
}

void Expand(Context& context) {
  const Tensor x = context.Input(0);
  const Shape whole = Repeated(x.shape, ShapeFrom(context.Input(1)));
  void* y = context.Output(0, whole, x.type);
  AsElement(x.type, [&](auto element) {
    using T = decltype(element);
    EachLine<1>(whole, {x.shape}, [&](int64_t to, const int64_t* from, const int64_t* step, int64_t width) {
      for (int64_t i = 0; i < width; ++i) static_cast<T*>(y)[to + i] = x.As<T>()[from[0] + i * step[0]];
    });
  });
}

void Concat(Context& context, int64_t along) {
  const size_t count = context.Inputs();
  const Tensor first = context.Input(0);
  const size_t axis = AxisOf(along, first.shape);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor other = context.Input(i);
    Require(other.type == first.type && other.shape.Rank() == first.shape.Rank() &&
                other.shape.With(axis, 1) == first.shape.With(axis, 1),
            "its inputs do not fit each other");
    total = Plus(total, other.shape[axis]);
  }
  const Shape joined = first.shape.With(axis, total);
  auto* y = static_cast<uint8_t*>(context.Output(0, joined, first.type));
  if (joined.Count() == 0) return;
  const int64_t outer = Product(joined, 0, axis);
  const int64_t inner = Product(joined, axis + 1, joined.Rank()) * static_cast<int64_t>(BytesOf(first.type));
  for (int64_t at = 0; at < outer; ++at)
    for (size_t i = 0; i < count; ++i) {
      const Tensor part = context.Input(i);
      const int64_t bytes = part.shape[axis] * inner;
      if (bytes > 0) std::memcpy(y, part.As<uint8_t>() + at * bytes, static_cast<size_t>(bytes));
      y += bytes;
    }
}

void Gather(Context& context, int64_t along) {
  const Tensor x = context.Input(0), ids = context.Input(1);
  const size_t axis = AxisOf(along, x.shape);
  Shape whole;
  for (size_t i = 0; i < axis; ++i) whole.Append(x.shape[i]);
  for (size_t i = 0; i < ids.shape.Rank(); ++i) whole.Append(ids.shape[i]);
  for (size_t i = axis + 1; i < x.shape.Rank(); ++i) whole.Append(x.shape[i]);
  auto* y = static_cast<uint8_t*>(context.Output(0, whole, x.type));
  if (whole.Count() == 0) return;
  const int64_t size = x.shape[axis], outer = Product(x.shape, 0, axis), count = ids.shape.Count();
  const int64_t inner = Product(x.shape, axis + 1, x.shape.Rank()) * static_cast<int64_t>(BytesOf(x.type));
  for (int64_t at = 0; at < outer; ++at)
    for (int64_t i = 0; i < count; ++i, y += inner) {
      const int64_t id = IndexAt(ids, i), row = id < 0 ? id + size : id;
      Require(row >= 0 && row < size, "an index is too large");
      std::memcpy(y, x.As<uint8_t>() + (at * size + row) * inner, static_cast<size_t>(inner));
    }
}

// Of one axis, forwards.
void Slice(Context& context) {
  const Tensor x = context.Input(0);
  int64_t bounds[4];
  for (size_t i = 0; i < 4; ++i) {
    const Tensor bound = context.Input(i + 1);
    Require(bound.shape.Count() == 1, "it cuts one axis only");
    bounds[i] = IndexAt(bound, 0);
  }
  const size_t axis = AxisOf(bounds[2], x.shape);
  const int64_t size = x.shape[axis], step = bounds[3];
  Require(step > 0, "it cuts forwards only");
  for (int64_t* bound : {&bounds[0], &bounds[1]})
    *bound = std::clamp<int64_t>(*bound < 0 ? *bound + size : *bound, 0, size);
  const int64_t count = CountOf(bounds[0], bounds[1], step);
  const Shape whole = x.shape.With(axis, count);
  auto* y = static_cast<uint8_t*>(context.Output(0, whole, x.type));
  if (whole.Count() == 0) return;
  const int64_t outer = Product(whole, 0, axis);
  const int64_t inner = Product(whole, axis + 1, whole.Rank()) * static_cast<int64_t>(BytesOf(x.type));
  for (int64_t at = 0; at < outer; ++at)
    for (int64_t i = 0; i < count; ++i, y += inner)
      std::memcpy(y, x.As<uint8_t>() + (at * size + bounds[0] + i * step) * inner, static_cast<size_t>(inner));
}

struct Cast : Kernel {
  explicit Cast(const Info& info) : to(static_cast<Type>(info.Int("to"))) {}

  void Compute(Context& context) const override {
    const Tensor x = context.Input(0);
    if (x.type == to) return Copy(context, x, x.shape);
    if (to == Type::kHalf) {
      Require(x.type == Type::kFloat, "it makes float16 of floats only");
      return HalvesOf(x.As<float>(), x.shape.Count(), context.Output<Half>(0, x.shape));
    }
    if (to == Type::kBool) return From(x, [](auto value) { return value != 0; }, context.Output<bool>(0, x.shape));
    AsNumber(to, [&](auto made) {
      using T = decltype(made);
      From(x, [](auto value) { return static_cast<T>(value); }, context.Output<T>(0, x.shape));
    });
  }

  template <typename Made, typename T>
  static void From(const Tensor& x, Made made, T* y) {
    const int64_t count = x.shape.Count();
    if (x.type == Type::kBool) {  // as bytes, of which a graph may give others than 0 and 1
      const T none = made(false), one = made(true);
      std::transform(x.As<uint8_t>(), x.As<uint8_t>() + count, y, [=](uint8_t value) { return value ? one : none; });
      return;
    }
    AsNumber(x.type, [&](auto element) {
      const auto* from = x.As<decltype(element)>();
      std::transform(from, from + count, y, made);
    });
  }

  Type to;
};

struct ShapeOf : Kernel {
  explicit ShapeOf(const Info& info) : start(info.Int("start")), end(info.Int("end")) {}

  void Compute(Context& context) const override {
    const Shape shape = context.Input(0).shape;
    Require(start >= 0 && start <= end && end <= static_cast<int64_t>(shape.Rank()), "there is no such axis");
    std::copy(shape.Sizes() + start, shape.Sizes() + end, context.Output<int64_t>(0, {end - start}));
  }

  int64_t start, end;
};

void Range(Context& context) {
  const Tensor start = context.Input(0), limit = context.Input(1), delta = context.Input(2);
  const int64_t first = IndexAt(start, 0), step = IndexAt(delta, 0);
  Require(step > 0 && start.type == limit.type && start.type == delta.type, "it counts upwards only, in one type");
  const int64_t count = CountOf(first, IndexAt(limit, 0), step);
  Require(count <= kMostCounted, kTooLarge);
  AsNumber(start.type, [&](auto number) {
    auto* y = context.Output<decltype(number)>(0, {count});
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<decltype(number)>(first + i * step);
  });
}

}  // namespace

std::vector<Operator> MovingOperators() {
  return {
      {"Cast", Make<Cast>, {kAny}},
      {"Concat", Make<Along<Concat>>, {}},
      {"Expand", Make<Plain<Expand>>, {kAny, kAny}},
      {"Gather", Make<Along<Gather>>, {kAny, kAny}},
      {"Range", Make<Plain<Range>>, {kAny, kAny, kAny}},
      {"Reshape", Make<Plain<Reshape>>, {kAny, kAny}},
      {"Shape", Make<ShapeOf>, {kAny}},
      {"Slice", Make<Plain<Slice>>, {kAny, kAny, kAny, kAny, kAny}},
  };
}

// What the operators of ONNX in standard.cpp and moves.cpp share: repeated shapes, types, axes and indices.
#pragma once

#include "kernel.h"

// The lines of the last axis of tensors that are repeated to a shape: run(first of the result, firsts, steps) for each.
template <size_t N, typename Run>
void EachLine(const Shape& whole, const Shape (&parts)[N], Run run) {
  const size_t rank = whole.Rank();
  const int64_t width = rank ? whole.Last() : 1;
  int64_t strides[N][Shape::kMost + 1] = {}, firsts[N] = {}, steps[N], place[Shape::kMost] = {};
  for (size_t n = 0; n < N; ++n) {
    int64_t stride = 1;
    for (size_t back = 1; back <= parts[n].Rank(); ++back) {
      const int64_t size = parts[n][parts[n].Rank() - back];
      strides[n][rank - back] = size == 1 ? 0 : stride;
      stride *= size;
    }
    steps[n] = rank ? strides[n][rank - 1] : 0;
  }
  for (int64_t first = 0, end = whole.Count(); first < end; first += width) {
    run(first, firsts, steps);
    for (size_t axis = rank; axis-- > 1;) {  // the next line: the axes before the last count as digits do
      const size_t outer = axis - 1;
      const bool carry = ++place[outer] == whole[outer];
      for (size_t n = 0; n < N; ++n) firsts[n] += strides[n][outer] * (carry ? 1 - whole[outer] : 1);
      if (!carry) break;
      place[outer] = 0;
    }
  }
}

// The shape to which two are repeated.
inline Shape Repeated(const Shape& a, const Shape& b) {
  const Shape& longer = a.Rank() < b.Rank() ? b : a;
  const Shape& other = a.Rank() < b.Rank() ? a : b;
  Shape whole = longer;
  for (size_t back = 1; back <= other.Rank(); ++back) {
    const size_t axis = longer.Rank() - back;
    const int64_t mine = longer[axis], its = other[other.Rank() - back];
    Require(mine == its || mine == 1 || its == 1, "its inputs do not fit each other");
    whole = whole.With(axis, mine == 1 ? its : mine);
  }
  return whole;
}

// run(an element of this type), for types of numbers.
template <typename Run>
void AsNumber(Type type, Run run) {
  if (type == Type::kFloat) return run(float{});
  if (type == Type::kInt32) return run(int32_t{});
  Require(type == Type::kInt64, "it does not take inputs of this type");
  run(int64_t{});
}

// run(an element of this size), for what is only moved.
template <typename Run>
void AsElement(Type type, Run run) {
  const size_t bytes = BytesOf(type);
  if (bytes == 8) return run(uint64_t{});
  if (bytes == 4) return run(uint32_t{});
  if (bytes == 2) return run(uint16_t{});
  run(uint8_t{});
}

// A number, or every number, of a vector of indices.
inline int64_t IndexAt(const Tensor& from, int64_t at) {
  Require(from.type == Type::kInt32 || from.type == Type::kInt64, "indices are no integers");
  Require(at < from.shape.Count(), "an index is missing");
  return from.type == Type::kInt32 ? from.As<int32_t>()[at] : from.As<int64_t>()[at];
}

inline Shape ShapeFrom(const Tensor& sizes) {
  Shape shape;
  for (int64_t i = 0; i < sizes.shape.Count(); ++i) shape.Append(IndexAt(sizes, i));
  return shape;
}

inline void RequireSizes(const Shape& shape) {
  for (size_t i = 0; i < shape.Rank(); ++i) Require(shape[i] >= 0, "a size is negative");
}

inline int64_t Product(const Shape& shape, size_t first, size_t end) {
  int64_t product = 1;
  for (size_t i = first; i < end; ++i) product *= shape[i];
  return product;
}

inline size_t AxisOf(int64_t axis, const Shape& shape) {
  if (axis < 0) axis += static_cast<int64_t>(shape.Rank());
  Require(axis >= 0 && axis < static_cast<int64_t>(shape.Rank()), "there is no such axis");
  return static_cast<size_t>(axis);
}

// A step without attributes.
template <void (*Do)(Context&)>
struct Plain : Kernel {
  explicit Plain(const Info&) {}
  void Compute(Context& context) const override { Do(context); }
};

// A step along an axis.
template <void (*Do)(Context&, int64_t)>
struct Along : Kernel {
  explicit Along(const Info& info) : axis(info.Int("axis")) {}
  void Compute(Context& context) const override { Do(context, axis); }
  int64_t axis;
};

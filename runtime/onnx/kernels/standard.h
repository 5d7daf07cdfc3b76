// What the operators of ONNX in standard.cpp and moves.cpp share: repeated shapes and types.
#pragma once

#include "kernel.h"

// The lines of the last axis of tensors that are repeated to a shape: run(first of the result, firsts, steps, how many) for each.
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
    run(first, firsts, steps, width);
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
    if (mine != its && mine == 1) whole = whole.With(axis, its);
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

// A step without attributes.
template <void (*Do)(Context&)>
struct Plain : Kernel {
  explicit Plain(const Info&) {}
  void Compute(Context& context) const override { Do(context); }
};

constexpr Type kAny = Type::kAny;

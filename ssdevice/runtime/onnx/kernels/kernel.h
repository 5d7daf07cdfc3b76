// An operator and its kernels: what they compute, apart from who calls them. ONNX Runtime does
// (library.cpp), and so does a region, which runs several of them in one node (region.cpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "checked.h"

// What may be compiled; what is used is decided on the machine. Tests compile less, to run what
// other CPUs run.
#if defined(__x86_64__) && !defined(SSDEVICE_PORTABLE)
#pragma GCC diagnostic push  // GCC warns of variables that its own header leaves unset (its bug
                             // 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <cpuid.h>
#define SSDEVICE_AVX2 1
#ifndef SSDEVICE_WITHOUT_VNNI
#define SSDEVICE_VNNI 1
#endif
#endif
#if defined(__aarch64__) && !defined(SSDEVICE_PORTABLE)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)  // every Mac
#define SSDEVICE_DOT 1
#elif defined(__linux__) && \
    (!defined(__clang__) || __clang_major__ >= 17)  // others compile no single function for it
#include <sys/auxv.h>
#define SSDEVICE_DOT 1
#endif
#endif

#ifdef SSDEVICE_AVX2
#define SSDEVICE_TARGET_AVX2 __attribute__((target("avx2")))
inline const bool kAvx2 = __builtin_cpu_supports("avx2");
#else
#define SSDEVICE_TARGET_AVX2
constexpr bool kAvx2 = false;
#endif

// No size is negative, and all that are not zero have a product that fits: so no product of some of
// them, nor one of bytes, overflows, and indices within a tensor need no checks.
class Shape {
 public:
  static constexpr size_t kMost = 6;
  static constexpr int64_t kMostElements = int64_t{1} << 48;  // more than processors address

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) Append(size);
  }

  size_t Rank() const { return rank_; }
  const int64_t* Sizes() const { return sizes_; }
  int64_t operator[](size_t axis) const { return sizes_[axis]; }
  int64_t Last() const { return rank_ ? sizes_[rank_ - 1] : 0; }
  bool operator==(const Shape& other) const {
    return rank_ == other.rank_ && std::equal(sizes_, sizes_ + rank_, other.sizes_);
  }

  void Append(int64_t size) {
    Require(rank_ < kMost, "a tensor has too many dimensions");
    Set(rank_++, size);
  }
  Shape WithLast(int64_t size) const {
    Require(rank_ > 0, "a tensor has too few dimensions");
    Shape other = *this;
    other.elements_ /= std::max<int64_t>(Last(), 1);
    other.Set(rank_ - 1, size);
    return other;
  }
  int64_t Count() const {
    int64_t count = 1;
    for (size_t i = 0; i < rank_; ++i) count *= sizes_[i];
    return count;
  }
  int64_t Rows() const { return WithLast(1).Count(); }

 private:
  void Set(size_t axis, int64_t size) {
    Require(size >= 0, "a size is negative");
    elements_ = Times(elements_, std::max<int64_t>(size, 1));
    Require(elements_ <= kMostElements, kTooLarge);
    sizes_[axis] = size;
  }

  size_t rank_ = 0;
  int64_t sizes_[kMost] = {};
  int64_t elements_ = 1;
};

// float16, as half.h reads and writes it.
struct Half {
  uint16_t bits;
};

constexpr size_t kLine = 64;  // bytes of a cache line and of the widest vector

// The numbers are those of ONNX.
enum class Type : int {
  kAny = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kHalf = 10
};

inline constexpr Type TypeOf(float) { return Type::kFloat; }
inline constexpr Type TypeOf(uint8_t) { return Type::kUint8; }
inline constexpr Type TypeOf(int8_t) { return Type::kInt8; }
inline constexpr Type TypeOf(int32_t) { return Type::kInt32; }
inline constexpr Type TypeOf(int64_t) { return Type::kInt64; }
inline constexpr Type TypeOf(Half) { return Type::kHalf; }

inline size_t BytesOf(Type type) {
  switch (type) {
    case Type::kInt64:
      return 8;
    case Type::kFloat:
    case Type::kInt32:
      return 4;
    case Type::kHalf:
      return 2;
    case Type::kUint8:
    case Type::kInt8:
      return 1;
    default:
      throw std::runtime_error("a tensor has elements of an unknown type");
  }
}

struct Tensor {
  const void* data = nullptr;
  Shape shape;
  Type type = Type::kAny;

  template <typename T>
  const T* As() const {
    return static_cast<const T*>(data);
  }
};

using Work = void (*)(void* data, size_t at);

// A call of a kernel: the inputs and outputs of its node.
class Context {
 public:
  virtual ~Context() = default;
  virtual Tensor Input(size_t index) = 0;
  virtual void* Output(size_t index, const Shape& shape, Type type) = 0;
  // Runs work(data, i) for 0 <= i < total, on several threads if there are.
  virtual void For(size_t total, Work work, void* data) = 0;

  template <typename T>
  T* Output(size_t index, const Shape& shape) {
    return static_cast<T*>(Output(index, shape, TypeOf(T{})));
  }

  // For, with whatever can be called and raises nothing but that there is no memory; ``alone``: by
  // this thread, in order.
  template <typename Run>
  void Each(int64_t total, Run run, bool alone = false) {
    if (alone) {
      for (int64_t i = 0; i < total; ++i) run(i);
      return;
    }
    struct Job {
      Run& run;
      std::atomic<bool> failed{false};
    } job{run};
    For(
        static_cast<size_t>(total),
        [](void* all, size_t i) {
          Job& its = *static_cast<Job*>(all);
          try {
            its.run(static_cast<int64_t>(i));
          } catch (
              const std::exception&) {  // which would end the process if another thread raised it
            its.failed.store(true);
          }
        },
        &job);
    if (job.failed.load()) throw std::bad_alloc();
  }

  // Each for rows of so many numbers, alone if that is faster.
  template <typename Run>
  void EachRow(int64_t rows, int64_t width, Run run) {
    constexpr int64_t kAlone = 1 << 12;  // numbers that one thread has done when a second has begun
    if (width > 0)
      Each(rows, run,
           rows < 2 || rows * width < kAlone);  // of no numbers there may be endless rows
  }
};

// What a kernel is made from: the attributes of its node, of which none may be missing, and inputs
// that are constant.
class Info {
 public:
  virtual ~Info() = default;
  virtual float Float(const char* name) const = 0;
  virtual int64_t Int(const char* name) const = 0;
  virtual std::string Text(const char* name) const = 0;
  // Without data if the input is none.
  virtual Tensor Constant(size_t input) const = 0;
  // How many the node has.
  virtual size_t Inputs() const = 0;
  virtual size_t Outputs() const = 0;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void Compute(Context& context) const = 0;
};

struct Operator {
  const char* name;
  std::unique_ptr<Kernel> (*make)(const Info& info);
  std::vector<Type> inputs;  // all required
  size_t outputs = 1;
  Type output = Type::kFloat;  // kAny: any numbers of inputs and outputs of any types

  bool Variadic() const { return output == Type::kAny; }
};

template <typename Made>
std::unique_ptr<Kernel> Make(const Info& info) {
  return std::make_unique<Made>(info);
}

// All operators of the library.
const std::vector<Operator>& Operators();

// What the linears share: packed weights, which all sessions of a process hold once, and the division of a call's work.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "crew.h"
#include "rows.h"

constexpr int kBlock = 32;   // inputs are padded to whole blocks
constexpr int kLanes = 8;    // columns of a vector: floats of 256 bits
constexpr int kVectors = 2;  // vectors of columns side by side: what is read of a row serves both
constexpr int kColumns = kVectors * kLanes;
constexpr int kTile = 5;  // rows whose sums stay in sixteen registers
constexpr int kWideTile = 10;  // and in thirty-two
constexpr size_t kLine = 64;  // bytes of a cache line and of the widest vector

inline int Blocks(int64_t inputs) { return static_cast<int>((inputs + kBlock - 1) / kBlock); }

#define SSDEVICE_UNROLL _Pragma("GCC unroll 10")

#ifdef SSDEVICE_VNNI
#define SSDEVICE_TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
static_assert(kColumns == 16, "the columns of a group are the floats of 512 bits");
inline const bool kVnni =
    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
#endif

#ifdef SSDEVICE_AVX2
inline const bool kAvx2 = __builtin_cpu_supports("avx2");
#endif

#ifdef SSDEVICE_DOT
constexpr int kQuarters = kColumns / 4;  // vectors of four columns
#ifdef __ARM_FEATURE_DOTPROD
#define SSDEVICE_TARGET_DOT
constexpr bool kDot = true;
#else
#define SSDEVICE_TARGET_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
inline const bool kDot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif

// Four codes of a row, for each of four columns.
SSDEVICE_TARGET_DOT inline int8x16_t Four(const int8_t* codes) {
  int32_t four;
  std::memcpy(&four, codes, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
#endif

// Keeps a sum in its register, and a compiler from computing all products first and spilling the sums.
#ifdef SSDEVICE_DOT
SSDEVICE_TARGET_DOT inline void InOrder(int32x4_t& sum) { asm volatile("" : "+w"(sum)); }
#endif
#ifdef SSDEVICE_AVX2
__attribute__((target("avx2"), always_inline)) inline void InOrder(__m256i& sum) { asm volatile("" : "+x"(sum)); }

// Asks for bytes. Kernels ask for those kAhead later: a processor's own guesses end with a page. One row is a sixth faster.
// Weights are read once in a step, so they are kept out of the large caches (NTA), which activations and the host need:
// on Zen 4 a step of SmolLM2 is 5 % faster and the host 10 %, and a model that fits into the caches is as fast.
inline void Prefetch(const uint8_t* bytes, size_t count) {
  for (size_t at = 0; at < count; at += kLine) _mm_prefetch(reinterpret_cast<const char*>(bytes + at), _MM_HINT_NTA);
}
constexpr size_t kAhead = 1024;
#endif

// Weights by groups of kColumns columns, in the order in which a kernel reads them.
struct Weights {
  std::string kind;
  int64_t outputs, inputs;
  size_t bytes;  // of a group, a multiple of kLine
  std::vector<uint8_t> storage;

  Weights(const char* kind, int64_t outputs, int64_t inputs, size_t bytes)
      : kind(kind), outputs(outputs), inputs(inputs), bytes(bytes), storage(bytes * static_cast<size_t>(Groups()) + kLine - 1) {}

  int64_t Groups() const { return (outputs + kColumns - 1) / kColumns; }
  const uint8_t* Group(int64_t group) const {
    const size_t past = reinterpret_cast<uintptr_t>(storage.data()) % kLine;
    return storage.data() + (kLine - past) % kLine + bytes * static_cast<size_t>(group);
  }
  uint8_t* Group(int64_t group) { return const_cast<uint8_t*>(std::as_const(*this).Group(group)); }
};

// The functions of a bundle are graphs that share their weights; so do their kernels.
inline std::shared_ptr<const Weights> Shared(Weights&& made) {
  static std::mutex lock;
  static std::multimap<uint64_t, std::weak_ptr<const Weights>> known;
  const size_t size = made.bytes * static_cast<size_t>(made.Groups());
  uint64_t key = static_cast<uint64_t>(made.outputs) * 1000003 + static_cast<uint64_t>(made.inputs);
  for (size_t at = 0; at + 8 <= size; at += 8 * 61) {
    uint64_t word;
    std::memcpy(&word, made.Group(0) + at, 8);
    key = (key ^ word) * 0x9E3779B97F4A7C15ull;
  }
  const std::lock_guard<std::mutex> guard(lock);
  auto [first, last] = known.equal_range(key);
  while (first != last) {
    const auto other = first->second.lock();
    if (other == nullptr) {
      first = known.erase(first);
      continue;
    }
    const bool same = other->kind == made.kind && other->outputs == made.outputs && other->inputs == made.inputs;
    if (same && std::memcmp(other->Group(0), made.Group(0), size) == 0) return other;
    ++first;
  }
  auto kept = std::make_shared<const Weights>(std::move(made));
  known.emplace(key, kept);
  return kept;
}

// Some quantized rows, from row ``first`` of ``count`` on, with the weights of one group of columns.
template <typename Rows>
struct TileOf {
  const uint8_t* weights;
  int blocks;
  const Rows& rows;
  int64_t first, count;

  // The rows' parts in a block, side by side: kernels find all of them by one address.
  const typename Rows::Part* At(int block) const { return rows.parts.data() + block * count + first; }
};

template <typename Rows>
using ProductOf = void (*)(const TileOf<Rows>&, float (*out)[kColumns]);

// How a kind of processor multiplies 1, 2 .. ``tile`` rows.
template <typename Rows>
struct ProductsOf {
  const ProductOf<Rows>* of;
  int64_t tile;
};

// Multiplies all rows with a group, tile by tile, and calls take(row, products, columns): how many of kColumns there are.
template <typename Rows, typename Take>
void EachRow(const Weights& weights, int64_t group, const Rows& rows, ProductsOf<Rows> products, int64_t count, Take take) {
  const int64_t tiles = (count + products.tile - 1) / products.tile;
  const int64_t columns = std::min<int64_t>(kColumns, weights.outputs - group * kColumns);
  float out[kWideTile][kColumns];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = count * tile / tiles, last = count * (tile + 1) / tiles;
    products.of[last - first - 1]({weights.Group(group), Blocks(weights.inputs), rows, first, count}, out);
    for (int64_t r = first; r < last; ++r) take(r, out[r - first], columns);
  }
}

// A call's work, cut into parts of neighbouring groups of columns.
template <typename Rows>
struct CallOf {
  const Weights& weights;
  const Rows& rows;
  ProductsOf<Rows> products;
  int64_t count;
  int parts;
  float* y;

  static void Part(void* call, size_t part) { static_cast<const CallOf*>(call)->Run(static_cast<int>(part)); }

  void Run(int part) const {
    const int64_t groups = weights.Groups();
    for (int64_t g = groups * part / parts; g < groups * (part + 1) / parts; ++g) {
      EachRow(weights, g, rows, products, count, [&](int64_t r, const float* out, int64_t columns) {
        std::copy(out, out + columns, y + r * weights.outputs + g * kColumns);
      });
    }
  }
};

// What a linear computes of its inputs before it reads them as rows [.., K].
enum class Before {
  kNothing,  // x [.., K]
  kNorm,     // x [.., K], y [.., K], weight [K]; epsilon: the RMS norm of x + y, which is output 1
  kSilu,     // x [.., 2 K]: the first half of a row times its sigmoid times the second half
};

constexpr size_t InputsOf(Before before) { return before == Before::kNorm ? 3 : 1; }

struct Linear {
  ort::Api api;
  std::shared_ptr<const Weights> weights;
  Before before = Before::kNothing;
  float epsilon = 0;
  int threads = CrewSize();
};

inline float EpsilonOf(const ort::Api& api, const ort::KernelInfo* info, Before before) {
  float epsilon = 0;
  if (before == Before::kNorm) Check(api.Attribute(info, "epsilon", &epsilon));
  return epsilon;
}

// The constants of a linear, which follow its other inputs.
struct Constants {
  const ort::Value *codes = nullptr, *scales = nullptr;

  Constants(const ort::Api& api, const ort::KernelInfo* info, Before before = Before::kNothing) {
    int constant[2] = {0, 0};
    const size_t first = InputsOf(before);
    Check(api.ConstantInput(info, first, &constant[0], &codes));
    Check(api.ConstantInput(info, first + 1, &constant[1], &scales));
    Require(api, constant[0] && constant[1], "its weights are no constants");
  }
};

// The ``count`` rows of ``width`` numbers that a linear reads: input 0, ``x`` of these sizes, or what it makes of its inputs, in
// memory of this thread.
inline const float* RowsBefore(const Linear& linear, ort::KernelContext* context, const float* x,
                               const std::vector<int64_t>& sizes, int64_t count, int64_t width) {
  if (linear.before == Before::kNothing) return x;
  thread_local std::vector<float> made;
  made.resize(static_cast<size_t>(count * width));
  if (linear.before == Before::kSilu) {
    GateRows(x, count, width, made.data());
    return made.data();
  }
  const ort::Api& api = linear.api;
  const ort::Value *other = InputOf(api, context, 1), *weight = InputOf(api, context, 2);
  Require(api, SizesOf(api, other) == sizes && CountOf(SizesOf(api, weight)) == width,
          "its rows do not fit each other or the weight of the norm");
  ort::Value* sum = nullptr;
  Check(api.Output(context, 1, sizes.data(), sizes.size(), &sum));
  NormalizeRows(x, DataOf<const float>(api, other), DataOf<const float>(api, weight), count, width, linear.epsilon,
                made.data(), DataOf<float>(api, sum));
  return made.data();
}

// Rows [.., K] times the weights. ``quantize`` fills Rows from [count, K] floats.
template <typename Rows>
ort::Status* Multiply(const Linear& linear, ort::KernelContext* context,
                      void (*quantize)(const float* x, int64_t count, int64_t inputs, Rows* out),
                      ProductsOf<Rows> products) {
  const ort::Api& api = linear.api;
  return Guarded(api, [&] {
    const Weights& weights = *linear.weights;
    const ort::Value* x = InputOf(api, context, 0);
    const auto given = SizesOf(api, x);
    const int64_t inputs = given.empty() ? 0 : given.back() / (linear.before == Before::kSilu ? 2 : 1);
    Require(api, Blocks(inputs) == Blocks(weights.inputs), "the rows have another width than the weights");
    auto sizes = given;
    sizes.back() = 1;
    const int64_t count = CountOf(sizes);
    sizes.back() = weights.outputs;
    ort::Value* y = nullptr;
    Check(api.Output(context, 0, sizes.data(), sizes.size(), &y));
    const float* read = RowsBefore(linear, context, DataOf<const float>(api, x), given, count, inputs);
    if (count == 0) return;
    thread_local Rows rows;
    quantize(read, count, inputs, &rows);
    const int parts = static_cast<int>(std::clamp<int64_t>(weights.Groups() / 2, 1, 32));
    CallOf<Rows> call{weights, rows, products, count, parts, DataOf<float>(api, y)};
    For(api, context, linear.threads, static_cast<size_t>(parts), CallOf<Rows>::Part, &call);
  });
}

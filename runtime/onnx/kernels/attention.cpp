// Attention of few rows over a KV cache and over themselves: the rows of a draft tree, each of which sees its ancestors.
//
// TreeAttention(q [1, R, G * N * D], past keys [P, N * D], keys [.., S, N * D], past values [P, N * D], values [.., S, N * D],
//               mask [1, R * G, P + S]; kv_heads = N, scale) -> [1, R, N * G * D], all float
// Query heads are ordered by (group member, key head) in q and by (key head, group member) in the result. The mask repeats a
// row's G times. A row sees those of the P + S rows whose mask is above kHidden; the mask is added to their scores. What a row
// sees is gathered in order first, and all sums run over that order: so a row's bits do not depend on where what it sees
// stands, in the cache or among the new rows, nor on the other rows. Products and sums are fused multiply-adds; dot products
// sum eight lanes pairwise at the end.

#include <algorithm>
#include <atomic>

#include "crew.h"
#include "exponential.h"

namespace {

constexpr int kLanes = 8;
constexpr float kHidden = -1e8f;
constexpr int64_t kAlone = 1 << 16;  // multiplications below which one thread is faster than two

struct Sizes {
  int64_t rows, past, fresh, heads, groups, dim;  // R, P, S, N, G, D
};

// What one row sees: rows of keys and values by pointer, and their masks. Room for a whole vector at the end.
struct Seen {
  std::vector<const float*> keys, values;
  std::vector<float> mask, weights;
  size_t count = 0;
  int64_t call = 0, row = 0;  // whose these are
};

using Attend = void (*)(const float* q, Seen* seen, size_t offset, int64_t dim, float scale, float* y);

void Portable(const float* q, Seen* seen, size_t offset, int64_t dim, float scale, float* y) {
  const size_t count = seen->count;
  float most = -INFINITY, lanes[kLanes];
  for (size_t i = 0; i < count; ++i) {
    const float* k = seen->keys[i] + offset;
    std::fill(lanes, lanes + kLanes, 0.0f);
    for (int64_t d = 0; d < dim; ++d) lanes[d % kLanes] = std::fma(q[d], k[d], lanes[d % kLanes]);
    seen->weights[i] = std::fma(PairwiseSum(lanes), scale, seen->mask[i]);
    most = std::max(most, seen->weights[i]);
  }
  std::fill(lanes, lanes + kLanes, 0.0f);
  std::fill(y, y + dim, 0.0f);
  for (size_t i = 0; i < count; ++i) {
    seen->weights[i] = Exp(seen->weights[i] - most);
    lanes[i % kLanes] += seen->weights[i];
    const float* v = seen->values[i] + offset;
    for (int64_t d = 0; d < dim; ++d) y[d] = std::fma(seen->weights[i], v[d], y[d]);
  }
  const float total = PairwiseSum(lanes);
  for (int64_t d = 0; d < dim; ++d) y[d] /= total;
}

#ifdef SSDEVICE_AVX2
#define SSDEVICE_TARGET __attribute__((target("avx2,fma")))

// Eight sums of eight lanes each, pairwise as in PairwiseSum.
SSDEVICE_TARGET inline __m256 Pairwise(const __m256* a) {
  const __m256 b0 = _mm256_hadd_ps(a[0], a[1]), b1 = _mm256_hadd_ps(a[2], a[3]);
  const __m256 b2 = _mm256_hadd_ps(a[4], a[5]), b3 = _mm256_hadd_ps(a[6], a[7]);
  const __m256 c0 = _mm256_hadd_ps(b0, b1), c1 = _mm256_hadd_ps(b2, b3);
  return _mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20), _mm256_permute2f128_ps(c0, c1, 0x31));
}

// D / 8 vectors of the result stay in registers: V of them.
template <int V>
SSDEVICE_TARGET void Avx2(const float* q, Seen* seen, size_t offset, int64_t, float scale, float* y) {
  const size_t count = seen->count;
  __m256 most = _mm256_set1_ps(-INFINITY), sums[kLanes];
  for (size_t i = 0; i < count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float* k = seen->keys[i + j] + offset;
      sums[j] = _mm256_setzero_ps();
      for (int v = 0; v < V; ++v)
        sums[j] = _mm256_fmadd_ps(_mm256_loadu_ps(q + 8 * v), _mm256_loadu_ps(k + 8 * v), sums[j]);
    }
    const __m256 scores = _mm256_fmadd_ps(Pairwise(sums), _mm256_set1_ps(scale), _mm256_loadu_ps(&seen->mask[i]));
    _mm256_storeu_ps(&seen->weights[i], scores);
    most = _mm256_max_ps(most, scores);
  }
  float lanes[kLanes];
  _mm256_storeu_ps(lanes, most);
  most = _mm256_set1_ps(*std::max_element(lanes, lanes + kLanes));
  __m256 total = _mm256_setzero_ps();
  for (size_t i = 0; i < count; i += kLanes) {
    const __m256 weights = Exp(_mm256_sub_ps(_mm256_loadu_ps(&seen->weights[i]), most));
    _mm256_storeu_ps(&seen->weights[i], weights);
    total = _mm256_add_ps(total, weights);
  }
  __m256 out[V];
  for (int v = 0; v < V; ++v) out[v] = _mm256_setzero_ps();
  for (size_t i = 0; i < count; ++i) {
    const float* values = seen->values[i] + offset;
    const __m256 weight = _mm256_set1_ps(seen->weights[i]);
    for (int v = 0; v < V; ++v) out[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values + 8 * v), out[v]);
  }
  _mm256_storeu_ps(lanes, total);
  const __m256 divisor = _mm256_set1_ps(PairwiseSum(lanes));
  for (int v = 0; v < V; ++v) _mm256_storeu_ps(y + 8 * v, _mm256_div_ps(out[v], divisor));
}
#endif

Attend AttendOf(int64_t dim) {
#ifdef SSDEVICE_AVX2
  if (kFusedAvx2 && dim == 32) return Avx2<4>;
  if (kFusedAvx2 && dim == 64) return Avx2<8>;
  if (kFusedAvx2 && dim == 128) return Avx2<16>;
#endif
  static_cast<void>(dim);
  return Portable;
}

struct Call {
  static inline std::atomic<int64_t> calls{0};

  Sizes sizes;
  const float *q, *past_keys, *keys, *past_values, *values, *mask;
  float scale;
  float* y;
  int64_t number = ++calls;

  static void Unit(void* call, size_t unit) { static_cast<const Call*>(call)->Run(static_cast<int64_t>(unit)); }

  // The query heads of one row that share a key head.
  void Run(int64_t unit) const {
    thread_local Seen seen;
    const int64_t row = unit / sizes.heads, head = unit % sizes.heads, width = sizes.heads * sizes.dim;
    if (seen.call != number || seen.row != row) Gather(row, &seen);
    const Attend attend = AttendOf(sizes.dim);
    for (int64_t group = 0; group < sizes.groups; ++group) {
      const float* from = q + (row * sizes.groups + group) * width + head * sizes.dim;
      float* to = y + (row * sizes.heads + head) * sizes.groups * sizes.dim + group * sizes.dim;
      attend(from, &seen, static_cast<size_t>(head * sizes.dim), sizes.dim, scale, to);
    }
  }

  void Gather(int64_t row, Seen* seen) const {
    const int64_t width = sizes.heads * sizes.dim, all = sizes.past + sizes.fresh;
    seen->call = number;
    seen->row = row;
    const size_t room = static_cast<size_t>(all) + kLanes;
    seen->keys.resize(room);
    seen->values.resize(room);
    seen->mask.resize(room);
    seen->weights.resize(room);
    const float* shown = mask + row * sizes.groups * all;
    size_t count = 0;
    for (int64_t at = 0; at < all; ++at) {
      if (!(shown[at] > kHidden)) continue;
      const bool old = at < sizes.past;
      const int64_t start = (old ? at : at - sizes.past) * width;
      seen->keys[count] = (old ? past_keys : keys) + start;
      seen->values[count] = (old ? past_values : values) + start;
      seen->mask[count++] = shown[at];
    }
    seen->count = count;
    for (size_t i = count; i < count + kLanes; ++i) {  // a vector's end: scores of weight 0
      seen->keys[i] = keys;
      seen->values[i] = values;
      seen->mask[i] = -INFINITY;
    }
  }
};

struct Kernel {
  ort::Api api;
  int64_t heads;
  float scale;
  int threads = CrewSize();
};

ort::Status* Create(const ort::CustomOp*, const void* const* table, const ort::KernelInfo* info, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    Kernel made{api, 0, 0};
    Check(api.Attribute(info, "kv_heads", &made.heads));
    Check(api.Attribute(info, "scale", &made.scale));
    Require(api, made.heads > 0, "TreeAttention: kv_heads is not positive");
    *out = new Kernel(made);
  });
}

ort::Status* Compute(void* self, ort::KernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(self);
  const ort::Api& api = kernel.api;
  return Guarded(api, [&] {
    const ort::Value* tensors[6];
    std::vector<int64_t> shapes[6];
    for (size_t i = 0; i < 6; ++i) {
      tensors[i] = InputOf(api, context, i);
      shapes[i] = SizesOf(api, tensors[i]);
    }
    const auto& [q, past_keys, keys, past_values, values, mask] = shapes;
    const size_t rank = keys.size();
    Require(api, q.size() == 3 && q[0] == 1 && rank >= 2 && (rank == 2 || keys[0] == 1) && keys == values &&
                     past_keys.size() == 2 && past_keys == past_values && past_keys[1] == keys[rank - 1],
            "TreeAttention: the queries do not fit the keys and values");
    const int64_t width = past_keys[1];
    Require(api, rank <= 3 && width > 0 && width % kernel.heads == 0 && q[2] % width == 0,
            "TreeAttention: the queries do not fit the keys and values");
    const Sizes sizes{q[1], past_keys[0], keys[rank - 2], kernel.heads, q[2] / width, width / kernel.heads};
    Require(api, CountOf(mask) == sizes.rows * sizes.groups * (sizes.past + sizes.fresh),
            "TreeAttention: the mask does not fit the rows");
    const int64_t shape[] = {1, sizes.rows, q[2]};
    ort::Value* y = nullptr;
    Check(api.Output(context, 0, shape, 3, &y));
    const float* data[6];
    for (size_t i = 0; i < 6; ++i) data[i] = DataOf<const float>(api, tensors[i]);
    Call call{sizes, data[0], data[1], data[2], data[3], data[4], data[5], kernel.scale, DataOf<float>(api, y)};
    const int64_t units = sizes.rows * sizes.heads;
    if (units * sizes.groups * sizes.dim * (sizes.past + sizes.fresh) >= kAlone) {
      For(api, context, kernel.threads, static_cast<size_t>(units), Call::Unit, &call);
    } else {
      for (int64_t unit = 0; unit < units; ++unit) call.Run(unit);
    }
  });
}

}  // namespace

const ort::CustomOp* TreeAttention() {
  static const ort::CustomOp op = [] {
    constexpr ort::Type kFloat = ort::kFloat;
    ort::CustomOp made = Operator<kFloat, kFloat, kFloat, kFloat, kFloat, kFloat>(Create, Compute, Destroy<Kernel>);
    made.GetName = [](const ort::CustomOp*) { return "TreeAttention"; };
    return made;
  }();
  return &op;
}

// Attention of few rows over a KV cache and over themselves: the rows of a draft tree, each of which sees its ancestors.
//
// TreeAttention(q [1, R, N * G * D], past keys [P, N * D], keys, more keys, past values [P, N * D], values, more values,
//               mask of R * (P + S + M) numbers; kv_heads = N, scale) -> [1, R, N * G * D], all float
// HalfTreeAttention: the same with past keys and values in float16, to which new ones are rounded before they are used.
//
// New keys and values are S rows and M more, [.., N * D]; there may be no more. Query heads are ordered by (key head, group member).
// A row sees those of the P + S + M rows whose mask is above kHidden; the mask is added to their scores. What a row
// sees is gathered in order first, and all sums run over that order: so a row's bits do not depend on where what it sees
// stands, in the cache or among the new rows, nor on the other rows. Products and sums are fused multiply-adds; dot products
// sum eight lanes pairwise at the end.

#include <algorithm>
#include <atomic>

#include "exponential.h"
#include "linears.h"

namespace {

constexpr float kHidden = -1e8f;
constexpr int kHead = 64;  // elements of a head for which there are kernels of its own
constexpr size_t kNext = 16;               // rows whose keys are asked for before they are needed
constexpr int64_t kAlone = 1 << 16;  // multiplications below which one thread is faster than two

struct Sizes {
  int64_t rows, heads, groups, dim;  // R, N, G, D
};

// Keys and values that lie together: those of the cache, the new ones, or more.
constexpr size_t kRuns = 3;

template <typename Element>
struct Run {
  const Element *keys, *values;
  int64_t rows;
};

// What one row sees: rows of keys and values by pointer, and their masks. Room for a whole vector at the end.
template <typename Element>
struct Seen {
  std::vector<const Element*> keys, values;
  std::vector<float> mask, weights;  // weights: of some query heads, one after another
  size_t count = 0;
  int64_t call = 0, row = 0;  // whose these are

  float* Weights(int64_t group) { return weights.data() + static_cast<size_t>(group) * mask.size(); }
};

// Query heads that share a key head, at most kGroups: where their queries are, and their results.
constexpr int kGroups = 3;

struct Heads {
  int count;
  const float* q[kGroups];
  float* y[kGroups];
  int64_t dim;
  size_t offset;  // of the key head in a row
  float scale;
};

inline float FloatOf(float value) { return value; }

// Asks for what will be read: a call has read so many weights since the last one that no row is in a cache near by.
template <typename Element>
inline void Ask(const Element* from, int64_t count) {
  for (int64_t d = 0; d < count; d += static_cast<int64_t>(kLine / sizeof(Element))) __builtin_prefetch(from + d);
}

template <typename Element>
void Portable(const Heads& heads, Seen<Element>* seen) {
  const size_t count = seen->count;
  for (int g = 0; g < heads.count; ++g) {
    const float* q = heads.q[g];
    float *y = heads.y[g], *weights = seen->Weights(g), most = -INFINITY, lanes[kLanes];
    for (size_t i = 0; i < count; ++i) {
      const Element* k = seen->keys[i] + heads.offset;
      std::fill(lanes, lanes + kLanes, 0.0f);
      for (int64_t d = 0; d < heads.dim; ++d) lanes[d % kLanes] = std::fma(q[d], FloatOf(k[d]), lanes[d % kLanes]);
      weights[i] = std::fma(PairwiseSum(lanes), heads.scale, seen->mask[i]);
      most = std::max(most, weights[i]);
    }
    std::fill(lanes, lanes + kLanes, 0.0f);
    std::fill(y, y + heads.dim, 0.0f);
    for (size_t i = 0; i < count; ++i) {
      weights[i] = Exp(weights[i] - most);
      lanes[i % kLanes] += weights[i];
      const Element* v = seen->values[i] + heads.offset;
      for (int64_t d = 0; d < heads.dim; ++d) y[d] = std::fma(weights[i], FloatOf(v[d]), y[d]);
    }
    const float total = PairwiseSum(lanes);
    for (int64_t d = 0; d < heads.dim; ++d) y[d] /= total;
  }
}

#ifdef SSDEVICE_EIGHT
// Scores of G heads, eight rows at a time: a key is widened once for all of them. V: vectors of a head; 0: as many as it has.
template <int G, int V, typename Element>
SSDEVICE_EIGHT void Scores(const Heads& heads, Seen<Element>* seen) {
  const int64_t end = V ? V * kLanes : heads.dim;
  const Eight scale = All(heads.scale);
  for (size_t i = 0; i < seen->count; i += kLanes) {
    Eight sums[G][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const Element* k = seen->keys[i + j] + heads.offset;
      Ask(seen->keys[std::min(i + j + kNext, seen->count)] + heads.offset, end);
      Ask(seen->values[i + j] + heads.offset, end);
      Eight sum[G];
      for (int g = 0; g < G; ++g) sum[g] = All(0.0f);
#pragma GCC unroll 8
      for (int64_t d = 0; d < end; d += kLanes) {
        const Eight key = Load(k + d);
        for (int g = 0; g < G; ++g) sum[g] = Fma(Load(heads.q[g] + d), key, sum[g]);
      }
      for (int g = 0; g < G; ++g) sums[g][j] = sum[g];
    }
    const Eight mask = Load(&seen->mask[i]);
    for (int g = 0; g < G; ++g) Store(Fma(Pairwise(sums[g]), scale, mask), seen->Weights(g) + i);
  }
}

// Scores become weights, not yet divided by their sum, which is returned.
SSDEVICE_EACH float Weigh(float* scores, size_t count) {
  Eight most = All(-INFINITY), total = All(0.0f);
  for (size_t i = 0; i < count; i += kLanes) most = Max(most, Load(scores + i));
  most = All(Largest(most));
  for (size_t i = 0; i < count; i += kLanes) {
    const Eight weights = Exp(Sub(Load(scores + i), most));
    Store(weights, scores + i);
    total = Add(total, weights);
  }
  float lanes[kLanes];
  Store(total, lanes);
  return PairwiseSum(lanes);
}

// V vectors of G results from column d on, which stay in registers.
template <int G, int V, typename Element>
SSDEVICE_EACH void Values(const Heads& heads, Seen<Element>* seen, const float* totals, int64_t d) {
  Eight out[G][V];
  const float* weights[G];
  for (int g = 0; g < G; ++g) {
    weights[g] = seen->Weights(g);
    for (int v = 0; v < V; ++v) out[g][v] = All(0.0f);
  }
  for (size_t i = 0; i < seen->count; ++i) {
    const Element* values = seen->values[i] + heads.offset + d;
    Eight weight[G];
    for (int g = 0; g < G; ++g) weight[g] = All(weights[g][i]);
    for (int v = 0; v < V; ++v) {
      const Eight value = Load(values + kLanes * v);
      for (int g = 0; g < G; ++g) out[g][v] = Fma(weight[g], value, out[g][v]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) Store(Div(out[g][v], All(totals[g])), heads.y[g] + d + kLanes * v);
}

#ifdef SSDEVICE_VNNI
// Heads of 64 elements in vectors twice as wide, with the same bits: scores of two keys at once, and queries stay in registers.
#define SSDEVICE_WIDE __attribute__((target("avx512f,avx2,fma,f16c")))
constexpr int kWide = 2 * kLanes;

SSDEVICE_WIDE inline __m512 Both(Eight x, Eight y) {
  return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(x)), _mm256_castps_pd(y), 1));
}
SSDEVICE_WIDE inline __m512 Pair(const float* x, const float* y) { return Both(Load(x), Load(y)); }
SSDEVICE_WIDE inline __m512 Pair(const Half* x, const Half* y) {
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)), other = _mm_loadu_si128(reinterpret_cast<const __m128i*>(y));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1));
}
SSDEVICE_WIDE inline __m512 LoadWide(const float* x) { return _mm512_loadu_ps(x); }
SSDEVICE_WIDE inline __m512 LoadWide(const Half* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

template <int G, typename Element>
SSDEVICE_WIDE void WideScores(const Heads& heads, Seen<Element>* seen) {
  const Eight scale = All(heads.scale);
  __m512 q[G][kHead / kLanes];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < kHead / kLanes; ++v) q[g][v] = Pair(heads.q[g] + kLanes * v, heads.q[g] + kLanes * v);
  for (size_t i = 0; i < seen->count; i += kLanes) {
    Eight sums[G][kLanes];
    for (size_t j = 0; j < kLanes; j += 2) {
      for (size_t k = i + j; k < i + j + 2; ++k) {
        Ask(seen->keys[std::min(k + kNext, seen->count)] + heads.offset, kHead);
        Ask(seen->values[k] + heads.offset, kHead);
      }
      const Element *one = seen->keys[i + j] + heads.offset, *other = seen->keys[i + j + 1] + heads.offset;
      __m512 sum[G] = {};
      SSDEVICE_UNROLL for (int v = 0; v < kHead / kLanes; ++v) {
        const __m512 keys = Pair(one + kLanes * v, other + kLanes * v);
        SSDEVICE_UNROLL for (int g = 0; g < G; ++g) sum[g] = _mm512_fmadd_ps(q[g][v], keys, sum[g]);
      }
      for (int g = 0; g < G; ++g) {
        sums[g][j] = _mm512_castps512_ps256(sum[g]);
        sums[g][j + 1] = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum[g]), 1));
      }
    }
    const Eight mask = Load(&seen->mask[i]);
    for (int g = 0; g < G; ++g) Store(Fma(Pairwise(sums[g]), scale, mask), seen->Weights(g) + i);
  }
}

template <int G, typename Element>
SSDEVICE_WIDE void WideValues(const Heads& heads, Seen<Element>* seen, const float* totals) {
  __m512 out[G][kHead / kWide] = {};
  const float* weights[G];
  for (int g = 0; g < G; ++g) weights[g] = seen->Weights(g);
  for (size_t i = 0; i < seen->count; ++i) {
    const Element* values = seen->values[i] + heads.offset;
    SSDEVICE_UNROLL for (int v = 0; v < kHead / kWide; ++v) {
      const __m512 value = LoadWide(values + kWide * v);
      SSDEVICE_UNROLL for (int g = 0; g < G; ++g) out[g][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[g][i]), value, out[g][v]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < kHead / kWide; ++v) _mm512_storeu_ps(heads.y[g] + kWide * v, _mm512_div_ps(out[g][v], _mm512_set1_ps(totals[g])));
}
#endif

template <int G, typename Element>
SSDEVICE_EIGHT void InVectors(const Heads& heads, Seen<Element>* seen) {
  float totals[G];
#ifdef SSDEVICE_VNNI
  if (kVnni && heads.dim == kHead) {
    WideScores<G>(heads, seen);
    for (int g = 0; g < G; ++g) totals[g] = Weigh(seen->Weights(g), seen->count);
    return WideValues<G>(heads, seen, totals);
  }
#endif
  heads.dim == kHead ? Scores<G, kHead / kLanes>(heads, seen) : Scores<G, 0>(heads, seen);
  for (int g = 0; g < G; ++g) totals[g] = Weigh(seen->Weights(g), seen->count);
  int64_t d = 0;
  for (; d + 4 * kLanes <= heads.dim; d += 4 * kLanes) Values<G, 4>(heads, seen, totals, d);
  for (; d < heads.dim; d += kLanes) Values<G, 1>(heads, seen, totals, d);
}
#endif

template <typename Element>
void Attend(const Heads& heads, Seen<Element>* seen) {
#ifdef SSDEVICE_EIGHT
  if (kEight && heads.dim % kLanes == 0) {
    if (heads.count == 1) return InVectors<1>(heads, seen);
    if (heads.count == 2) return InVectors<2>(heads, seen);
    return InVectors<3>(heads, seen);
  }
#endif
  Portable(heads, seen);
}

template <typename Element>
struct Call {
  static inline std::atomic<int64_t> calls{0};

  Sizes sizes;
  const float *q, *mask;
  Run<Element> runs[kRuns];
  int64_t all;  // their rows
  float scale;
  float* y;
  int64_t number = ++calls;

  // The query heads of one row that share a key head.
  void Unit(int64_t unit) const {
    thread_local Seen<Element> seen;
    const int64_t row = unit / sizes.heads, head = unit % sizes.heads;
    if (seen.call != number || seen.row != row) Gather(row, &seen);
    for (int64_t first = 0; first < sizes.groups; first += kGroups) {
      const int count = static_cast<int>(std::min<int64_t>(kGroups, sizes.groups - first));
      Heads heads{count, {}, {}, sizes.dim, static_cast<size_t>(head * sizes.dim), scale};
      for (int g = 0; g < count; ++g) {
        const int64_t at = (unit * sizes.groups + first + g) * sizes.dim;
        heads.q[g] = q + at;
        heads.y[g] = y + at;
      }
      Attend(heads, &seen);
    }
  }

  void Gather(int64_t row, Seen<Element>* seen) const {
    const int64_t width = sizes.heads * sizes.dim;
    seen->call = number;
    seen->row = row;
    const size_t room = static_cast<size_t>(all) + kLanes;
    seen->keys.resize(room);
    seen->values.resize(room);
    seen->mask.resize(room);
    seen->weights.resize(room * kGroups);
    const float* shown = mask + row * all;
    size_t count = 0;
    for (const Run<Element>& run : runs)
      for (int64_t at = 0; at < run.rows; ++at, ++shown) {
        if (!(*shown > kHidden)) continue;
        seen->keys[count] = run.keys + at * width;
        seen->values[count] = run.values + at * width;
        seen->mask[count++] = *shown;
      }
    seen->count = count;
    for (size_t i = count; i < count + kLanes; ++i) {  // a vector's end: scores of weight 0
      seen->keys[i] = runs[1].keys;
      seen->values[i] = runs[1].values;
      seen->mask[i] = -INFINITY;
    }
  }
};

// New rows as the cache will hold them.
const float* Rounded(const Tensor& rows, std::vector<float>*) { return rows.As<float>(); }

const Half* Rounded(const Tensor& rows, std::vector<Half>* room) {
  room->resize(static_cast<size_t>(rows.shape.Count()));
  HalvesOf(rows.As<float>(), rows.shape.Count(), room->data());
  return room->data();
}

template <typename Element>
class Attention : public Kernel {
 public:
  explicit Attention(const Info& info) : heads_(info.Int("kv_heads")), scale_(info.Float("scale")) {
    Require(heads_ > 0, "kv_heads is not positive");
  }

  void Compute(Context& context) const override {
    const Tensor q = context.Input(0), mask = context.Input(1 + 2 * kRuns);
    const int64_t width = context.Input(1).shape.Last();
    Require(q.shape.Rank() == 3 && q.shape[0] == 1 && width > 0 && width % heads_ == 0 && q.shape[2] > 0 && q.shape[2] % width == 0,
            "the queries do not fit the keys");
    thread_local std::vector<Element> rounded[2 * kRuns];
    Run<Element> runs[kRuns];
    int64_t all = 0;
    for (size_t i = 0; i < kRuns; ++i) {
      const Tensor keys = context.Input(1 + i), values = context.Input(1 + kRuns + i);
      Require(keys.shape == values.shape && keys.shape.Last() == width, "the keys do not fit the values");
      runs[i].rows = keys.shape.Rows();
      runs[i].keys = i ? Rounded(keys, &rounded[i]) : keys.As<Element>();
      runs[i].values = i ? Rounded(values, &rounded[kRuns + i]) : values.As<Element>();
      all = Plus(all, runs[i].rows);
    }
    Require(runs[1].rows > 0, "there are no new rows");
    const Sizes sizes{q.shape[1], heads_, q.shape[2] / width, width / heads_};
    Require(mask.shape.Count() == Times(sizes.rows, all), "the mask does not fit the rows");
    float* y = context.Output<float>(0, q.shape);
    Call<Element> call{sizes, q.As<float>(), mask.As<float>(), {runs[0], runs[1], runs[2]}, all, scale_, y};
    const int64_t units = sizes.rows * sizes.heads;
    context.Each(units, [&](int64_t unit) { call.Unit(unit); }, Times(q.shape.Count(), all) < kAlone);
  }

 private:
  int64_t heads_;
  float scale_;
};

Operator Named(const char* name, std::unique_ptr<Kernel> (*make)(const Info&), Type past) {
  constexpr Type kNew = Type::kFloat;
  return {name, make, {kNew, past, kNew, kNew, past, kNew, kNew, kNew}};
}

}  // namespace

Operator TreeAttention() { return Named("TreeAttention", Make<Attention<float>>, Type::kFloat); }
Operator HalfTreeAttention() { return Named("HalfTreeAttention", Make<Attention<Half>>, Type::kHalf); }

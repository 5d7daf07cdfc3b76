// Attention of few rows over a KV cache and over themselves: the rows of a draft tree, each of
// which sees its ancestors.
//
// TreeAttention(q [1, R, N * G * D], past keys [P, N * D], keys, more keys, past values [P, N * D],
// values, more values,
//               mask of R * (P + S + M) numbers; kv_heads = N, scale) -> [1, R, N * G * D], all
//               float
// HalfTreeAttention: the same with past keys and values in float16, to which new ones are rounded
// before they are used.
//
// New keys and values are S rows and M more, [.., N * D]; there may be no more. Query heads are
// ordered by (key head, group member). A row sees those of the P + S + M rows whose mask is above
// kHidden; the mask is added to their scores. What a row sees is gathered in order first, and all
// sums run over that order: so a row's bits do not depend on where what it sees stands, in the
// cache or among the new rows, nor on the other rows. Products and sums are fused multiply-adds;
// dot products sum eight lanes pairwise at the end.

#include <algorithm>
#include <atomic>

#include "exponential.h"
#include "linears.h"

namespace {

constexpr float kHidden = -1e8f;
constexpr int kHead = 64;            // elements of a head for which there are kernels of its own
constexpr int kWide = 2 * kLanes;    // floats of the widest vector
constexpr size_t kNext = 16;         // rows whose keys are asked for before they are needed
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

constexpr int kGroups = 3;    // query heads of a row that share a key head and are computed at once
constexpr int kTogether = 6;  // and of several rows

// What one row sees: rows of keys and values by pointer, and their masks. Room for a whole vector
// at the end.
template <typename Element>
struct Seen {
  std::vector<const Element*> keys, values;
  std::vector<float> mask, weights;  // weights: of some query heads, one after another
  size_t count = 0;
  size_t leading = 0;  // those before the first of the cache that is hidden
  int64_t call = 0;    // whose these are, with `row`
  int64_t row = 0;

  float* Weights(int64_t group) {
    return weights.data() + static_cast<size_t>(group) * mask.size();
  }
};

// A query head of a row: where its query is, its mask, weights and result.
struct Query {
  const float *q, *mask;
  float *weights, *y;
};

// Query heads that share a key head.
struct Heads {
  const Query* of;
  int count;
  int64_t dim;
  size_t offset;  // of the key head in a row
  float scale;
};

inline float FloatOf(float value) { return value; }

// Asks for what will be read: a call has read so many weights since the last one that no row is in
// a cache near by.
template <typename Element>
inline void Ask(const Element* from, int64_t count) {
  for (int64_t d = 0; d < count; d += static_cast<int64_t>(kLine / sizeof(Element)))
    __builtin_prefetch(from + d);
}

// run(number), with a number of query heads that is known when this is compiled.
template <int Q = kTogether, typename Run>
void WithCount(int count, Run run) {
  if constexpr (Q > 1)
    if (count < Q) return WithCount<Q - 1>(count, run);
  run(std::integral_constant<int, Q>());
}

template <typename Element>
void Portable(const Heads& heads, Seen<Element>* seen) {
  const size_t count = seen->count;
  for (int g = 0; g < heads.count; ++g) {
    const float* q = heads.of[g].q;
    float* y = heads.of[g].y;
    float* weights = heads.of[g].weights;
    float most = -INFINITY;
    float lanes[kLanes];
    for (size_t i = 0; i < count; ++i) {
      const Element* k = seen->keys[i] + heads.offset;
      std::fill(lanes, lanes + kLanes, 0.0f);
      for (int64_t d = 0; d < heads.dim; ++d)
        lanes[d % kLanes] = std::fma(q[d], FloatOf(k[d]), lanes[d % kLanes]);
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
// Scores of G heads, eight rows at a time: a key is widened once for all of them. V: vectors of a
// head; 0: as many as it has.
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
        for (int g = 0; g < G; ++g) sum[g] = Fma(Load(heads.of[g].q + d), key, sum[g]);
      }
      for (int g = 0; g < G; ++g) sums[g][j] = sum[g];
    }
    const Eight mask = Load(&seen->mask[i]);
    for (int g = 0; g < G; ++g) Store(Fma(Pairwise(sums[g]), scale, mask), heads.of[g].weights + i);
  }
}

// Scores become weights, not yet divided by their sum, which is returned.
SSDEVICE_EACH float Weigh(float* scores, size_t count) {
  Eight most = All(-INFINITY);
  Eight total = All(0.0f);
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
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) out[g][v] = All(0.0f);
  for (size_t i = 0; i < seen->count; ++i) {
    const Element* values = seen->values[i] + heads.offset + d;
    Eight weight[G];
    for (int g = 0; g < G; ++g) weight[g] = All(heads.of[g].weights[i]);
    for (int v = 0; v < V; ++v) {
      const Eight value = Load(values + kLanes * v);
      for (int g = 0; g < G; ++g) out[g][v] = Fma(weight[g], value, out[g][v]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v)
      Store(Div(out[g][v], All(totals[g])), heads.of[g].y + d + kLanes * v);
}

#ifdef SSDEVICE_VNNI
// Heads of 64 elements in vectors twice as wide, with the same bits: scores of two keys at once,
// and the rows of a tree together, for which what all of them see is widened once.
#define SSDEVICE_WIDE __attribute__((target("avx512f,avx2,fma,f16c")))

SSDEVICE_WIDE inline __m512 Pair(const float* x, const float* y) {
  return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(Load(x))),
                                             _mm256_castps_pd(Load(y)), 1));
}
SSDEVICE_WIDE inline __m512 Pair(const Half* x, const Half* y) {
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i other = _mm_loadu_si128(reinterpret_cast<const __m128i*>(y));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1));
}
SSDEVICE_WIDE inline __m512 LoadWide(const float* x) { return _mm512_loadu_ps(x); }
SSDEVICE_WIDE inline __m512 LoadWide(const Half* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Sums of neighbouring lanes of x, and of y, by turns in each quarter.
SSDEVICE_WIDE inline __m512 Neighbours(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xDD));
}
// Sixteen sums of eight lanes each, pairwise as in PairwiseSum: sum i of the lower half of vector p
// = i % 4 + i / 8 * 4, or of the upper.
SSDEVICE_WIDE inline __m512 PairwiseWide(const __m512* a) {
  const __m512 b0 = Neighbours(Neighbours(a[0], a[1]), Neighbours(a[2], a[3]));
  const __m512 b1 = Neighbours(Neighbours(a[4], a[5]), Neighbours(a[6], a[7]));
  return _mm512_add_ps(_mm512_shuffle_f32x4(b0, b1, 0x88), _mm512_shuffle_f32x4(b0, b1, 0xDD));
}

// Scores of Q query heads and of keys from one to another.
template <int Q, typename Element>
SSDEVICE_WIDE void WideScores(const Heads& heads, const Seen<Element>& seen, size_t from,
                              size_t to) {
  alignas(kLine) float q[Q][kHead / kLanes][kWide];
  for (int g = 0; g < Q; ++g)
    for (int v = 0; v < kHead / kLanes; ++v)
      _mm512_store_ps(q[g][v], Pair(heads.of[g].q + kLanes * v, heads.of[g].q + kLanes * v));
  for (size_t i = from; i < to; i += kWide) {
    __m512 sums[Q][kLanes];
    for (size_t p = 0; p < kLanes; ++p) {
      const size_t one = std::min(i + p + p / 4 * 4, to - 1);
      const size_t other = std::min(one + 4, to - 1);
      for (const size_t k : {one, other}) {
        Ask(seen.keys[std::min(k + kNext, to - 1)] + heads.offset, kHead);
        Ask(seen.values[k] + heads.offset, kHead);
      }
      __m512 sum[Q] = {};
      SSDEVICE_UNROLL for (int v = 0; v < kHead / kLanes; ++v) {
        const __m512 keys = Pair(seen.keys[one] + heads.offset + kLanes * v,
                                 seen.keys[other] + heads.offset + kLanes * v);
        SSDEVICE_UNROLL for (int g = 0; g < Q; ++g) sum[g] =
            _mm512_fmadd_ps(_mm512_load_ps(q[g][v]), keys, sum[g]);
      }
      for (int g = 0; g < Q; ++g) sums[g][p] = sum[g];
    }
    for (int g = 0; g < Q; ++g)
      _mm512_storeu_ps(heads.of[g].weights + i,
                       _mm512_fmadd_ps(PairwiseWide(sums[g]), _mm512_set1_ps(heads.scale),
                                       _mm512_loadu_ps(heads.of[g].mask + i)));
  }
}

// Results of Q query heads and of values from one to another, added to those of the values before;
// ``totals``: they are the last.
template <int Q, typename Element>
SSDEVICE_WIDE void WideValues(const Heads& heads, const Seen<Element>& seen, size_t from, size_t to,
                              const float* totals) {
  __m512 out[Q][kHead / kWide] = {};
  if (from)
    for (int g = 0; g < Q; ++g)
      for (int v = 0; v < kHead / kWide; ++v)
        out[g][v] = _mm512_loadu_ps(heads.of[g].y + kWide * v);
  for (size_t i = from; i < to; ++i) {
    const Element* values = seen.values[i] + heads.offset;
    __m512 value[kHead / kWide];
    SSDEVICE_UNROLL for (int v = 0; v < kHead / kWide; ++v) value[v] = LoadWide(values + kWide * v);
    SSDEVICE_UNROLL for (int g = 0; g < Q; ++g) {
      const __m512 weight = _mm512_set1_ps(heads.of[g].weights[i]);
      SSDEVICE_UNROLL for (int v = 0; v < kHead / kWide; ++v) out[g][v] =
          _mm512_fmadd_ps(weight, value[v], out[g][v]);
    }
  }
  for (int g = 0; g < Q; ++g)
    for (int v = 0; v < kHead / kWide; ++v)
      _mm512_storeu_ps(heads.of[g].y + kWide * v,
                       totals ? _mm512_div_ps(out[g][v], _mm512_set1_ps(totals[g])) : out[g][v]);
}

// The query heads of some rows, those of each one after another. ``common``: how many of the first
// keys are the same for all rows.
template <typename Element>
void Wide(const Heads& all, const Seen<Element>* seen, int rows, size_t common) {
  const int each = all.count / rows;
  const auto of = [&](int row) {
    return Heads{all.of + row * each, each, all.dim, all.offset, all.scale};
  };
  float totals[kTogether];
  if (common) WithCount(all.count, [&](auto count) { WideScores<count>(all, seen[0], 0, common); });
  for (int row = 0; row < rows; ++row)
    WithCount(each,
              [&](auto count) { WideScores<count>(of(row), seen[row], common, seen[row].count); });
  for (int g = 0; g < all.count; ++g) totals[g] = Weigh(all.of[g].weights, seen[g / each].count);
  if (common)
    WithCount(all.count, [&](auto count) { WideValues<count>(all, seen[0], 0, common, nullptr); });
  for (int row = 0; row < rows; ++row)
    WithCount(each, [&](auto count) {
      WideValues<count>(of(row), seen[row], common, seen[row].count, totals + row * each);
    });
}
#endif

template <int G, typename Element>
SSDEVICE_EIGHT void InVectors(const Heads& heads, Seen<Element>* seen) {
  float totals[G];
  heads.dim == kHead ? Scores<G, kHead / kLanes>(heads, seen) : Scores<G, 0>(heads, seen);
  for (int g = 0; g < G; ++g) totals[g] = Weigh(heads.of[g].weights, seen->count);
  int64_t d = 0;
  for (; d + 4 * kLanes <= heads.dim; d += 4 * kLanes) Values<G, 4>(heads, seen, totals, d);
  for (; d < heads.dim; d += kLanes) Values<G, 1>(heads, seen, totals, d);
}
#endif

// Whether the rows of a tree are computed together.
bool IsWide([[maybe_unused]] int64_t dim) {
#ifdef SSDEVICE_VNNI
  return kVnni && dim == kHead;
#else
  return false;
#endif
}

// The query heads of some rows, of one alone unless they are wide.
template <typename Element>
void Attend(const Heads& heads, Seen<Element>* seen, [[maybe_unused]] int rows,
            [[maybe_unused]] size_t common) {
#ifdef SSDEVICE_VNNI
  if (IsWide(heads.dim)) return Wide(heads, seen, rows, common);
#endif
#ifdef SSDEVICE_EIGHT
  if (kEight && heads.dim % kLanes == 0)
    return WithCount<kGroups>(heads.count, [&](auto count) { InVectors<count>(heads, seen); });
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

  // How many rows a unit has.
  int64_t Together() const {
    return sizes.groups <= kGroups && IsWide(sizes.dim) ? kTogether / sizes.groups : 1;
  }
  int64_t Units() const { return (sizes.rows + Together() - 1) / Together() * sizes.heads; }

  // The query heads of some rows that share a key head.
  void Unit(int64_t unit) const {
    thread_local Seen<Element> seen[kTogether];
    const int64_t head = unit % sizes.heads;
    const int64_t row = unit / sizes.heads * Together();
    const int rows = static_cast<int>(std::min(Together(), sizes.rows - row));
    size_t common = rows > 1 ? static_cast<size_t>(all) : 0;
    for (int r = 0; r < rows; ++r) {
      if (seen[r].call != number || seen[r].row != row + r) Gather(row + r, &seen[r]);
      common = std::min(
          common, seen[r].leading / kWide * kWide);  // a row's weights end with a whole vector
    }
    for (int64_t first = 0; first < sizes.groups; first += kGroups) {
      Query queries[kTogether];
      int count = 0;
      for (int r = 0; r < rows; ++r)
        for (int64_t g = first; g < std::min(first + kGroups, sizes.groups); ++g) {
          const int64_t at = (((row + r) * sizes.heads + head) * sizes.groups + g) * sizes.dim;
          queries[count++] = {q + at, seen[r].mask.data(), seen[r].Weights(g - first), y + at};
        }
      const Heads heads{queries, count, sizes.dim, static_cast<size_t>(head * sizes.dim), scale};
      Attend(heads, seen, rows, common);
    }
  }

  void Gather(int64_t row, Seen<Element>* seen) const {
    const int64_t width = sizes.heads * sizes.dim;
    seen->call = number;
    seen->row = row;
    const size_t room = static_cast<size_t>(all) + kWide;
    seen->keys.resize(room);
    seen->values.resize(room);
    seen->mask.resize(room);
    seen->weights.resize(room * kGroups);
    const float* shown = mask + row * all;
    size_t count = 0;
    seen->leading = 0;
    for (const Run<Element>& run : runs)
      for (int64_t at = 0; at < run.rows; ++at, ++shown) {
        if (!(*shown > kHidden)) continue;
        seen->keys[count] = run.keys + at * width;
        seen->values[count] = run.values + at * width;
        seen->mask[count++] = *shown;
        if (&run == runs && static_cast<int64_t>(count) == at + 1) seen->leading = count;
      }
    seen->count = count;
    for (size_t i = count; i < count + kWide; ++i) {  // a vector's end: scores of weight 0
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
    const Tensor q = context.Input(0);
    const Tensor mask = context.Input(1 + 2 * kRuns);
    const int64_t width = context.Input(1).shape.Last();
    Require(q.shape.Rank() == 3 && q.shape[0] == 1 && width > 0 && width % heads_ == 0 &&
                q.shape[2] > 0 && q.shape[2] % width == 0,
            "the queries do not fit the keys");
    thread_local std::vector<Element> rounded[2 * kRuns];
    Run<Element> runs[kRuns];
    int64_t all = 0;
    for (size_t i = 0; i < kRuns; ++i) {
      const Tensor keys = context.Input(1 + i);
      const Tensor values = context.Input(1 + kRuns + i);
      Require(keys.shape == values.shape && keys.shape.Last() == width,
              "the keys do not fit the values");
      runs[i].rows = keys.shape.Rows();
      runs[i].keys = i ? Rounded(keys, &rounded[i]) : keys.As<Element>();
      runs[i].values = i ? Rounded(values, &rounded[kRuns + i]) : values.As<Element>();
      all = Plus(all, runs[i].rows);
    }
    Require(runs[1].rows > 0, "there are no new rows");
    const Sizes sizes{q.shape[1], heads_, q.shape[2] / width, width / heads_};
    Require(mask.shape.Count() == Times(sizes.rows, all), "the mask does not fit the rows");
    float* y = context.Output<float>(0, q.shape);
    Call<Element> call{
        sizes, q.As<float>(), mask.As<float>(), {runs[0], runs[1], runs[2]}, all, scale_, y};
    context.Each(
        call.Units(), [&](int64_t unit) { call.Unit(unit); }, Times(q.shape.Count(), all) < kAlone);
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
Operator HalfTreeAttention() {
  return Named("HalfTreeAttention", Make<Attention<Half>>, Type::kHalf);
}

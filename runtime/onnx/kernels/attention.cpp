// Attention of few rows over a KV cache and over themselves: the rows of a draft tree, each of which sees its ancestors.
//
// TreeAttention(q [1, R, G * N * D], past keys [P, N * D], keys [.., S, N * D], past values [P, N * D], values [.., S, N * D],
//               mask [1, R * G, P + S]; kv_heads = N, scale) -> [1, R, N * G * D], all float
// HalfTreeAttention: the same with past keys and values in float16, to which new ones are rounded before they are used.
//
// Query heads are ordered by (group member, key head) in q and by (key head, group member) in the result. The mask repeats a
// row's G times. A row sees those of the P + S rows whose mask is above kHidden; the mask is added to their scores. What a row
// sees is gathered in order first, and all sums run over that order: so a row's bits do not depend on where what it sees
// stands, in the cache or among the new rows, nor on the other rows. Products and sums are fused multiply-adds; dot products
// sum eight lanes pairwise at the end.

#include <algorithm>
#include <atomic>

#include "exponential.h"

namespace {

constexpr float kHidden = -1e8f;
constexpr int64_t kAlone = 1 << 16;  // multiplications below which one thread is faster than two

struct Sizes {
  int64_t rows, past, fresh, heads, groups, dim;  // R, P, S, N, G, D
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

template <int G, typename Element>
SSDEVICE_EIGHT void InVectors(const Heads& heads, Seen<Element>* seen) {
  heads.dim == 64 ? Scores<G, 8>(heads, seen) : Scores<G, 0>(heads, seen);
  float totals[G];
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
  const Element *past_keys, *keys, *past_values, *values;
  float scale;
  float* y;
  int64_t number = ++calls;

  // The query heads of one row that share a key head.
  void Run(int64_t unit) const {
    thread_local Seen<Element> seen;
    const int64_t row = unit / sizes.heads, head = unit % sizes.heads, width = sizes.heads * sizes.dim;
    if (seen.call != number || seen.row != row) Gather(row, &seen);
    for (int64_t first = 0; first < sizes.groups; first += kGroups) {
      const int count = static_cast<int>(std::min<int64_t>(kGroups, sizes.groups - first));
      Heads heads{count, {}, {}, sizes.dim, static_cast<size_t>(head * sizes.dim), scale};
      for (int g = 0; g < count; ++g) {
        heads.q[g] = q + (row * sizes.groups + first + g) * width + head * sizes.dim;
        heads.y[g] = y + ((row * sizes.heads + head) * sizes.groups + first + g) * sizes.dim;
      }
      Attend(heads, &seen);
    }
  }

  void Gather(int64_t row, Seen<Element>* seen) const {
    const int64_t width = sizes.heads * sizes.dim, all = sizes.past + sizes.fresh;
    seen->call = number;
    seen->row = row;
    const size_t room = static_cast<size_t>(all) + kLanes;
    seen->keys.resize(room);
    seen->values.resize(room);
    seen->mask.resize(room);
    seen->weights.resize(room * kGroups);
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

// New rows as the cache will hold them.
const float* Rounded(const float* rows, size_t, std::vector<float>*) { return rows; }

const Half* Rounded(const float* rows, size_t count, std::vector<Half>* room) {
  room->resize(count);
  HalvesOf(rows, static_cast<int64_t>(count), room->data());
  return room->data();
}

template <typename Element>
class Attention : public Kernel {
 public:
  explicit Attention(const Info& info) : heads_(info.Int("kv_heads")), scale_(info.Float("scale")) {
    Require(heads_ > 0, "kv_heads is not positive");
  }

  void Compute(Context& context) const override {
    Tensor tensors[6];
    for (size_t i = 0; i < 6; ++i) tensors[i] = context.Input(i);
    const auto& [q, past_keys, keys, past_values, values, mask] = tensors;
    const size_t rank = keys.shape.Rank();
    const int64_t width = past_keys.shape.Last();
    Require(q.shape.Rank() == 3 && q.shape[0] == 1 && (rank == 2 || (rank == 3 && keys.shape[0] == 1)) &&
                keys.shape == values.shape && past_keys.shape.Rank() == 2 && past_keys.shape == past_values.shape &&
                width == keys.shape.Last() && width > 0 && width % heads_ == 0 && q.shape[2] > 0 && q.shape[2] % width == 0,
            "the queries do not fit the keys and values");
    const Sizes sizes{q.shape[1], past_keys.shape[0], keys.shape[rank - 2], heads_, q.shape[2] / width, width / heads_};
    Require(sizes.fresh > 0, "there are no new rows");
    const int64_t masks = Times(sizes.rows * sizes.groups, Plus(sizes.past, sizes.fresh));
    Require(mask.shape.Count() == masks, "the mask does not fit the rows");
    float* y = context.Output<float>(0, q.shape);
    thread_local std::vector<Element> rounded[2];
    const auto fresh = static_cast<size_t>(keys.shape.Count());
    Call<Element> call{sizes,
                       q.template As<float>(),
                       mask.template As<float>(),
                       past_keys.template As<Element>(),
                       Rounded(keys.template As<float>(), fresh, &rounded[0]),
                       past_values.template As<Element>(),
                       Rounded(values.template As<float>(), fresh, &rounded[1]),
                       scale_,
                       y};
    const int64_t units = sizes.rows * sizes.heads;
    context.Each(units, [&](int64_t unit) { call.Run(unit); }, Times(masks, width) < kAlone);
  }

 private:
  int64_t heads_;
  float scale_;
};

constexpr Type kNew = Type::kFloat;

}  // namespace

Operator TreeAttention() { return {"TreeAttention", Make<Attention<float>>, {kNew, kNew, kNew, kNew, kNew, kNew}}; }

Operator HalfTreeAttention() {
  return {"HalfTreeAttention", Make<Attention<Half>>, {kNew, Type::kHalf, kNew, Type::kHalf, kNew, kNew}};
}

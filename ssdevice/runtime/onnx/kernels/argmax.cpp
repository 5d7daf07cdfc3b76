// The best column of a head, from half of its bytes.
//
// Int8Argmax(x [.., R, K] float, codes [K, N] int8, scales [N] > 0, zero uint8) -> [.., R, 1]
// int64: for every row the column in which Int8Linear of the same inputs has the largest product,
// the first of several.
//
// A weight w is 16 h + l - 128 with h and l of four bits, and a row's product with a column is 16
// sum(q h) + sum(q l) - 128 sum(q). The first sum is computed for all columns. The second is the
// column's mean of l times sum(q), give or take: the lower bits of weights have nothing to do with
// the upper ones or with q, so its standard deviation is |q| times that of l. Only columns that
// would win if it were kSure deviations more have their lower bits read, and of these the products
// are computed in full. With the weights of SmolLM2 that is one column in a hundred, and no sum was
// ever further off than 5.2 deviations.
//
// TiedEmbedding(ids [..] int32, codes [K, N] int8, scales [N]) -> [.., K] float: Int8Embedding with
// the weights of an Int8Argmax.

#include <cmath>
#include <limits>

#include "int4.h"
#include "int8.h"

namespace {

constexpr float kSure = 7.0f;
constexpr float kLeastSpread =
    4.0f;                    // of l, whose deviation is 4.6 where all values are as frequent
constexpr size_t kNext = 4;  // columns whose lower bits are asked for before they are needed
constexpr auto kNone = Scales::kNone;

// What is known of a group's columns.
struct Columns {
  float scales[kColumns], means[kColumns], spreads[kColumns];  // the last two of l
};

// Lower: for each column and block 16 bytes; byte k holds input k in its low half and input 16 + k
// in its high half. What is known of all columns lies together, so that it is still in a cache when
// it is read again.
struct Halves {
  std::shared_ptr<const Weights> upper, lower, columns;

  const Columns& Of(int64_t group) const {
    return *reinterpret_cast<const Columns*>(columns->Group(group));
  }
  const uint8_t* Lower(int64_t column) const {
    return lower->Group(column / kColumns) +
           lower->bytes / kColumns * static_cast<size_t>(column % kColumns);
  }
};

// Where in a group the upper four bits of an input's weight lie, in whole bytes, and how far they
// are shifted.
size_t UpperAt(int64_t k, int64_t c) {
  return CodesAt(static_cast<int>(k / kBlock), kNone) +
         ByteAt(static_cast<int>(k % 16), static_cast<int>(c));
}
size_t LowerAt(int64_t k) { return static_cast<size_t>(k / kBlock * 16 + k % 16); }
int Shift(int64_t k) { return k % kBlock < 16 ? 0 : 4; }

Halves Packed(int64_t inputs, int64_t outputs, const int8_t* codes, const float* scales) {
  Weights upper("Int8Argmax, upper", outputs, inputs, UnitsOf(inputs, kNone));
  Weights lower("Int8Argmax, lower", outputs, inputs,
                static_cast<size_t>(16 * kColumns * Blocks(inputs)));
  Weights known("Int8Argmax, columns", outputs, inputs, sizeof(Columns));
  std::vector<int32_t> sums(static_cast<size_t>(outputs)), squares(sums.size());
  EachBlock(codes, inputs, outputs, [&](int64_t first, int64_t n, const int8_t* block) {
    const int64_t c = n % kColumns;
    uint8_t* high = upper.Group(n / kColumns) + UpperAt(first, c);
    uint8_t* low = lower.Group(n / kColumns) + lower.bytes / kColumns * static_cast<size_t>(c) +
                   LowerAt(first);
    uint8_t code[kBlock];
    int32_t sum = 0;
    int32_t square = 0;
    for (int k = 0; k < kBlock; ++k) {
      code[k] = static_cast<uint8_t>(block[k] + kShift);  // of an input that there is not: l = 0
      const int l = code[k] & 15;
      sum += l;
      square += l * l;
    }
    for (int k = 0; k < kBlock / 2; ++k) {
      high[ByteAt(k, 0)] = static_cast<uint8_t>(code[k] >> 4 | (code[16 + k] & 0xF0));
      low[k] = static_cast<uint8_t>((code[k] & 15) | code[16 + k] << 4);
    }
    sums[static_cast<size_t>(n)] += sum;
    squares[static_cast<size_t>(n)] += square;
  });
  for (int64_t n = 0; n < outputs; ++n) {
    auto& columns = *reinterpret_cast<Columns*>(known.Group(n / kColumns));
    const int64_t c = n % kColumns;
    const double mean = sums[static_cast<size_t>(n)] / static_cast<double>(inputs);
    const double variance =
        squares[static_cast<size_t>(n)] / static_cast<double>(inputs) - mean * mean;
    columns.scales[c] = scales[n];
    columns.means[c] = static_cast<float>(mean);
    columns.spreads[c] = std::max(kLeastSpread, static_cast<float>(std::sqrt(variance)));
  }
  return {Shared(std::move(upper)), Shared(std::move(lower)), Shared(std::move(known))};
}

struct Rows : BlockRows {
  std::vector<float> scales, sums, reach;  // [R]: of the row; of its codes; kSure times their norm

  void Fill(Context& context, const float* x, int64_t count, int64_t inputs) {
    Quantize<Rows>(context, x, count, inputs, this);
    sums.assign(static_cast<size_t>(count), 0.0f);
    reach.assign(static_cast<size_t>(count), 0.0f);
    for (size_t i = 0; i < parts.size(); ++i) {
      int32_t sum = 0;
      int32_t squares = 0;
      for (const int8_t code : parts[i].codes) {
        sum += code;
        squares += code * code;
      }
      parts[i].scale = 1.0f;
      parts[i].zero = -kZero * sum;
      sums[i % static_cast<size_t>(count)] += static_cast<float>(sum);
      reach[i % static_cast<size_t>(count)] += static_cast<float>(squares);
    }
    for (float& each : reach) each = kSure * std::sqrt(each);
  }
};

inline __attribute__((always_inline)) int32_t LowerSum(const uint8_t* lower,
                                                       const BlockRows::Part* part, int64_t stride,
                                                       int blocks) {
  int32_t sum = 0;
  for (int b = 0; b < blocks; ++b, lower += 16, part += stride)
    for (int k = 0; k < 16; ++k)
      sum += part->codes[k] * (lower[k] & 15) + part->codes[16 + k] * (lower[k] >> 4);
  return sum;
}

SSDEVICE_TARGET_AVX2 int32_t LowerSumAvx2(const uint8_t* lower, const BlockRows::Part* part,
                                          int64_t stride, int blocks) {
  return LowerSum(lower, part, stride, blocks);
}

// Of a group's columns, in units of a row's scale: products as the upper bits let one expect them,
// and what they are at most.
struct Bounds {
  float expected[kColumns], most[kColumns];
  float top, peak;  // the largest of each
};

inline __attribute__((always_inline)) float LargestOf(const float* values) {
  float lanes[kLanes];
  for (int c = 0; c < kLanes; ++c) lanes[c] = std::max(values[c], values[kLanes + c]);
  for (int rest = kLanes / 2; rest > 0; rest /= 2)
    for (int c = 0; c < rest; ++c) lanes[c] = std::max(lanes[c], lanes[c + rest]);
  return lanes[0];
}

inline __attribute__((always_inline)) void SetBounds(const Columns& columns, int64_t count,
                                                     const float* upper, float sum, float reach,
                                                     Bounds* out) {
  for (int c = 0; c < kColumns; ++c) {
    const float d = 16.0f * upper[c] + columns.means[c] * sum;
    out->expected[c] = d * columns.scales[c];
    out->most[c] = (d + reach * columns.spreads[c]) * columns.scales[c];
  }
  for (int64_t c = count; c < kColumns; ++c)
    out->expected[c] = out->most[c] = -std::numeric_limits<float>::infinity();
  out->top = LargestOf(out->expected);
  out->peak = LargestOf(out->most);
}

SSDEVICE_TARGET_AVX2 void SetBoundsAvx2(const Columns& columns, int64_t count, const float* upper,
                                        float sum, float reach, Bounds* out) {
  SetBounds(columns, count, upper, sum, reach, out);
}

struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int64_t column = 0;

  void Take(float other, int64_t at) {
    if (other > value) *this = {other, at};
  }
};

// A call's work. In the first pass parts compute what the upper bits say, in the second they look
// among what may win.
struct Call {
  const Halves& head;
  const Rows& rows;
  ProductsOf<BlockRows> products;
  int64_t count;
  size_t parts;
  std::vector<float>& sums;   // [R, N]: of q (h - 8)
  std::vector<float>& peaks;  // [R, groups]: what a product is at most
  std::vector<float> needed;  // [R]: a product that no winner is below
  std::vector<Best> best;     // [parts, R]

  Call(const Halves& head, const Rows& rows, int64_t count, size_t parts,
       std::vector<float> (&room)[2])
      : head(head),
        rows(rows),
        products(Int4Products(kNone)),
        count(count),
        parts(parts),
        sums(room[0]),
        peaks(room[1]),
        needed(static_cast<size_t>(count)),
        best(parts * static_cast<size_t>(count)) {
    sums.resize(static_cast<size_t>(Times(count, head.upper->outputs)));
    peaks.resize(static_cast<size_t>(count * head.upper->Groups()));
  }

  int64_t First(size_t part) const {
    return head.upper->Groups() * static_cast<int64_t>(part) / static_cast<int64_t>(parts);
  }
  Best& BestOf(size_t part, int64_t row) {
    return best[part * static_cast<size_t>(count) + static_cast<size_t>(row)];
  }

  Bounds BoundsOf(int64_t row, int64_t group, const float* upper, int64_t columns) const {
    const float sum = rows.sums[static_cast<size_t>(row)];
    const float reach = rows.reach[static_cast<size_t>(row)];
    Bounds bounds;
    (kAvx2 ? SetBoundsAvx2 : SetBounds)(head.Of(group), columns, upper, sum, reach, &bounds);
    return bounds;
  }

  float Product(int64_t row, int64_t column) const {
    const float scale = head.Of(column / kColumns).scales[column % kColumns];
    const BlockRows::Part* first = rows.parts.data() + row;
    const int blocks = Blocks(head.upper->inputs);
    const int32_t lower =
        (kAvx2 ? LowerSumAvx2 : LowerSum)(head.Lower(column), first, count, blocks);
    const int32_t upper =
        static_cast<int32_t>(sums[static_cast<size_t>(row * head.upper->outputs + column)]);
    return static_cast<float>(16 * upper + lower) * scale;
  }

  void Compute(size_t part) {
    const Weights& weights = *head.upper;
    EachProduct(
        weights, static_cast<int64_t>(part), static_cast<const BlockRows&>(rows), products, count,
        [&](int64_t r, int64_t g, const float* upper, int64_t columns) {
          std::copy(upper, upper + columns, sums.data() + r * weights.outputs + g * kColumns);
          const Bounds bounds = BoundsOf(r, g, upper, columns);
          peaks[static_cast<size_t>(r * weights.Groups() + g)] = bounds.peak;
          Best& best = BestOf(part, r);
          if (bounds.top > best.value)
            best = {bounds.top, g * kColumns + (std::find(bounds.expected,
                                                          bounds.expected + columns, bounds.top) -
                                                bounds.expected)};
        });
  }

  void Look(size_t part) {
    thread_local std::vector<int64_t> found;
    const int64_t outputs = head.upper->outputs;
    float upper[kColumns] = {};
    for (int64_t r = 0; r < count; ++r) {
      found.clear();
      for (int64_t g = First(part); g < First(part + 1); ++g) {
        if (!(peaks[static_cast<size_t>(r * head.upper->Groups() + g)] >=
              needed[static_cast<size_t>(r)]))
          continue;
        const int64_t columns = std::min<int64_t>(kColumns, outputs - g * kColumns);
        std::copy_n(sums.data() + r * outputs + g * kColumns, columns, upper);
        const Bounds bounds = BoundsOf(r, g, upper, columns);
        for (int64_t c = 0; c < columns; ++c)
          if (bounds.most[c] >= needed[static_cast<size_t>(r)]) found.push_back(g * kColumns + c);
      }
      Best& best = BestOf(part, r) = {};
      for (size_t i = 0; i < found.size(); ++i) {
        if (i + kNext < found.size())
          Prefetch(head.Lower(found[i + kNext]), head.lower->bytes / kColumns);
        best.Take(Product(r, found[i]) * rows.scales[static_cast<size_t>(r)], found[i]);
      }
    }
  }

  Best Joined(int64_t row) {
    Best joined;
    for (size_t part = 0; part < parts; ++part)
      joined.Take(BestOf(part, row).value, BestOf(part, row).column);
    return joined;
  }
};

class Argmax : public Kernel {
 public:
  explicit Argmax(const Info& info) {
    const Columned given(info);
    Require(given.inputs <= kMostUnscaled, "its rows are too wide");
    halves_ = Packed(given.inputs, given.outputs, given.codes, given.scales);
  }

  void Compute(Context& context) const override {
    const Tensor x = context.Input(0);
    const int64_t inputs = x.shape.Last();
    const int64_t count = RowsFor(*halves_.upper, x.shape);
    auto* y = context.Output<int64_t>(0, x.shape.WithLast(1));
    if (count == 0) return;
    thread_local Rows rows;
    rows.Fill(context, x.As<float>(), count, inputs);
    thread_local std::vector<float> room[2];
    const int64_t parts = PartsOf(halves_.upper->Groups());
    Call call(halves_, rows, count, static_cast<size_t>(parts), room);
    context.Each(parts, [&](int64_t part) { call.Compute(static_cast<size_t>(part)); });
    for (int64_t r = 0; r < count; ++r)
      call.needed[static_cast<size_t>(r)] = call.Product(r, call.Joined(r).column);
    context.Each(parts, [&](int64_t part) { call.Look(static_cast<size_t>(part)); });
    // A row of zeros has scale 0, and products that are all alike.
    for (int64_t r = 0; r < count; ++r)
      y[r] = rows.scales[static_cast<size_t>(r)] > 0 ? call.Joined(r).column : 0;
  }

 protected:
  Halves halves_;
};

class Tied : public Argmax {
 public:
  using Argmax::Argmax;

  void Compute(Context& context) const override {
    const Weights& weights = *halves_.upper;
    LookUp(context, weights, [&](int64_t id, float* y) {
      const uint8_t* group = weights.Group(id / kColumns);
      const uint8_t* lower = halves_.Lower(id);
      const int64_t c = id % kColumns;
      const float scale = halves_.Of(id / kColumns).scales[c];
      for (int64_t k = 0; k < weights.inputs; ++k) {
        const int h = group[UpperAt(k, c)] >> Shift(k) & 15;
        const int l = lower[LowerAt(k)] >> Shift(k) & 15;
        y[k] = static_cast<float>(16 * h + l - kShift) * scale;
      }
    });
  }
};

}  // namespace

Operator Int8Argmax() {
  return {"Int8Argmax",
          Make<Argmax>,
          {Type::kFloat, Type::kInt8, Type::kFloat, Type::kUint8},
          1,
          Type::kInt64};
}

Operator TiedEmbedding() {
  return {"TiedEmbedding", Make<Tied>, {Type::kInt32, Type::kInt8, Type::kFloat}};
}

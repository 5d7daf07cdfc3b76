// What an app's LoRA adds to linears of the base. Its factors are inputs of the graph, so nothing
// of them can be packed.
//
// LowRank1(base [.., R, N], x [.., R, K], down [K, S] int8, scales [S], zero uint8, up [S, N]) ->
// [.., R, N] float LowRank2, LowRank3(base, x, down, scales, zero, ranks [P] int64, up_1 [S_1, N_1]
// .. up_P): of P = 2 or 3 linears that read the same
//     rows, whose columns lie side by side, as ``ranks`` says whose those of ``down`` are
// h = Int8Linear(x, down, scales, zero), bit by bit (int8.cpp), and y = base + h up: of every
// linear the products h[r, s] * up[s, n] are added to base[r, n] by fused multiply-adds in the
// order of s, so the bits of a row depend on nothing else.

#include "int8.h"

namespace {

using Rows = RowsAs<int16_t>;

constexpr size_t kMostParts = 3;
constexpr size_t kFirstUp = 5;
constexpr int64_t kPiece =
    256;  // columns that a thread takes at once: their products stay in its first cache

// Adds a row's codes times ``width`` columns of down, from input ``k`` on.
void Sums(const Rows& rows, int64_t row, int64_t count, const int8_t* down, int64_t k,
          int64_t inputs, int64_t rank, int64_t width, int32_t* sums) {
  for (; k < inputs; ++k) {
    const int16_t q = rows.parts[static_cast<size_t>(k / kBlock * count + row)].codes[k % kBlock];
    for (int64_t c = 0; c < width; ++c) sums[c] += q * down[k * rank + c];
  }
}

#ifdef SSDEVICE_AVX2
// The same of eight columns, two inputs at a time; returns how many inputs it has taken.
SSDEVICE_TARGET_AVX2 int64_t SumsAvx2(const Rows& rows, int64_t row, int64_t count,
                                      const int8_t* down, int64_t inputs, int64_t rank,
                                      int32_t* sums) {
  __m256i sum = _mm256_setzero_si256();
  const int64_t even = inputs / 2 * 2;
  for (int64_t first = 0; first < even; first += kBlock) {
    const int16_t* codes = rows.parts[static_cast<size_t>(first / kBlock * count + row)].codes;
    const int64_t end = std::min<int64_t>(kBlock, even - first);
    for (int64_t k = 0; k < end; k += 2, down += 2 * rank) {
      const auto* one = reinterpret_cast<const __m128i*>(down);
      const auto* next = reinterpret_cast<const __m128i*>(down + rank);
      const __m128i both = _mm_unpacklo_epi8(_mm_loadl_epi64(one), _mm_loadl_epi64(next));
      sum = _mm256_add_epi32(
          sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(both), _mm256_set1_epi32(Word(codes + k))));
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), sum);
  return even;
}
#endif

void Down(const Rows& rows, int64_t row, int64_t count, const int8_t* down, const float* scales,
          int64_t inputs, int64_t rank, float* h) {
  for (int64_t first = 0; first < rank; first += kLanes) {
    int32_t sums[kLanes] = {};
    const int64_t width = std::min<int64_t>(kLanes, rank - first);
    int64_t k = 0;
#ifdef SSDEVICE_AVX2
    if (kAvx2 && width == kLanes) k = SumsAvx2(rows, row, count, down + first, inputs, rank, sums);
#endif
    Sums(rows, row, count, down + first, k, inputs, rank, width, sums);
    for (int64_t c = 0; c < width; ++c)
      h[first + c] =
          static_cast<float>(sums[c]) * scales[first + c] * rows.scales[static_cast<size_t>(row)];
  }
}

// Adds h up to ``count`` columns.
void AddUp(const float* h, int64_t rank, const float* up, int64_t stride, int64_t count, float* y) {
  for (int64_t s = 0; s < rank; ++s, up += stride)
    for (int64_t n = 0; n < count; ++n) y[n] = std::fma(h[s], up[n], y[n]);
}

#ifdef SSDEVICE_EIGHT
template <int V>
SSDEVICE_EACH void AddVectors(const float* h, int64_t rank, const float* up, int64_t stride,
                              float* y) {
  Eight sums[V];
  SSDEVICE_UNROLL for (int v = 0; v < V; ++v) sums[v] = Load(y + kLanes * v);
  for (int64_t s = 0; s < rank; ++s, up += stride)
    SSDEVICE_UNROLL for (int v = 0; v < V; ++v) sums[v] =
        Fma(All(h[s]), Load(up + kLanes * v), sums[v]);
  SSDEVICE_UNROLL for (int v = 0; v < V; ++v) Store(sums[v], y + kLanes * v);
}

SSDEVICE_EIGHT void AddUpEight(const float* h, int64_t rank, const float* up, int64_t stride,
                               int64_t count, float* y) {
  constexpr int kMany = 8;
  int64_t n = 0;
  for (; n + kMany * kLanes <= count; n += kMany * kLanes)
    AddVectors<kMany>(h, rank, up + n, stride, y + n);
  for (; n < count; n += kLanes) AddVectors<1>(h, rank, up + n, stride, y + n);
}
#endif

// A linear's factor, and where its rows of ``h`` and its columns begin.
struct Up {
  const float* from;
  int64_t rank, columns, first_rank, first_column, first_piece;
};

class LowRank : public Kernel {
 public:
  explicit LowRank(const Info& info)
      : parts_(info.Inputs() == kFirstUp + 1 ? 1 : info.Inputs() - kFirstUp - 1) {}

  void Compute(Context& context) const override {
    const Tensor base = context.Input(0);
    const Tensor x = context.Input(1);
    const Tensor down = context.Input(2);
    const Tensor scales = context.Input(3);
    const int64_t count = x.shape.Rows();
    const int64_t inputs = x.shape.Last();
    const int64_t outputs = base.shape.Last();
    const int64_t rank = down.shape.Last();
    Require(base.shape.Rows() == count && down.shape == Shape{inputs, rank} &&
                scales.shape == Shape{rank} && inputs <= kMostSummed,
            "its factors do not fit the rows");
    Up ups[kMostParts];
    const int64_t pieces = Parts(context, rank, outputs, ups);
    float* y = context.Output<float>(0, base.shape);
    if (count == 0 || outputs == 0) return;
    thread_local Rows room;
    thread_local std::vector<float> products;
    Rows& rows = room;
    Quantize(context, x.As<float>(), count, inputs, &rows);
    products.resize(static_cast<size_t>(Times(count, rank)));
    float* h = products.data();
    context.Each(
        count,
        [&](int64_t row) {
          Down(rows, row, count, down.As<int8_t>(), scales.As<float>(), inputs, rank,
               h + row * rank);
        },
        count < 2);
    context.EachRow(pieces, kPiece * (rank + 1), [&](int64_t piece) {
      const Up* up = ups + parts_ - 1;
      while (up->first_piece > piece) --up;
      const int64_t first = (piece - up->first_piece) * kPiece;
      const int64_t columns = std::min(kPiece, up->columns - first);
      for (int64_t row = 0; row < count; ++row) {
        const float* from = base.As<float>() + row * outputs + up->first_column + first;
        const float* its = h + row * rank + up->first_rank;
        float* to = y + row * outputs + up->first_column + first;
        std::copy(from, from + columns, to);
        int64_t done = 0;
#ifdef SSDEVICE_EIGHT
        if (kEight)
          AddUpEight(its, up->rank, up->from + first, up->columns, done = columns / kLanes * kLanes,
                     to);
#endif
        AddUp(its, up->rank, up->from + first + done, up->columns, columns - done, to + done);
      }
    });
  }

 private:
  // Fills ``ups`` and says into how many pieces their columns are cut.
  int64_t Parts(Context& context, int64_t rank, int64_t outputs, Up* ups) const {
    const Tensor ranks = parts_ > 1 ? context.Input(kFirstUp) : Tensor{};
    Require(parts_ == 1 || ranks.shape == Shape{static_cast<int64_t>(parts_)},
            "expected a rank for each linear");
    int64_t ranked = 0;
    int64_t columns = 0;
    int64_t pieces = 0;
    for (size_t i = 0; i < parts_; ++i) {
      const Tensor up = context.Input(kFirstUp + (parts_ > 1) + i);
      const int64_t its = parts_ > 1 ? ranks.As<int64_t>()[i] : rank;
      Require(up.shape.Rank() == 2 && up.shape[0] == its,
              "a factor has another rank than its linear");
      ups[i] = {up.As<float>(), its, up.shape[1], ranked, columns, pieces};
      ranked = Plus(ranked, its);
      columns = Plus(columns, up.shape[1]);
      pieces += (up.shape[1] + kPiece - 1) / kPiece;
    }
    Require(ranked == rank && columns == outputs, "its factors do not fit the base's columns");
    return pieces;
  }

  size_t parts_;
};

Operator Of(const char* name, size_t parts) {
  Operator made{
      name, Make<LowRank>, {Type::kFloat, Type::kFloat, Type::kInt8, Type::kFloat, Type::kUint8}};
  if (parts > 1) made.inputs.push_back(Type::kInt64);
  made.inputs.insert(made.inputs.end(), parts, Type::kFloat);
  return made;
}

}  // namespace

Operator LowRank1() { return Of("LowRank1", 1); }
Operator LowRank2() { return Of("LowRank2", 2); }
Operator LowRank3() { return Of("LowRank3", 3); }

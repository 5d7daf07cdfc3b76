// A graph of ONNX Runtime and the KV cache that it reads, through ONNX Runtime's C API.
#pragma once

#include <onnxruntime_c_api.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifdef SSDEVICE_KERNELS  // runtime/onnx/kernels, compiled into this program
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*);
extern "C" void ssdevice_crew(int threads);
constexpr bool kKernels = true;
#else
constexpr bool kKernels = false;
#endif

namespace fs = std::filesystem;
using Error = std::runtime_error;
using Ids = std::vector<int32_t>;
using Names = std::set<std::string>;
using Shape = std::vector<int64_t>;
using Type = ONNXTensorElementDataType;

constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr Type kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr auto kRows = "rows";

constexpr int64_t bytes_of(Type type) { return type == kHalf ? 2 : 4; }

// Seconds on a clock that only goes on.
inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline const OrtApi& api() {
  static const OrtApi* const table = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!table) throw Error("ONNX Runtime is older than the header that this host was compiled with");
  return *table;
}

inline void check(OrtStatus* status) {
  if (!status) return;
  const std::string text = api().GetErrorMessage(status);
  api().ReleaseStatus(status);
  throw Error(text.substr(0, text.find('\n')));
}

template <typename Object>
using Owned = std::unique_ptr<Object, void (*)(Object*)>;

// The object that a function of the C API writes to its last argument.
template <typename Object, typename Create, typename... Arguments>
Owned<Object> make(void (*release)(Object*), Create create, Arguments... arguments) {
  Object* made = nullptr;
  check(create(arguments..., &made));
  return {made, release};
}

// A tensor on the caller's memory.
inline Owned<OrtValue> view(void* data, size_t bytes, const Shape& shape, Type type) {
  const OrtApi& ort = api();
  static const auto cpu = make(ort.ReleaseMemoryInfo, ort.CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault);
  return make(ort.ReleaseValue, ort.CreateTensorWithDataAsOrtValue, cpu.get(), data, bytes, shape.data(),
              shape.size(), type);
}

// Gives back the pages of a folder's files that nobody has changed: kernels have packed what they read of the weights, which
// every graph maps once more. Does nothing on systems other than Linux.
inline void give_back([[maybe_unused]] const fs::path& folder) {
#ifdef __linux__
  const fs::path where = fs::canonical(folder);
  std::ifstream mappings("/proc/self/smaps");
  uintptr_t start = 0, end = 0;
  bool inside = false;
  for (std::string line; std::getline(mappings, line);) {
    unsigned long from = 0, to = 0;
    int path = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %*s %n", &from, &to, &path) == 2 && path) {
      start = from, end = to;
      inside = fs::path(line.substr(path)).parent_path() == where;
    } else if (inside && line.rfind("Anonymous:", 0) == 0 && line.find(" 0 kB") != std::string::npos) {
      madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
    }
  }
#endif
}

// How a program runs graphs. `threads`: 0 for all cores. `quantized`: all large products are those of kernels, if it has
// any; then these have threads of their own, the same for all graphs.
struct Options {
  int threads = 0;
  bool kernels = kKernels, quantized = false;
};

// Keys and values of all layers as one array [2 * layers, capacity]: rows of layer 0's keys, then of its values, ..
// The host copies rows and never reads them, so it needs only their size in bytes.
struct Cache {
  int64_t arrays, capacity, row_bytes;
  std::vector<char> memory = std::vector<char>(arrays * capacity * row_bytes);

  char* row(int64_t array, int64_t at) { return memory.data() + (array * capacity + at) * row_bytes; }

  // How many rows to show a graph, which masks those beyond `length`. The number is congruent to `length` modulo `lanes`,
  // so that sums over rows add the same numbers in the same order whether a token was drafted or decoded plainly.
  int64_t visible(int64_t length, int64_t lanes) const {
    const int64_t bucket = lanes > 1 ? 32 : 128;
    const int64_t shown = (std::max<int64_t>(length, 1) + bucket - 1) / bucket * bucket + length % lanes;
    return shown <= capacity ? shown : capacity - (capacity - length) % lanes;
  }
};

// A function of the contract. `ids`: the elements of its int32 inputs and outputs, which the caller writes and reads in place.
class Graph {
 public:
  std::map<std::string, Ids> ids;

  // `required`: the tensors that the caller cannot do without.
  Graph(const fs::path& file, const Options& options, const Names& required) : file_(file.string()) {
    const OrtApi& ort = api();
    if (!fs::is_regular_file(file)) throw Error(file_ + ": there is no such file");
    static const auto environment = make(ort.ReleaseEnv, ort.CreateEnv, ORT_LOGGING_LEVEL_FATAL, "ssdevice");
    const auto settings = make(ort.ReleaseSessionOptions, ort.CreateSessionOptions);
    int crew = 0;
#ifdef SSDEVICE_KERNELS
    if (options.kernels) {
      const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
      if (options.quantized) crew = options.threads ? options.threads : cores;
      ssdevice_crew(crew);
      check(RegisterCustomOps(settings.get(), OrtGetApiBase()));
    }
#endif
    check(ort.SetIntraOpNumThreads(settings.get(), crew ? 1 : options.threads));
    check(ort.AddSessionConfigEntry(settings.get(), "session.force_spinning_stop", "1"));  // after each call
    session_ = make(ort.ReleaseSession, ort.CreateSession, environment.get(), file.c_str(), settings.get());
    give_back(file.parent_path());
    if (options.kernels && attention() == "TreeAttention") lanes_ = 1;  // its sums leave out masked rows
    read(outputs_, ort.SessionGetOutputCount, ort.SessionGetOutputName, ort.SessionGetOutputTypeInfo);
    read(inputs_, ort.SessionGetInputCount, ort.SessionGetInputName, ort.SessionGetInputTypeInfo);
    ids["length"].resize(1);  // a graph may do without it
    for (const auto& name : required) {
      if (!ids.count(name)) throw Error(file_ + ": the graph has no tensor '" + name + "'");
    }
  }

  int64_t arrays() const { return shape_[0]; }
  int64_t new_rows() const { return shape_[1]; }
  int64_t width() const { return shape_[2]; }
  int64_t row_bytes() const { return width() * bytes_of(type_); }
  Type type() const { return type_; }

  // Calls the graph on the first `length` rows of a cache, always the same one. Returns the seconds that it took.
  double run(Cache& cache, int64_t length) {
    ids["length"][0] = static_cast<int32_t>(length);
    const int64_t shown = cache.visible(length, lanes_);
    if (shown != shown_) bind(cache, shown);
    const double start = now();
    const size_t n = inputs_.size();
    check(api().Run(session_.get(), nullptr, names_.data(), given_.data(), n, &names_[n], outputs_.size(), &given_[n]));
    return now() - start;
  }

  // Puts the first `count` new rows at `length`.
  void commit(Cache& cache, int64_t length, int64_t count) const {
    if (count > new_rows()) throw Error(file_ + ": the graph returned too few rows");
    for (int64_t array = 0; array < arrays(); ++array) {
      std::copy_n(&rows_[array * new_rows() * row_bytes()], count * row_bytes(), cache.row(array, length));
    }
  }

 private:
  struct Tensor {
    std::string name;
    int64_t array;  // of the cache; negative for other tensors
    Shape shape;
  };

  // Tensors on the memory of the cache's first `shown` rows, of `ids` and of `rows_`, none of which ever moves.
  void bind(Cache& cache, int64_t shown) {
    values_.clear(), given_.clear(), names_.clear();
    for (const auto* tensors : {&inputs_, &outputs_}) {
      for (const auto& [name, array, shape] : *tensors) {
        values_.push_back(
            array >= 0      ? view(cache.row(array, 0), shown * row_bytes(), {shown, width()}, type_)
            : name == kRows ? view(rows_.data(), rows_.size(), shape, type_)
                            : view(ids[name].data(), ids[name].size() * sizeof(int32_t), shape, kInt32));
        given_.push_back(values_.back().get());
        names_.push_back(name.c_str());
      }
    }
    shown_ = shown;
  }

  // What the graph says of its attention; empty if it says nothing.
  std::string attention() const {
    const OrtApi& ort = api();
    OrtAllocator* allocator = nullptr;
    check(ort.GetAllocatorWithDefaultOptions(&allocator));
    const auto metadata = make(ort.ReleaseModelMetadata, ort.SessionGetModelMetadata, session_.get());
    char* value = nullptr;
    check(ort.ModelMetadataLookupCustomMetadataMap(metadata.get(), allocator, "ssdevice.attention", &value));
    const std::string found = value ? value : "";
    if (value) check(ort.AllocatorFree(allocator, value));
    return found;
  }

  template <typename Count, typename Name, typename Type>
  void read(std::vector<Tensor>& tensors, Count count_of, Name name_of, Type type_of) {
    OrtAllocator* allocator = nullptr;
    check(api().GetAllocatorWithDefaultOptions(&allocator));
    size_t count = 0, rank = 0;
    check(count_of(session_.get(), &count));
    for (size_t i = 0; i < count; ++i) {
      char* name = nullptr;
      check(name_of(session_.get(), i, allocator, &name));
      Tensor tensor{name, array_of(name), {}};
      check(api().AllocatorFree(allocator, name));
      const auto info = make(api().ReleaseTypeInfo, type_of, session_.get(), i);
      const OrtTensorTypeAndShapeInfo* details = nullptr;
      auto type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
      check(api().CastTypeInfoToTensorInfo(info.get(), &details));
      if (details) {  // null: a sequence or a map
        check(api().GetTensorElementType(details, &type));
        check(api().GetDimensionsCount(details, &rank));
        tensor.shape.resize(rank);
        check(api().GetDimensions(details, tensor.shape.data(), rank));
      }
      if (!accept(tensor, type)) {
        throw Error(file_ + ": '" + tensor.name +
                    "' is no tensor of a bundle with one app and a float32 or float16 cache");
      }
      tensors.push_back(std::move(tensor));
    }
    if (rows_.empty()) throw Error(file_ + ": the graph has no tensor 'rows'");
  }

  static int64_t array_of(const char* name) {
    unsigned layer = 0;
    if (std::sscanf(name, "past_keys.%u", &layer) == 1) return 2 * int64_t{layer};
    if (std::sscanf(name, "past_values.%u", &layer) == 1) return 2 * int64_t{layer} + 1;
    return -1;
  }

  // Whether a tensor is one of the contract's; makes its memory. The outputs come first.
  bool accept(const Tensor& tensor, Type type) {
    static const Names integers{"chunk", "count",       "drafts",    "length", "root",
                                "valid", "next_drafts", "next_root", "tokens"};
    if (tensor.array >= 0) return type == type_ && !rows_.empty() && tensor.array < arrays();
    int64_t size = 1;
    for (const int64_t dimension : tensor.shape) size *= std::max<int64_t>(dimension, 0);  // negative: not fixed
    if (tensor.name != kRows) {
      ids[tensor.name].reserve(1);  // a model that drafts nothing has no `next_drafts`, and still a tensor for them
      ids[tensor.name].resize(size);
      return type == kInt32 && (size > 0 || tensor.name == "next_drafts") && integers.count(tensor.name);
    }
    shape_ = tensor.shape;
    type_ = type;
    rows_.resize(size * bytes_of(type));
    return (type == kFloat || type == kHalf) && shape_.size() == 3;
  }

  std::string file_;
  Owned<OrtSession> session_{nullptr, api().ReleaseSession};
  int64_t lanes_ = 16, shown_ = -1;
  std::vector<Tensor> inputs_, outputs_;
  std::vector<char> rows_;  // keys and values of the new rows
  Shape shape_;             // of rows_
  Type type_ = kFloat;      // of rows_ and the cache
  std::vector<Owned<OrtValue>> values_;  // what `Run` takes
  std::vector<OrtValue*> given_;
  std::vector<const char*> names_;
};

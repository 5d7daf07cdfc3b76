// A graph of ONNX Runtime and the KV cache that it reads, through ONNX Runtime's C API.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "bundle.h"
#include "conversation.h"

#ifdef SSDEVICE_KERNELS  // ssdevice/runtime/onnx/kernels, compiled into this program
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*);
extern "C" void ssdevice_crew(int threads);
constexpr bool kKernels = true;
#else
constexpr bool kKernels = false;
#endif

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
  static const auto cpu =
      make(ort.ReleaseMemoryInfo, ort.CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault);
  return make(ort.ReleaseValue, ort.CreateTensorWithDataAsOrtValue, cpu.get(), data, bytes,
              shape.data(), shape.size(), type);
}

// Gives back the pages of a folder's files that nobody has changed: kernels have packed what they
// read of the weights, which every graph maps once more. Does nothing on systems other than Linux.
inline void give_back([[maybe_unused]] const fs::path& folder) {
#ifdef __linux__
  const fs::path where = fs::canonical(folder);
  std::ifstream mappings("/proc/self/smaps");
  uintptr_t start = 0;
  uintptr_t end = 0;
  bool inside = false;
  for (std::string line; std::getline(mappings, line);) {
    unsigned long from = 0;
    unsigned long to = 0;
    int path = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %*s %n", &from, &to, &path) == 2 && path) {
      start = from;
      end = to;
      inside = fs::path(line.substr(path)).parent_path() == where;
    } else if (inside && line.rfind("Anonymous:", 0) == 0 &&
               line.find(" 0 kB") != std::string::npos) {
      madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
    }
  }
#endif
}

// How a program runs graphs. `threads`: 0 for all cores. `quantized`: all large products are those
// of kernels, if it has any; then these have threads of their own, the same for all graphs.
struct Options {
  int threads = 0;
  bool kernels = kKernels;
  bool quantized = false;
};

// Memory that is zero, which the system gives when it is first written. Throws an Error if there is
// not enough.
class Zeros {
 public:
  explicit Zeros(int64_t size) : memory_(std::calloc(std::max<int64_t>(size, 1), 1), std::free) {
    if (!memory_) {
      throw Error("no memory for a KV cache or its rows of " + std::to_string(size) + " bytes");
    }
  }

  char* data() const { return static_cast<char*>(memory_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_;
};

// Keys and values of all layers as one array [2 * layers, capacity]: rows of layer 0's keys, then
// of its values, .. The host copies rows and never reads them, so it needs only their size in
// bytes.
struct Cache {
  int64_t arrays;
  int64_t capacity;
  int64_t row_bytes;
  Zeros memory{arrays * capacity * row_bytes};

  char* row(int64_t array, int64_t at) {
    return memory.data() + (array * capacity + at) * row_bytes;
  }

  // How many rows to show a graph, which masks those beyond `length`. The number is congruent to
  // `length` modulo `lanes`, so that sums over rows add the same numbers in the same order whether
  // a token was drafted or decoded plainly.
  int64_t visible(int64_t length, int64_t lanes) const {
    const int64_t bucket = lanes > 1 ? 32 : 128;
    const int64_t shown =
        (std::max<int64_t>(length, 1) + bucket - 1) / bucket * bucket + length % lanes;
    return shown <= capacity ? shown : capacity - (capacity - length) % lanes;
  }
};

// A function of the contract as a graph on a cache, which must outlive it.
class Graph : public Callable {
 public:
  // `function`: its tensors, which must be those of the file.
  Graph(const fs::path& file, const Options& options, Function function, Cache& cache)
      : cache_(cache),
        file_(file.string()),
        function_(std::move(function)),
        rows_(bytes(function_.outputs.back())) {
    const OrtApi& ort = api();
    static const auto environment =
        make(ort.ReleaseEnv, ort.CreateEnv, ORT_LOGGING_LEVEL_FATAL, "ssdevice");
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
    // After each call.
    check(ort.AddSessionConfigEntry(settings.get(), "session.force_spinning_stop", "1"));
    session_ = make(ort.ReleaseSession, ort.CreateSession, environment.get(), file.c_str(),
                    settings.get());
    give_back(file.parent_path());
    // The sums of ours leave out masked rows.
    if (options.kernels && attention() == "TreeAttention") lanes_ = 1;
    compare(function_.inputs, ort.SessionGetInputCount, ort.SessionGetInputName,
            ort.SessionGetInputTypeInfo);
    compare(function_.outputs, ort.SessionGetOutputCount, ort.SessionGetOutputName,
            ort.SessionGetOutputTypeInfo);
    for (const auto* tensors : {&function_.inputs, &function_.outputs}) {
      for (const TensorSpec& tensor : *tensors) {
        if (tensor.type == kInt32) {
          // A model that drafts nothing still has a tensor for drafts.
          ids[tensor.name].reserve(1);
          ids[tensor.name].resize(elements(tensor.shape));
        } else if (!of_cache(tensor)) {
          floats[tensor.name].resize(elements(tensor.shape));
        }
      }
    }
  }

  void run(int64_t length) override {
    ids["length"][0] = static_cast<int32_t>(length);
    const int64_t shown = cache_.visible(length, lanes_);
    if (shown != shown_) bind(shown);
    const size_t inputs = function_.inputs.size();
    const size_t outputs = function_.outputs.size();
    check(api().Run(session_.get(), nullptr, names_.data(), given_.data(), inputs, &names_[inputs],
                    outputs, &given_[inputs]));
  }

  void commit(int64_t length, const Ids& nodes) override {
    const int64_t written = function_.rows();
    if (nodes.empty() || nodes.back() >= written) {
      throw Error(file_ + ": the graph returned too few rows");
    }
    for (int64_t array = 0; array < cache_.arrays; ++array) {
      for (size_t at = 0; at < nodes.size();) {  // neighbours together
        size_t run = 1;
        while (at + run < nodes.size() &&
               nodes[at + run] == nodes[at] + static_cast<int32_t>(run)) {
          ++run;
        }
        const char* rows = rows_.data() + (array * written + nodes[at]) * cache_.row_bytes;
        std::copy_n(rows, run * cache_.row_bytes, cache_.row(array, length + at));
        at += run;
      }
    }
  }

 private:
  static bool of_cache(const TensorSpec& tensor) {
    return tensor.name == kRows || tensor.shape[0] == kPast;
  }
  static int64_t bytes(const TensorSpec& tensor) {
    return elements(tensor.shape) * bytes_of(tensor.type);
  }

  void* place(const TensorSpec& tensor) {
    if (tensor.name == kRows) return rows_.data();
    if (tensor.type == kInt32) return ids[tensor.name].data();
    return floats[tensor.name].data();
  }

  // Tensors on the memory of the cache's first `shown` rows and of all else, none of which ever
  // moves.
  void bind(int64_t shown) {
    values_.clear();
    given_.clear();
    names_.clear();
    int64_t array = 0;
    for (const auto* tensors : {&function_.inputs, &function_.outputs}) {
      for (const TensorSpec& tensor : *tensors) {
        if (tensor.shape[0] == kPast) {
          const Shape shape{shown, tensor.shape[1]};
          values_.push_back(
              view(cache_.row(array, 0), shown * cache_.row_bytes, shape, tensor.type));
          ++array;
        } else {
          values_.push_back(view(place(tensor), bytes(tensor), tensor.shape, tensor.type));
        }
        given_.push_back(values_.back().get());
        names_.push_back(tensor.name.c_str());
      }
    }
    shown_ = shown;
  }

  // What the graph says of its attention; empty if it says nothing.
  std::string attention() const {
    const OrtApi& ort = api();
    OrtAllocator* allocator = nullptr;
    check(ort.GetAllocatorWithDefaultOptions(&allocator));
    const auto metadata =
        make(ort.ReleaseModelMetadata, ort.SessionGetModelMetadata, session_.get());
    char* value = nullptr;
    check(ort.ModelMetadataLookupCustomMetadataMap(metadata.get(), allocator, "ssdevice.attention",
                                                   &value));
    const std::string found = value ? value : "";
    if (value) check(ort.AllocatorFree(allocator, value));
    return found;
  }

  // Throws an Error unless the inputs or outputs of the graph are the expected tensors; a size that
  // the graph leaves open fits.
  template <typename Count, typename Name, typename Info>
  void compare(const std::vector<TensorSpec>& expected, Count count_of, Name name_of,
               Info info_of) const {
    OrtAllocator* allocator = nullptr;
    check(api().GetAllocatorWithDefaultOptions(&allocator));
    size_t count = 0;
    check(count_of(session_.get(), &count));
    std::map<std::string, const TensorSpec*> waiting;
    for (const TensorSpec& tensor : expected) waiting[tensor.name] = &tensor;
    for (size_t i = 0; i < count; ++i) {
      char* given = nullptr;
      check(name_of(session_.get(), i, allocator, &given));
      const std::string name = given;
      check(api().AllocatorFree(allocator, given));
      const auto found = waiting.find(name);
      if (found == waiting.end() ||
          !fits(*found->second, make(api().ReleaseTypeInfo, info_of, session_.get(), i).get())) {
        throw Error(
            file_ + ": " + safe(name) +
            " is no tensor of the contract, or has another type or size than in the manifest");
      }
      waiting.erase(found);
    }
    if (!waiting.empty()) {
      throw Error(file_ + ": the graph has no tensor " + safe(waiting.begin()->first));
    }
  }

  static bool fits(const TensorSpec& tensor, const OrtTypeInfo* info) {
    const OrtTensorTypeAndShapeInfo* details = nullptr;
    auto type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    size_t rank = 0;
    check(api().CastTypeInfoToTensorInfo(info, &details));
    if (!details) return false;  // a sequence or a map
    check(api().GetTensorElementType(details, &type));
    check(api().GetDimensionsCount(details, &rank));
    Shape sizes(rank);
    check(api().GetDimensions(details, sizes.data(), rank));
    return type == tensor.type &&
           std::equal(sizes.begin(), sizes.end(), tensor.shape.begin(), tensor.shape.end(),
                      [](int64_t size, int64_t wanted) { return size < 0 || size == wanted; });
  }

  Cache& cache_;
  std::string file_;
  Function function_;
  Zeros rows_;  // keys and values of the new rows, if it returns any
  Owned<OrtSession> session_{nullptr, api().ReleaseSession};
  int64_t lanes_ = 16;                   // in which its sums over rows run
  int64_t shown_ = -1;                   // rows of the cache that are bound
  std::vector<Owned<OrtValue>> values_;  // what `Run` takes
  std::vector<OrtValue*> given_;
  std::vector<const char*> names_;
};

// The graphs of a bundle, which must outlive it, on one cache.
class GraphEngine : public Engine {
 public:
  GraphEngine(const Bundle& bundle, const Options& options)
      : bundle_(bundle),
        options_(options),
        cache_{2 * geometry().layers, geometry().capacity(),
               geometry().width * bytes_of(geometry().type)} {}

  const Geometry& geometry() const override { return bundle_.geometry(); }
  bool streams() const override { return bundle_.streams(); }
  Phrases phrases() const override { return streams() ? Phrases() : bundle_.phrases(); }
  bool has(const std::string& function) const override { return bundle_.has(function); }

  std::unique_ptr<Callable> open(const std::string& function) override {
    return std::make_unique<Graph>(bundle_.file(function), options_, geometry().function(function),
                                   cache_);
  }

 private:
  const Bundle& bundle_;
  const Options options_;
  Cache cache_;
};

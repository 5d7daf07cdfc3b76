// Runs an ssdevice ONNX bundle of one app without Python: token ids in, token ids out.
//
// ssdevice/contract.py describes the graphs. runtime/loop.py and runtime/onnx/cache.py are the same host in Python.

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

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

const OrtApi& api() {
  static const OrtApi* const table = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!table) throw Error("ONNX Runtime is older than the header that this host was compiled with");
  return *table;
}

void check(OrtStatus* status) {
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
Owned<OrtValue> view(void* data, size_t bytes, const Shape& shape, Type type) {
  const OrtApi& ort = api();
  static const auto cpu = make(ort.ReleaseMemoryInfo, ort.CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault);
  return make(ort.ReleaseValue, ort.CreateTensorWithDataAsOrtValue, cpu.get(), data, bytes, shape.data(),
              shape.size(), type);
}

// Keys and values of all layers as one array [2 * layers, capacity]: rows of layer 0's keys, then of its values, ..
// The host copies rows and never reads them, so it needs only their size in bytes.
struct Cache {
  int64_t arrays, capacity, row_bytes;
  std::vector<char> memory = std::vector<char>(arrays * capacity * row_bytes);

  char* row(int64_t array, int64_t at) { return memory.data() + (array * capacity + at) * row_bytes; }

  // How many rows to show a graph, which masks those beyond `length`. The number is congruent to `length`, so that sums
  // over rows add the same numbers in the same order whether a token was drafted or decoded plainly.
  int64_t visible(int64_t length) const {
    constexpr int64_t bucket = 32, lanes = 16;
    const int64_t shown = (std::max<int64_t>(length, 1) + bucket - 1) / bucket * bucket + length % lanes;
    return shown <= capacity ? shown : capacity - (capacity - length) % lanes;
  }
};

// A function of the contract. `ids`: the elements of its int32 inputs and outputs, which the caller writes and reads.
class Graph {
 public:
  std::map<std::string, Ids> ids;

  // `required`: the tensors that the caller cannot do without.
  Graph(const fs::path& file, int threads, const Names& required) : file_(file.string()) {
    const OrtApi& ort = api();
    if (!fs::is_regular_file(file)) throw Error(file_ + ": there is no such file");
    static const auto environment = make(ort.ReleaseEnv, ort.CreateEnv, ORT_LOGGING_LEVEL_FATAL, "ssdevice");
    const auto options = make(ort.ReleaseSessionOptions, ort.CreateSessionOptions);
    check(ort.SetIntraOpNumThreads(options.get(), threads));
    check(ort.AddSessionConfigEntry(options.get(), "session.force_spinning_stop", "1"));  // after each call
    session_ = make(ort.ReleaseSession, ort.CreateSession, environment.get(), file.c_str(), options.get());
    read(outputs_, ort.SessionGetOutputCount, ort.SessionGetOutputName, ort.SessionGetOutputTypeInfo);
    read(inputs_, ort.SessionGetInputCount, ort.SessionGetInputName, ort.SessionGetInputTypeInfo);
    for (const auto& name : required) {
      if (!ids.count(name)) throw Error(file_ + ": the graph has no tensor '" + name + "'");
    }
  }

  int64_t arrays() const { return shape_[0]; }
  int64_t new_rows() const { return shape_[1]; }
  int64_t width() const { return shape_[2]; }
  int64_t row_bytes() const { return width() * bytes_of(type_); }
  Type type() const { return type_; }

  // Calls the graph on the first `length` rows of a cache.
  void run(Cache& cache, int64_t length) {
    const int64_t shown = cache.visible(length);
    ids["length"] = {static_cast<int32_t>(length)};
    std::vector<Owned<OrtValue>> values;
    std::vector<OrtValue*> given;
    std::vector<const char*> names;
    for (const auto* tensors : {&inputs_, &outputs_}) {
      for (const auto& [name, array, shape] : *tensors) {
        values.push_back(
            array >= 0      ? view(cache.row(array, 0), shown * row_bytes(), {shown, width()}, type_)
            : name == kRows ? view(rows_.data(), rows_.size(), shape, type_)
                            : view(ids[name].data(), ids[name].size() * sizeof(int32_t), shape, kInt32));
        given.push_back(values.back().get());
        names.push_back(name.c_str());
      }
    }
    const size_t n = inputs_.size();
    check(api().Run(session_.get(), nullptr, names.data(), given.data(), n, &names[n], outputs_.size(), &given[n]));
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
      ids[tensor.name].resize(size);
      return type == kInt32 && size > 0 && integers.count(tensor.name);
    }
    shape_ = tensor.shape;
    type_ = type;
    rows_.resize(size * bytes_of(type));
    return (type == kFloat || type == kHalf) && shape_.size() == 3;
  }

  std::string file_;
  Owned<OrtSession> session_{nullptr, api().ReleaseSession};
  std::vector<Tensor> inputs_, outputs_;
  std::vector<char> rows_;  // keys and values of the new rows
  Shape shape_;             // of rows_
  Type type_ = kFloat;      // of rows_ and the cache
};

// The number or numbers of a key in manifest.json. Within a string quotes are escaped, so `"key":` is always a key.
Ids manifest(const fs::path& bundle, const std::string& key) {
  const fs::path file = bundle / "manifest.json";
  std::ifstream stream(file);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (text.empty()) throw Error(file.string() + ": there is no such file");
  const auto at = text.find('"' + key + "\":");
  const auto from = text.find_first_of("0123456789]", at);
  if (std::max(at, from) == std::string::npos) throw Error(file.string() + ": there is no valid " + key);
  std::istringstream value(text.substr(from));
  Ids numbers;
  char separator = 0;
  for (int32_t number = 0; value >> number; value >> separator) numbers.push_back(number);
  return numbers;
}

// One KV cache and the contract's functions on it. `length`: committed rows; going back means lowering it.
class Conversation {
 public:
  const int64_t context, vocab;
  int64_t length = 0;
  double seconds = 0;  // spent in `next`
  int64_t calls = 0;   // of `next`

  Conversation(const fs::path& bundle, bool plain, int threads)
      : context(manifest(bundle, "context").at(0)),
        vocab(manifest(bundle, "vocab").at(0)),
        prefill_(bundle / "prefill.onnx", threads, {"chunk", "next_root"}),
        next_(bundle / (plain ? "step_plain.onnx" : "step.onnx"), threads,
              plain ? Names{"tokens"} : Names{"tokens", "count", "next_drafts"}),
        cache_{prefill_.arrays(), capacity(), prefill_.row_bytes()} {
    if (next_.arrays() != cache_.arrays || next_.width() != prefill_.width() || next_.type() != prefill_.type()) {
      throw Error(bundle.string() + ": the graphs are of different exports");
    }
  }

  bool knows(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id < vocab; });
  }

  // Commits a prompt and returns the first token of the answer.
  int32_t prefill(const Ids& prompt) {
    const size_t size = prefill_.ids["chunk"].size();
    for (size_t at = 0; at < prompt.size(); at += size) {
      Ids chunk(prompt.begin() + at, prompt.begin() + std::min(at + size, prompt.size()));
      const auto count = static_cast<int32_t>(chunk.size());
      chunk.resize(size);
      prefill_.ids["chunk"] = chunk;
      prefill_.ids["valid"] = {count};
      prefill_.run(cache_, length);
      keep(prefill_, prefill_.ids["next_root"], count);
      length += count;
    }
    return prefill_.ids["next_root"][0];
  }

  // The tokens after `last`: one in plain decoding, else the accepted drafts and the token after them.
  Ids next(int32_t last) {
    const auto start = std::chrono::steady_clock::now();
    next_.ids["root"] = {last};
    next_.run(cache_, length);
    Ids tokens = next_.ids["tokens"];
    const int32_t count = next_.ids.count("count") ? next_.ids["count"][0] : 1;
    if (count < 1 || count > static_cast<int32_t>(tokens.size())) throw Error("a graph returned an impossible count");
    tokens.resize(count);
    keep(next_, tokens, count);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++calls;
    return tokens;
  }

 private:
  int64_t capacity() const {  // any length within the context has room for the new rows of a call
    return (context + std::max(prefill_.new_rows(), next_.new_rows()) + 31) / 32 * 32;
  }

  // Commits what a call returned. A damaged graph may return anything, and ids are used as indices.
  void keep(Graph& graph, Ids ids, int64_t rows) {
    const Ids& drafts = graph.ids["next_drafts"];
    ids.insert(ids.end(), drafts.begin(), drafts.end());
    if (!knows(ids)) throw Error("a graph returned a token that the model does not have");
    next_.ids["drafts"] = drafts;
    graph.commit(cache_, length, rows);
  }

  Graph prefill_, next_;
  Cache cache_;
};

// The decoding loop.
Ids decode(Conversation& conversation, const Ids& prompt, const Ids& stops, int64_t max_tokens) {
  conversation.length = 0;
  Ids answer, run{conversation.prefill(prompt)};
  for (const int64_t start = conversation.length;;) {
    const auto stop = std::find_first_of(run.begin(), run.end(), stops.begin(), stops.end());
    answer.insert(answer.end(), run.begin(), stop == run.end() ? stop : stop + 1);
    const auto emitted = static_cast<int64_t>(answer.size());
    conversation.length = start + emitted - 1;  // the next call overwrites the rows of tokens that do not count
    const int64_t room = std::min(max_tokens - emitted, conversation.context - conversation.length);
    if (stop != run.end() || room <= 0) return answer;
    run = conversation.next(answer.back());
    run.resize(std::min<size_t>(run.size(), room));
  }
}

Ids parse(const Conversation& conversation, const std::string& line) {
  std::istringstream stream(line + ' ');  // so that the end is reached only after a valid number
  const Ids prompt{std::istream_iterator<int32_t>(stream), {}};
  if (prompt.empty() || !stream.eof() || !conversation.knows(prompt)) {
    throw Error("expected token ids from 0 to " + std::to_string(conversation.vocab - 1) + ", separated by spaces");
  }
  if (static_cast<int64_t>(prompt.size()) > conversation.context) {
    const std::string size = std::to_string(prompt.size()), context = std::to_string(conversation.context);
    throw Error("the prompt has " + size + " tokens, the bundle was exported for a context of " + context);
  }
  return prompt;
}

int main(int argc, char** argv) try {
  std::map<std::string, int> options{{"--plain", 0}, {"--max-tokens", 256}, {"--threads", 0}};
  const Error usage("expected BUNDLE [--plain] [--max-tokens N] [--threads N]");
  if (argc < 2) throw usage;
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    const int value = name == "--plain" ? 1 : ++i < argc ? std::atoi(argv[i]) : 0;
    if (!options.count(name) || value < 1) throw usage;
    options[name] = value;
  }
  const fs::path bundle = argv[1];
  const Ids stops = manifest(bundle, "stop_ids");
  Conversation conversation(bundle, options["--plain"], options["--threads"]);
  size_t tokens = 0;  // without those of prefill
  for (std::string line; std::getline(std::cin, line);) {
    const Ids answer = decode(conversation, parse(conversation, line), stops, options["--max-tokens"]);
    std::copy(answer.begin(), answer.end() - 1, std::ostream_iterator<int32_t>(std::cout, " "));
    std::cout << answer.back() << std::endl;
    tokens += answer.size() - 1;
  }
  if (tokens == 0) return 0;
  std::cerr << tokens / conversation.seconds << " tokens/s, " << double(tokens) / conversation.calls << " per step\n";
} catch (const std::exception& error) {
  std::cerr << "host: " << error.what() << '\n';
  return 2;
}

// The constants of an export, and the tensors of the graphs that follow from them:
// ssdevice/contract.py in C++.
#pragma once

#include <onnxruntime_c_api.h>

#include "schema.h"

using Names = std::set<std::string>;
using Shape = std::vector<int64_t>;
using Type = ONNXTensorElementDataType;

constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr Type kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr Type kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr auto kRows = "rows";
constexpr auto kPrefill = "prefill";
constexpr auto kStep = "step";
constexpr auto kPlain = "step_plain";
constexpr auto kStepShort = "step_short";
// For hosts that choose tokens.
constexpr auto kVerify = "verify";
constexpr auto kVerifyPlain = "verify_plain";
constexpr auto kDraft = "draft";
// In the order of manifests.
inline constexpr auto kFunctions = {kStep,   kPrefill,     kPlain, kStepShort,
                                    kVerify, kVerifyPlain, kDraft};
constexpr int64_t kPast = -1;  // in a shape: the number of rows that the graph is shown

constexpr int64_t bytes_of(Type type) { return type == kHalf ? 2 : 4; }

inline int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

struct TensorSpec {
  std::string name;
  Shape shape;
  Type type;

  bool operator==(const TensorSpec& other) const {
    return name == other.name && shape == other.shape && type == other.type;
  }
};

struct Function {
  std::string name;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;

  // How many rows of the cache it returns, in its last output.
  int64_t rows() const { return outputs.back().name == kRows ? outputs.back().shape[1] : 0; }

  bool operator==(const Function& other) const {
    return name == other.name && inputs == other.inputs && outputs == other.outputs;
  }
};

struct Geometry {
  int64_t layers;
  int64_t width;  // elements of a row of the cache
  int64_t vocab;
  int64_t gamma;
  int64_t k;
  int64_t context;
  int64_t chunk;
  int64_t hidden;   // elements of a state; 0 without functions for hosts that choose tokens
  int64_t few;      // drafts that a short step verifies; 0 without one
  int64_t emitted;  // the most tokens of a step
  Type type;        // of the cache
  // Of the tree: the ranks of the drafts on the way to each, the root first.
  std::vector<Shape> nodes;

  // Throws an Error if the numbers of a manifest, whose bounds have been checked, contradict each
  // other.
  Geometry(const Json& numbers, Type cache_type) : type(cache_type) {
    const auto number = [&](const char* name) { return numbers.at(name).get<int64_t>(); };
    layers = number("layers");
    width = number("kv_heads") * number("head_dim");
    vocab = number("vocab");
    gamma = number("gamma");
    k = number("k");
    context = number("context");
    chunk = number("chunk");
    hidden = numbers.value("hidden", int64_t{0});
    few = numbers.value("short", int64_t{0});
    const auto tree = numbers.at("tree").get<std::vector<Shape>>();
    std::set<Shape> known{{}};
    Shape last;
    for (const Shape& path : tree) {  // breadth first, every node after its parent, none twice
      const bool next = std::make_pair(last.size(), last) < std::make_pair(path.size(), path);
      if (!next || !known.count({path.begin(), path.end() - 1}) ||
          *std::max_element(path.begin(), path.end()) >= k) {
        throw Error("geometry.tree is no tree of " + std::to_string(k) +
                    " candidates in breadth-first order");
      }
      known.insert(path);
      last = path;
    }
    nodes = tree;
    nodes.insert(nodes.begin(), Shape());
    emitted = static_cast<int64_t>(last.size()) + 1;
    if (emitted > gamma + 1 || k > vocab || context <= static_cast<int64_t>(known.size()) ||
        (few && few + 1 >= emitted)) {
      throw Error("geometry: gamma, k, vocab, context, short and tree contradict each other");
    }
  }

  // Rows of the cache: any length within the context has room for a call's rows.
  int64_t capacity() const {
    const auto written = hidden ? static_cast<int64_t>(nodes.size()) : emitted;
    return (context + std::max(written, chunk) + 31) / 32 * 32;
  }

  Function function(const std::string& name) const {
    Function made{name, {}, {}};
    const auto size = static_cast<int64_t>(nodes.size());
    const TensorSpec root{"root", {1}, kInt32};
    const TensorSpec drafts{"drafts", {gamma, k}, kInt32};
    const TensorSpec length{"length", {1}, kInt32};
    const TensorSpec next{"next_drafts", {gamma, k}, kInt32};
    int64_t rows = 1;
    if (name == kStep || name == kStepShort) {
      const bool is_short = name == kStepShort;
      rows = is_short ? few + 1 : emitted;
      made.inputs = {root, {"drafts", {is_short ? few : gamma, k}, kInt32}, length};
      made.outputs = {{"tokens", {rows}, kInt32}, {"count", {1}, kInt32}, next};
    } else if (name == kPrefill) {
      made.inputs = {{"chunk", {chunk}, kInt32}, {"valid", {1}, kInt32}, length};
      made.outputs = {{"next_root", {1}, kInt32}, next};
      rows = chunk;
    } else if (name == kPlain) {
      made.inputs = {root, length};
      made.outputs = {{"tokens", {1}, kInt32}};
    } else if (name == kVerify || name == kVerifyPlain) {
      made.inputs = {root, length};
      if (name == kVerify) {
        rows = size;
        made.inputs = {root, drafts, length};
      }
      made.outputs = {{"logits", {rows, vocab}, kFloat}, {"states", {rows, hidden}, kFloat}};
    } else {
      made.inputs = {{"token", {1}, kInt32}, {"last_state", {1, hidden}, kFloat}, length};
      made.outputs = {next};
      rows = 0;
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (const char* past : {"past_keys.", "past_values."}) {
        made.inputs.push_back({past + std::to_string(layer), {kPast, width}, type});
      }
    }
    if (rows) made.outputs.push_back({kRows, {2 * layers, rows, width}, type});
    return made;
  }
};

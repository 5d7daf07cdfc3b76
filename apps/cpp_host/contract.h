// The constants of an export, and the tensors of the graphs that follow from them: ssdevice/contract.py in C++.
#pragma once

#include <onnxruntime_c_api.h>

#include "schema.h"

using Names = std::set<std::string>;
using Shape = std::vector<int64_t>;
using Type = ONNXTensorElementDataType;

constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr Type kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
const std::set<std::string> kChoosing{"verify", "verify_plain", "draft"};
constexpr auto kRows = "rows", kPrefill = "prefill", kStep = "step", kPlain = "step_plain";
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
  std::vector<TensorSpec> inputs, outputs;

  // The cache's new rows, the last output.
  const TensorSpec& rows() const { return outputs.back(); }

  bool operator==(const Function& other) const {
    return name == other.name && inputs == other.inputs && outputs == other.outputs;
  }
};

// `emitted`: the most tokens of a step.
struct Geometry {
  int64_t layers, width, vocab, gamma, k, context, chunk, emitted;
  Type type;  // of the cache

  // Throws an Error if the numbers of a manifest, whose bounds have been checked, contradict each other.
  Geometry(const Json& numbers, Type cache_type) : type(cache_type) {
    const auto number = [&](const char* name) { return numbers.at(name).get<int64_t>(); };
    layers = number("layers"), width = number("kv_heads") * number("head_dim"), vocab = number("vocab");
    gamma = number("gamma"), k = number("k"), context = number("context"), chunk = number("chunk");
    const auto tree = numbers.at("tree").get<std::vector<Shape>>();
    std::set<Shape> known{{}};
    Shape last;
    for (const Shape& path : tree) {  // breadth first, every node after its parent, none twice
      const bool next = std::make_pair(last.size(), last) < std::make_pair(path.size(), path);
      if (!next || !known.count({path.begin(), path.end() - 1}) || *std::max_element(path.begin(), path.end()) >= k) {
        throw Error("geometry.tree is no tree of " + std::to_string(k) + " candidates in breadth-first order");
      }
      known.insert(last = path);
    }
    emitted = static_cast<int64_t>(last.size()) + 1;
    if (emitted > gamma + 1 || k > vocab || context <= static_cast<int64_t>(known.size())) {
      throw Error("geometry: gamma, k, vocab, context and tree contradict each other");
    }
  }

  // Rows of the cache: any length within the context has room for a call's rows.
  int64_t capacity() const { return (context + std::max(emitted, chunk) + 31) / 32 * 32; }

  Function function(const std::string& name) const {
    Function made{name, {}, {}};
    const TensorSpec root{"root", {1}, kInt32}, length{"length", {1}, kInt32}, next{"next_drafts", {gamma, k}, kInt32};
    if (name == kStep) {
      made.inputs = {root, {"drafts", {gamma, k}, kInt32}, length};
      made.outputs = {{"tokens", {emitted}, kInt32}, {"count", {1}, kInt32}, next};
    } else if (name == kPrefill) {
      made.inputs = {{"chunk", {chunk}, kInt32}, {"valid", {1}, kInt32}, length};
      made.outputs = {{"next_root", {1}, kInt32}, next};
    } else {
      made.inputs = {root, length};
      made.outputs = {{"tokens", {1}, kInt32}};
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (const char* past : {"past_keys.", "past_values."}) {
        made.inputs.push_back({past + std::to_string(layer), {kPast, width}, type});
      }
    }
    const int64_t rows = name == kStep ? emitted : name == kPrefill ? chunk : 1;
    made.outputs.push_back({kRows, {2 * layers, rows, width}, type});
    return made;
  }
};

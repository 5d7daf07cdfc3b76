// In place of ONNX Runtime, where there is none to call the kernels: what a kernel is made from,
// and one of its calls.
#pragma once

#include <cstring>
#include <map>

#include "kernel.h"

// ``inputs``: the constants among them have data. ``ints``: attributes; floats are 1e-5 for an
// epsilon, else 1/8.
struct Given : Info {
  std::map<std::string, int64_t> ints;
  std::vector<Tensor> inputs;

  float Float(const char* name) const override {
    return std::strcmp(name, "epsilon") ? 0.125f : 1e-5f;
  }
  int64_t Int(const char* name) const override { return ints.at(name); }
  std::string Text(const char*) const override { return ""; }
  Tensor Constant(size_t input) const override { return inputs[input]; }
  size_t Inputs() const override { return inputs.size(); }
  size_t Outputs() const override { return 1; }
};

// A call on one thread, whose outputs are all of one type.
template <typename Result>
struct Call : Context {
  std::vector<Tensor> inputs;
  std::map<size_t, std::vector<Result>> outputs;

  Tensor Input(size_t index) override { return inputs[index]; }
  void* Output(size_t index, const Shape& shape, Type) override {
    outputs[index].resize(static_cast<size_t>(shape.Count()));
    return outputs[index].data();
  }
  void For(size_t total, Work work, void* data) override {
    for (size_t i = 0; i < total; ++i) work(data, i);
  }
};

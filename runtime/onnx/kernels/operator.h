// What the operators share: errors as statuses, shapes and data of tensors, and the fields in which they do not differ.
#pragma once

#include <exception>
#include <vector>

#include "interface.h"

// What may be compiled; what is used is decided on the machine. Tests compile less, to run what other CPUs run.
#if defined(__x86_64__) && !defined(SSDEVICE_PORTABLE)
#pragma GCC diagnostic push  // GCC warns of variables that its own header leaves unset (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#define SSDEVICE_AVX2 1
#ifndef SSDEVICE_WITHOUT_VNNI
#define SSDEVICE_VNNI 1
#endif
#endif
#if defined(__aarch64__) && !defined(SSDEVICE_PORTABLE)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)  // every Mac
#define SSDEVICE_DOT 1
#elif defined(__linux__) && !defined(__clang__)  // GCC compiles single functions for it
#include <sys/auxv.h>
#define SSDEVICE_DOT 1
#endif
#endif

// All else is hidden: two versions of the library in a process share nothing, and each can be unloaded.
#define SSDEVICE_EXPORT extern "C" __attribute__((visibility("default")))

struct Failure {
  ort::Status* status;
};

inline void Check(ort::Status* status) {
  if (status != nullptr) throw Failure{status};
}

inline void Require(const ort::Api& api, bool holds, const char* otherwise) {
  if (!holds) throw Failure{api.CreateStatus(2, otherwise)};
}

inline std::vector<int64_t> SizesOf(const ort::Api& api, const ort::Value* value) {
  ort::Shape* shape = nullptr;
  Check(api.ShapeOf(value, &shape));
  size_t rank = 0;
  ort::Status* status = api.Rank(shape, &rank);
  std::vector<int64_t> sizes(rank);
  if (status == nullptr) status = api.Sizes(shape, sizes.data(), rank);
  api.Release(shape);
  Check(status);
  return sizes;
}

inline int64_t CountOf(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

template <typename T>
T* DataOf(const ort::Api& api, const ort::Value* value) {
  void* data = nullptr;
  Check(api.Data(value, &data));
  return static_cast<T*>(data);
}

inline const ort::Value* InputOf(const ort::Api& api, const ort::KernelContext* context, size_t index) {
  const ort::Value* value = nullptr;
  Check(api.Input(context, index, &value));
  return value;
}

// Runs what may throw, and turns whatever it throws into a status: no exception may pass the C interface.
template <typename Work>
ort::Status* Guarded(const ort::Api& api, Work work) {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {  // no memory, most likely
    return api.CreateStatus(1, error.what());
  }
}

template <typename Kernel>
void Destroy(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

// An operator with what its functions say of it: ONNX Runtime gives them its address.
struct NamedOp : ort::CustomOp {
  const char* name;
  size_t outputs;
  ort::Type output;
};

// An operator on the CPU with inputs of these types, which are all required, and outputs of one type.
template <ort::Type... kInputs>
NamedOp Operator(const char* name, decltype(ort::CustomOp::CreateKernelV2) create,
                 decltype(ort::CustomOp::KernelComputeV2) compute, void (*destroy)(void*), size_t outputs = 1,
                 ort::Type output = ort::kFloat) {
  NamedOp op{{}, name, outputs, output};
  op.version = ort::kVersion;
  op.GetName = [](const ort::CustomOp* self) { return static_cast<const NamedOp*>(self)->name; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const ort::CustomOp*, size_t index) {
    constexpr ort::Type kTypes[] = {kInputs...};
    return kTypes[index];
  };
  op.GetInputTypeCount = [](const ort::CustomOp*) -> size_t { return sizeof...(kInputs); };
  op.GetOutputType = [](const ort::CustomOp* self, size_t) { return static_cast<const NamedOp*>(self)->output; };
  op.GetOutputTypeCount = [](const ort::CustomOp* self) { return static_cast<const NamedOp*>(self)->outputs; };
  op.KernelDestroy = destroy;
  op.GetInputCharacteristic = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.GetStartVersion = [](const ort::CustomOp*) { return 1; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 1 << 30; };
  return op;
}

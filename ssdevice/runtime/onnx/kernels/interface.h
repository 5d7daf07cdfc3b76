// The part of ONNX Runtime's C interface that the kernels use. ONNX Runtime publishes it as a table
// of functions that only ever grows at its end, so positions in it are the same in every later
// version. Its header is in no Python package.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 17;  // the first with ParallelFor

struct Status;
struct Value;
struct Shape;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;

struct ApiBase {
  const void* const* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}

  Status* CreateStatus(int code, const char* text) const { return Call(0, code, text); }
  Status* CreateDomain(const char* name, Domain** out) const { return Call(26, name, out); }
  Status* Add(Domain* domain, const struct CustomOp* op) const { return Call(27, domain, op); }
  Status* Add(SessionOptions* options, Domain* domain) const { return Call(28, options, domain); }
  Status* Data(const Value* value, void** out) const { return Call(51, value, out); }
  Status* ElementType(const Shape* shape, int* out) const { return Call(60, shape, out); }
  Status* Rank(const Shape* shape, size_t* out) const { return Call(61, shape, out); }
  Status* Sizes(const Shape* shape, int64_t* out, size_t rank) const {
    return Call(62, shape, out, rank);
  }
  Status* ShapeOf(const Value* value, Shape** out) const { return Call(65, value, out); }
  Status* Attribute(const KernelInfo* info, const char* name, float* out) const {
    return Call(85, info, name, out);
  }
  Status* Attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return Call(86, info, name, out);
  }
  Status* Attribute(const KernelInfo* info, const char* name, char* out, size_t* size) const {
    return Call(87, info, name, out, size);
  }
  Status* Input(const KernelContext* context, size_t index, const Value** out) const {
    return Call(90, context, index, out);
  }
  Status* Output(KernelContext* context, size_t index, const int64_t* sizes, size_t rank,
                 Value** out) const {
    return Call(91, context, index, sizes, rank, out);
  }
  void Release(Shape* shape) const { Call<void>(99, shape); }
  Status* Inputs(const KernelInfo* info, size_t* out) const { return Call(230, info, out); }
  Status* Outputs(const KernelInfo* info, size_t* out) const { return Call(231, info, out); }
  Status* ConstantInput(const KernelInfo* info, size_t index, int* constant,
                        const Value** out) const {
    return Call(249, info, index, constant, out);
  }
  // Runs work(data, i) for 0 <= i < total on the session's threads.
  Status* ParallelFor(const KernelContext* context, void (*work)(void*, size_t), size_t total,
                      void* data) const {
    return Call(274, context, work, total, size_t{0}, data);
  }

 private:
  // The table's function at a position, which takes exactly these types.
  template <typename Result = Status*, typename... Types>
  Result Call(size_t position, Types... arguments) const {
    return reinterpret_cast<Result (*)(Types...)>(const_cast<void*>(table_[position]))(
        arguments...);
  }
  const void* const* table_;
};

struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const void* const*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const void* const*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShape)(const CustomOp*, void*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
};

}  // namespace ort

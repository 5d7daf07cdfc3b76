// The part of ONNX Runtime's C interface that the kernels use. ONNX Runtime publishes it as a table of functions that
// only ever grows at its end, so positions in it are the same in every later version. Its header is in no Python package.
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

  Status* CreateStatus(int code, const char* text) const { return At<Status*(int, const char*)>(0)(code, text); }
  Status* CreateDomain(const char* name, Domain** out) const {
    return At<Status*(const char*, Domain**)>(26)(name, out);
  }
  Status* Add(Domain* domain, const struct CustomOp* op) const {
    return At<Status*(Domain*, const CustomOp*)>(27)(domain, op);
  }
  Status* Add(SessionOptions* options, Domain* domain) const {
    return At<Status*(SessionOptions*, Domain*)>(28)(options, domain);
  }
  Status* Data(const Value* value, void** out) const { return At<Status*(const Value*, void**)>(51)(value, out); }
  Status* ElementType(const Shape* shape, int* out) const { return At<Status*(const Shape*, int*)>(60)(shape, out); }
  Status* Rank(const Shape* shape, size_t* out) const { return At<Status*(const Shape*, size_t*)>(61)(shape, out); }
  Status* Sizes(const Shape* shape, int64_t* out, size_t rank) const {
    return At<Status*(const Shape*, int64_t*, size_t)>(62)(shape, out, rank);
  }
  Status* ShapeOf(const Value* value, Shape** out) const {
    return At<Status*(const Value*, Shape**)>(65)(value, out);
  }
  Status* Input(const KernelContext* context, size_t index, const Value** out) const {
    return At<Status*(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* Output(KernelContext* context, size_t index, const int64_t* sizes, size_t rank, Value** out) const {
    return At<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, sizes, rank, out);
  }
  Status* Attribute(const KernelInfo* info, const char* name, float* out) const {
    return At<Status*(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* Attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return At<Status*(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* Attribute(const KernelInfo* info, const char* name, char* out, size_t* size) const {
    return At<Status*(const KernelInfo*, const char*, char*, size_t*)>(87)(info, name, out, size);
  }
  void Release(Shape* shape) const { At<void(Shape*)>(99)(shape); }
  Status* Inputs(const KernelInfo* info, size_t* out) const { return At<Status*(const KernelInfo*, size_t*)>(230)(info, out); }
  Status* Outputs(const KernelInfo* info, size_t* out) const { return At<Status*(const KernelInfo*, size_t*)>(231)(info, out); }
  Status* ConstantInput(const KernelInfo* info, size_t index, int* constant, const Value** out) const {
    return At<Status*(const KernelInfo*, size_t, int*, const Value**)>(249)(info, index, constant, out);
  }
  // Runs work(data, i) for 0 <= i < total on the session's threads.
  Status* ParallelFor(const KernelContext* context, void (*work)(void*, size_t), size_t total, void* data) const {
    return At<Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(274)(
        context, work, total, 0, data);
  }

 private:
  template <typename Function>
  Function* At(size_t position) const {
    return reinterpret_cast<Function*>(const_cast<void*>(table_[position]));
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

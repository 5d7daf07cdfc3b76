// The library's entry, which ONNX Runtime calls for every session that the library is registered
// for, and the operators as it sees them: kernels are made and called through its C interface, and
// what they throw becomes a status.

#include <atomic>

#include "crew.h"
#include "interface.h"

Operator AddNorm();
Operator GatedSilu();
Operator HalfLinear();
Operator HalfTreeAttention();
Operator Int4Linear();
Operator Int8Argmax();
Operator Int8Embedding();
Operator Int8Linear();
Operator LowRank1();
Operator LowRank2();
Operator LowRank3();
Operator Region();
Operator RotarySplit();
Operator TiedEmbedding();
Operator TreeAttention();

const std::vector<Operator>& Operators() {
  static const std::vector<Operator> all{
      AddNorm(),    GatedSilu(),     HalfLinear(),  HalfTreeAttention(), Int4Linear(),
      Int8Argmax(), Int8Embedding(), Int8Linear(),  LowRank1(),          LowRank2(),
      LowRank3(),   Region(),        RotarySplit(), TiedEmbedding(),     TreeAttention()};
  return all;
}

// All else is hidden: two versions of the library in a process share nothing, and each can be
// unloaded.
#define SSDEVICE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<bool> apart{false};

struct Failure {
  ort::Status* status;
};

void Check(ort::Status* status) {
  if (status != nullptr) throw Failure{status};
}

// Runs what may throw, and turns whatever it throws into a status: no exception may pass the C
// interface.
template <typename Do>
ort::Status* Guarded(const ort::Api& api, const char* name, Do run) {
  try {
    run();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return api.CreateStatus(1, (std::string(name) + ": " + error.what()).c_str());
  }
}

Tensor TensorOf(const ort::Api& api, const ort::Value* value) {
  Require(value != nullptr, "the node has no such input or output");
  ort::Shape* shape = nullptr;
  Check(api.ShapeOf(value, &shape));
  size_t rank = 0;
  int64_t sizes[Shape::kMost];
  int type = 0;
  ort::Status* status = api.ElementType(shape, &type);
  if (status == nullptr) status = api.Rank(shape, &rank);
  if (status == nullptr && rank <= Shape::kMost) status = api.Sizes(shape, sizes, rank);
  api.Release(shape);
  Check(status);
  Require(rank <= Shape::kMost, "a tensor has too many dimensions");
  Tensor tensor;
  for (size_t i = 0; i < rank; ++i) tensor.shape.Append(sizes[i]);
  void* data = nullptr;
  Check(api.Data(value, &data));
  tensor.data = data;
  tensor.type = static_cast<Type>(type);
  // Weights lie where the graph says in their file.
  Require(reinterpret_cast<uintptr_t>(data) % BytesOf(tensor.type) == 0, "a tensor is not aligned");
  return tensor;
}

class NodeInfo : public Info {
 public:
  NodeInfo(const ort::Api& api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  float Float(const char* name) const override {
    float value = 0;
    Check(api_.Attribute(info_, name, &value));
    return value;
  }
  int64_t Int(const char* name) const override {
    int64_t value = 0;
    Check(api_.Attribute(info_, name, &value));
    return value;
  }
  std::string Text(const char* name) const override {
    size_t size = 0;
    Check(api_.Attribute(info_, name, nullptr, &size));
    std::string text(size, '\0');
    Check(api_.Attribute(info_, name, text.data(), &size));
    text.resize(size - 1);  // it counts the zero at the end
    return text;
  }
  Tensor Constant(size_t input) const override {
    int constant = 0;
    const ort::Value* value = nullptr;
    Check(api_.ConstantInput(info_, input, &constant, &value));
    return constant ? TensorOf(api_, value) : Tensor{};
  }
  size_t Inputs() const override {
    size_t count = 0;
    Check(api_.Inputs(info_, &count));
    return count;
  }
  size_t Outputs() const override {
    size_t count = 0;
    Check(api_.Outputs(info_, &count));
    return count;
  }

 private:
  const ort::Api& api_;
  const ort::KernelInfo* info_;
};

class NodeContext : public Context {
 public:
  // ``threads`` of the crew; 0: those of the session.
  NodeContext(const ort::Api& api, ort::KernelContext* context, int threads)
      : api_(api), context_(context), threads_(threads) {}

  Tensor Input(size_t index) override {
    const ort::Value* value = nullptr;
    Check(api_.Input(context_, index, &value));
    return TensorOf(api_, value);
  }
  void* Output(size_t index, const Shape& shape, Type type) override {
    ort::Value* value = nullptr;
    Check(api_.Output(context_, index, shape.Sizes(), shape.Rank(), &value));
    const Tensor out = TensorOf(api_, value);
    Require(out.type == type, "the graph says another type of an output than there is");
    return const_cast<void*>(out.data);
  }
  void For(size_t total, Work work, void* data) override {
    if (threads_ > 0) return CrewFor(static_cast<size_t>(threads_), total, work, data);
    Check(api_.ParallelFor(context_, work, total, data));
  }

 private:
  const ort::Api& api_;
  ort::KernelContext* context_;
  int threads_;
};

// An operator with what its functions say of it: ONNX Runtime gives them its address.
struct Op : ort::CustomOp {
  const Operator* own;
};

struct NodeKernel {
  ort::Api api;
  const char* name;
  std::unique_ptr<Kernel> own;
  int threads = CrewSize();
};

const Operator& OwnOf(const ort::CustomOp* op) { return *static_cast<const Op*>(op)->own; }

ort::Status* Create(const ort::CustomOp* op, const void* const* table, const ort::KernelInfo* info,
                    void** out) {
  const ort::Api api(table);
  const Operator& own = OwnOf(op);
  return Guarded(api, own.name,
                 [&] { *out = new NodeKernel{api, own.name, own.make(NodeInfo(api, info))}; });
}

ort::Status* Compute(void* self, ort::KernelContext* context) {
  const NodeKernel& kernel = *static_cast<const NodeKernel*>(self);
  return Guarded(kernel.api, kernel.name, [&] {
    NodeContext call(kernel.api, context, kernel.threads);
    kernel.own->Compute(call);
  });
}

// An operator on the CPU, as ONNX Runtime asks for it.
Op AsOp(const Operator& own) {
  constexpr int kRequired = 0;
  constexpr int kVariadic = 2;
  Op op{{}, &own};
  op.version = ort::kVersion;
  op.GetName = [](const ort::CustomOp* self) { return OwnOf(self).name; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const ort::CustomOp* self, size_t index) {
    return static_cast<int>(OwnOf(self).inputs[index]);
  };
  op.GetInputTypeCount = [](const ort::CustomOp* self) { return OwnOf(self).inputs.size(); };
  op.GetOutputType = [](const ort::CustomOp* self, size_t) {
    return static_cast<int>(OwnOf(self).output);
  };
  op.GetOutputTypeCount = [](const ort::CustomOp* self) { return OwnOf(self).outputs; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<NodeKernel*>(kernel); };
  op.GetInputCharacteristic = [](const ort::CustomOp* self, size_t) {
    return OwnOf(self).Variadic() ? kVariadic : kRequired;
  };
  op.GetOutputCharacteristic = op.GetInputCharacteristic;
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.CreateKernelV2 = Create;
  op.KernelComputeV2 = Compute;
  op.GetStartVersion = [](const ort::CustomOp*) { return 1; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 1 << 30; };
  return op;
}

// The operators for ONNX Runtime, without those that are several in one if ``apart``.
ort::Status* MakeDomain(const ort::Api& api, bool apart, ort::Domain** out) {
  static const std::vector<Op> ops = [] {
    std::vector<Op> made;
    for (const Operator& own : Operators()) made.push_back(AsOp(own));
    return made;
  }();
  if (ort::Status* status = api.CreateDomain("ssdevice", out)) return status;
  for (const Op& op : ops) {
    if (apart && op.own->Variadic()) continue;
    if (ort::Status* status = api.Add(*out, &op)) return status;
  }
  return nullptr;
}

}  // namespace

SSDEVICE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                               const ort::ApiBase* base) {
  const void* const* table = base->GetApi(ort::kVersion);
  if (table == nullptr) return nullptr;  // an older runtime, which takes the functions instead
  const ort::Api api(table);
  // They must outlive every session. No lock: a process that is forked meanwhile could not open it.
  static std::atomic<ort::Domain*> domains[2];
  const bool nodes = apart.load();
  ort::Domain* domain = domains[nodes].load();
  if (domain == nullptr) {
    ort::Domain* made = nullptr;
    if (ort::Status* status = MakeDomain(api, nodes, &made)) return status;
    // Of two threads at once the slower one's domain is not used.
    if (domains[nodes].compare_exchange_strong(domain, made)) domain = made;
  }
  return api.Add(options, domain);
}

// For hosts: sessions that are opened from now on run every operator of a region as a node of its
// own, as profiles show them.
SSDEVICE_EXPORT void ssdevice_apart(int yes) { apart.store(yes != 0); }

// The library's entry: ONNX Runtime calls it for every session that the library is registered for.

#include <mutex>

#include "operator.h"

const ort::CustomOp* AddNorm();
const ort::CustomOp* GatedSilu();
const ort::CustomOp* HalfTreeAttention();
const ort::CustomOp* Int4Linear();
const ort::CustomOp* Int8Argmax();
const ort::CustomOp* Int8Embedding();
const ort::CustomOp* Int8Linear();
const ort::CustomOp* NormInt4Linear();
const ort::CustomOp* NormInt8Linear();
const ort::CustomOp* RotarySplit();
const ort::CustomOp* SiluInt4Linear();
const ort::CustomOp* SiluInt8Linear();
const ort::CustomOp* TiedEmbedding();
const ort::CustomOp* TreeAttention();

SSDEVICE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  const void* const* table = base->GetApi(ort::kVersion);
  if (table == nullptr) return nullptr;  // an older runtime, which takes the functions instead
  const ort::Api api(table);
  static std::mutex lock;
  static ort::Domain* domain = nullptr;  // it must outlive every session
  const std::lock_guard<std::mutex> guard(lock);
  if (domain == nullptr) {
    ort::Domain* made = nullptr;
    if (ort::Status* status = api.CreateDomain("ssdevice", &made)) return status;
    for (const ort::CustomOp* op :
         {AddNorm(), GatedSilu(), HalfTreeAttention(), Int4Linear(), Int8Argmax(), Int8Embedding(),
          Int8Linear(), NormInt4Linear(), NormInt8Linear(), RotarySplit(), SiluInt4Linear(), SiluInt8Linear(),
          TiedEmbedding(), TreeAttention()}) {
      if (ort::Status* status = api.Add(made, op)) return status;
    }
    domain = made;
  }
  return api.Add(options, domain);
}

// What apps/cpp_host/host.cpp needs of ONNX Runtime's C API, to compile it where only the Python
// package is. An app uses the header of ONNX Runtime's release. The table of functions only ever
// grows at its end, so positions in it are final.
#pragma once

#include <cstddef>
#include <cstdint>

#define ORT_API_VERSION 17

#ifdef _WIN32
using ORTCHAR_T = wchar_t;
#else
using ORTCHAR_T = char;
#endif

struct OrtAllocator;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtModelMetadata;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
};
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_FATAL = 4 };
enum OrtMemType { OrtMemTypeDefault = 0 };

struct OrtApi {
  void* at_0[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char* name, OrtEnv**);
  void* at_4[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const ORTCHAR_T* file, const OrtSessionOptions*,
                              OrtSession**);
  void* at_8[1];
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const* inputs,
                    const OrtValue* const*, size_t, const char* const* outputs, size_t, OrtValue**);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  void* at_11[13];
  OrtStatus* (*SetIntraOpNumThreads)(OrtSessionOptions*, int);
  void* at_25[5];
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
  OrtStatus* (*SessionGetOutputCount)(const OrtSession*, size_t*);
  void* at_32[1];
  OrtStatus* (*SessionGetInputTypeInfo)(const OrtSession*, size_t index, OrtTypeInfo**);
  OrtStatus* (*SessionGetOutputTypeInfo)(const OrtSession*, size_t index, OrtTypeInfo**);
  void* at_35[1];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t index, OrtAllocator*, char**);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t index, OrtAllocator*, char**);
  void* at_38[11];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data, size_t bytes,
                                               const int64_t* shape, size_t rank,
                                               ONNXTensorElementDataType, OrtValue**);
  void* at_50[5];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  void* at_56[4];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t rank);
  void* at_63[6];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* at_70[6];
  OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
  void* at_77[1];
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* at_79[13];
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* at_97[1];
  void (*ReleaseTypeInfo)(OrtTypeInfo*);
  void* at_99[1];
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
  void* at_101[10];
  OrtStatus* (*SessionGetModelMetadata)(const OrtSession*, OrtModelMetadata**);
  void* at_112[4];
  OrtStatus* (*ModelMetadataLookupCustomMetadataMap)(const OrtModelMetadata*, OrtAllocator*,
                                                     const char* key, char** value);
  void* at_117[1];
  void (*ReleaseModelMetadata)(OrtModelMetadata*);
  void* at_119[11];
  OrtStatus* (*AddSessionConfigEntry)(OrtSessionOptions*, const char* name, const char* value);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

extern "C" const OrtApiBase* OrtGetApiBase();

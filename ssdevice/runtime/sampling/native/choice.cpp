// What Python's hosts call of the kernels' library.

#include "sampler.h"

#define SSDEVICE_SHOWN extern "C" __attribute__((visibility("default")))

namespace {
thread_local Sampler sampler;
}

SSDEVICE_SHOWN int32_t ssdevice_choose(const float* logits, int64_t vocab, double temperature,
                                       double top_p, double min_p, double typical_p, int64_t top_k,
                                       uint64_t seed, int64_t position) {
  return sampler(logits, vocab, {temperature, top_p, min_p, typical_p, top_k, seed}, position);
}

// `ids`: room for `count`, at most `vocab`.
SSDEVICE_SHOWN double ssdevice_log_total(const float* logits, int64_t vocab, int32_t* ids,
                                         int64_t count) {
  return sampler.log_total(logits, vocab, ids, count);
}

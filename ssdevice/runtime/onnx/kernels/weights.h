// Packed weights, which all sessions of a process hold once.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <sys/mman.h>

#include "eight.h"

constexpr int kColumns =
    2 * kLanes;  // of a group; two vectors side by side, so what is read of a row serves both

constexpr int64_t kMostInputs = 1 << 24;  // so that bytes of a group and numbers of blocks fit

constexpr size_t Whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Memory that the weights of many linears share. Linux maps it by pages of two megabytes, so that
// fewer addresses have to be looked up: with SmolLM2 products of one row read 36 instead of 31 GB/s
// on a virtual machine. It is mapped apart from the heap, in which it would keep the room of
// weights that are being packed from being used again.
class Chunk {
 public:
  explicit Chunk(size_t bytes) : size_(Whole(std::max(bytes, kLeast), kPage)) {
    void* mapped =
        mmap(nullptr, size_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(mapped);
    first_ = memory_ + (kPage - reinterpret_cast<uintptr_t>(memory_) % kPage) % kPage;
#ifdef MADV_HUGEPAGE
    madvise(first_, size_, MADV_HUGEPAGE);
#endif
  }
  ~Chunk() { munmap(memory_, size_ + kPage); }
  Chunk(const Chunk&) = delete;

  // So many bytes of the chunk, which lives as long as they; null if it has no more.
  static std::shared_ptr<uint8_t> Take(const std::shared_ptr<Chunk>& chunk, size_t bytes) {
    if (chunk == nullptr || chunk->used_ + bytes > chunk->size_) return nullptr;
    const std::shared_ptr<uint8_t> taken(chunk, chunk->first_ + chunk->used_);
    chunk->used_ += Whole(bytes, kLine);
    return taken;
  }

 private:
  static constexpr size_t kPage = 1 << 21;
  static constexpr size_t kLeast = 4 * kPage;

  size_t size_;
  size_t used_ = 0;
  uint8_t *memory_, *first_;
};

// Weights by groups of kColumns columns, in the order in which a kernel reads them.
struct Weights {
  std::string kind;
  int64_t outputs, inputs;
  size_t bytes;  // of a group, a multiple of kLine
  std::shared_ptr<uint8_t> data;

  Weights(const char* kind, int64_t outputs, int64_t inputs, size_t bytes)
      : kind(kind),
        outputs(outputs),
        inputs(inputs),
        bytes(bytes),
        data(static_cast<uint8_t*>(std::calloc(1, Checked())), std::free) {
    if (data == nullptr) throw std::bad_alloc();
  }

  int64_t Groups() const { return (outputs + kColumns - 1) / kColumns; }
  size_t Size() const { return bytes * static_cast<size_t>(Groups()); }
  const uint8_t* Group(int64_t group) const {
    return data.get() + bytes * static_cast<size_t>(group);
  }
  uint8_t* Group(int64_t group) { return data.get() + bytes * static_cast<size_t>(group); }

 private:
  size_t Checked() const {
    Require(inputs > 0 && inputs <= kMostInputs && outputs > 0,
            "its weights are empty or too wide");
    return static_cast<size_t>(Times(static_cast<int64_t>(bytes), Groups()));
  }
};

// The functions of a bundle are graphs that share their weights; so do their kernels.
inline std::shared_ptr<const Weights> Shared(Weights&& made) {
  static std::mutex lock;
  static std::multimap<uint64_t, std::weak_ptr<const Weights>> known;
  static std::weak_ptr<Chunk> last;
  const size_t size = made.Size();
  uint64_t key = static_cast<uint64_t>(made.outputs) * 1000003 + static_cast<uint64_t>(made.inputs);
  for (size_t at = 0; at + 8 <= size; at += 8 * 61) {
    uint64_t word;
    std::memcpy(&word, made.Group(0) + at, 8);
    key = (key ^ word) * 0x9E3779B97F4A7C15ull;
  }
  const std::lock_guard<std::mutex> guard(lock);
  auto [first, end] = known.equal_range(key);
  while (first != end) {
    const auto other = first->second.lock();
    if (other == nullptr) {
      first = known.erase(first);
      continue;
    }
    const bool same =
        other->kind == made.kind && other->outputs == made.outputs && other->inputs == made.inputs;
    if (same && std::memcmp(other->Group(0), made.Group(0), size) == 0) return other;
    ++first;
  }
  auto chunk = last.lock();
  auto place = Chunk::Take(chunk, size);
  if (place == nullptr) {
    last = chunk = std::make_shared<Chunk>(size);
    place = Chunk::Take(chunk, size);
  }
  std::memcpy(place.get(), made.Group(0), size);
  made.data = std::move(place);
  auto kept = std::make_shared<const Weights>(std::move(made));
  known.emplace(key, kept);
  return kept;
}

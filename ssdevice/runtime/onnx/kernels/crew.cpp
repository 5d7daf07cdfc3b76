// See crew.h. ssdevice_crew(n), which the host calls before it opens a session, says how many
// threads its kernels use.

#include "crew.h"

#include <dlfcn.h>
#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

constexpr auto kPatience =
    std::chrono::milliseconds(2);  // a thread that has found no work for so long goes to sleep
constexpr size_t kMost = 256;      // threads
constexpr int kLooks = 64;         // between two looks at the clock

std::atomic<int> crew_size{0};

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Linux wakes a thread on the processor of whoever wakes it, where the two take turns for some 10
// ms until it moves one.
int Processor() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

void Leave(int processor) {
#ifdef __linux__
  cpu_set_t allowed, others;
  if (processor < 0 || sched_getcpu() != processor ||
      sched_getaffinity(0, sizeof allowed, &allowed))
    return;
  others = allowed;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others))
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
  static_cast<void>(processor);
#endif
}

class Crew {
 public:
  // The crew of this process. It is never destroyed: its threads run until the process ends, and so
  // the library stays loaded.
  //
  // A process that was forked has the memory of its parent's crew without its threads. Whoever was
  // inside a call, or held a lock, stays there, and the next call would wait for him: so it has a
  // crew of its own, made when it calls. No static of this function holds the crew, since a fork
  // may come while another thread initializes it.
  static Crew& Get() {
    Crew* crew = of_process.load();
    if (crew != nullptr) return *crew;
    Dl_info here{};
    if (dladdr(reinterpret_cast<const void*>(&CrewSize), &here))
      dlopen(here.dli_fname, RTLD_NOW | RTLD_NODELETE);
    auto* made = new Crew;
    if (of_process.compare_exchange_strong(crew, made)) return *made;
    delete made;  // another thread was faster; this one has no threads yet
    return *crew;
  }

  static void ForgetAfterFork() { of_process.store(nullptr); }

  void Run(size_t threads, size_t total, Work work, void* data) {
    const std::unique_lock<std::mutex> only(calling_, std::try_to_lock);
    if (threads < 2 || total < 2 || !only) {  // at most one call has helpers
      for (size_t i = 0; i < total; ++i) work(data, i);
      return;
    }
    work_ = work;
    data_ = data;
    threads_ = std::min(threads, kMost);
    for (; hired_ < threads_; ++hired_) std::thread([this, me = hired_] { Serve(me); }).detach();
    for (size_t i = 0; i < threads_; ++i) {
      shares_[i].next.store(total * i / threads_);
      shares_[i].end = total * (i + 1) / threads_;
    }
    open_.store(true);
    calls_.fetch_add(1);
    if (asleep_.load() > 0) {
      caller_.store(Processor());
      const std::lock_guard<std::mutex> guard(bed_);
      wake_.notify_all();
    }
    Take(0);
    open_.store(false);
    while (inside_.load() != 0) Pause();
  }

 private:
  static std::atomic<Crew*> of_process;

  // What lies together is done by one thread, which reads its weights in order, until it helps with
  // what others have left.
  void Take(size_t me) {
    for (size_t other = 0; other < threads_; ++other) {
      Share& share = shares_[(me + other) % threads_];
      for (size_t i; (i = share.next.fetch_add(1)) < share.end;) work_(data_, i);
    }
  }

  void Serve(size_t me) {
    for (uint64_t seen = 0;;) {
      Wait(seen);
      seen = calls_.load();
      // The caller closes a call before it looks who is inside. Whoever finds it open here is
      // waited for.
      inside_.fetch_add(1);
      if (open_.load() && me < threads_) Take(me);
      inside_.fetch_sub(1);
    }
  }

  // Returns when a call has begun since the last one seen.
  void Wait(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (int looks = 0; calls_.load() == seen; ++looks) {
      Pause();
      if (looks % kLooks || std::chrono::steady_clock::now() < end) continue;
      std::unique_lock<std::mutex> lock(bed_);
      ++asleep_;
      wake_.wait(lock, [&] { return calls_.load() != seen; });
      --asleep_;
      lock.unlock();
      return Leave(caller_.load());
    }
  }

  std::mutex calling_, bed_;
  std::condition_variable wake_;
  size_t hired_ = 1;  // the caller is the first
  size_t threads_ = 1;
  Work work_ = nullptr;
  void* data_ = nullptr;
  std::atomic<int> asleep_{0};
  std::atomic<int> caller_{-1};
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<uint64_t> calls_{0};
  alignas(64) std::atomic<int> inside_{0};
  struct alignas(64) Share {
    std::atomic<size_t> next{0};
    size_t end = 0;
  } shares_[kMost];
};

std::atomic<Crew*> Crew::of_process{nullptr};

// For as long as the library is loaded.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, Crew::ForgetAfterFork);

}  // namespace

// For hosts, which call it before they open a session.
extern "C" __attribute__((visibility("default"))) void ssdevice_crew(int threads) {
  crew_size.store(threads);
}

int CrewSize() { return crew_size.load(); }
void CrewFor(size_t threads, size_t total, Work work, void* data) {
  Crew::Get().Run(threads, total, work, data);
}

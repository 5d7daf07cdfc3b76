// forks COUNT: forks so often while a thread makes calls of the kernels' crew; every child makes
// calls, too. Prints how many children hung, and how many computed something else.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "crew.h"

// More than processors: some are late for each call.
constexpr size_t kThreads = 6;
constexpr unsigned kHangSeconds = 20;
// Longer than the crew's threads are patient: they go to sleep.
constexpr useconds_t kPause = 2500;

void Add(void* data, size_t i) { static_cast<std::atomic<size_t>*>(data)->fetch_add(i + 1); }

bool Call() {
  std::atomic<size_t> sum{0};
  CrewFor(kThreads, 8, Add, &sum);
  return sum.load() == 36;
}

int main(int, char** arguments) {
  std::atomic<bool> running{true};
  std::thread caller([&] {
    for (unsigned calls = 1; running.load(); ++calls) {
      Call();
      if (calls % 64 == 0) usleep(kPause);
    }
  });
  int hung = 0;
  int wrong = 0;
  for (int i = 0; i < std::atoi(arguments[1]) && hung == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kHangSeconds);
      bool right = true;
      for (int call = 0; call < 5; ++call) right = Call() && right;
      _exit(right ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) ++hung;
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) ++wrong;
  }
  running.store(false);
  caller.join();
  std::printf("%d hung, %d wrong\n", hung, wrong);
  return 0;
}

// A team of threads that walks through a job's phases together and tolerates members that are late.
//
//   job:    phase 0 | phase 1 | phase 2 ...      each phase: `chunks` pieces of independent work
//   thread: takes chunks of its own share from the front, then steals from the back of others' shares
//
// A phase ends when its last chunk ends, not when every thread has arrived: a descheduled thread that holds no chunk
// delays nobody. Whoever ends the last chunk opens the next phase. Threads without work spin for `spin_us`, then sleep
// on a futex, so that an idle team costs no CPU and two processes can share the cores.
//
// `serial` counts phases over the team's life. A share is one word {serial, begin, end}; taking a chunk is a CAS on it,
// so a thread that slept through phases (its serial is old) takes nothing and can touch no state of a later job.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <atomic>
#include <vector>

namespace baton {

constexpr int MAX_THREADS = 64;
constexpr int MAX_CHUNKS = 65535;

class Job {
 public:
  virtual ~Job() = default;
  virtual void run_chunk(int phase, int chunk, int thread) = 0;
};

class Team {
 public:
  Team(int num_threads, int spin_us) : n_(num_threads), spin_ticks_(ticks_per_us() * spin_us) {}

  enum class Started { OK, NO_THREAD, NO_CPU };

  // Starts the n - 1 helpers, helper i pinned to cpus[i] where `cpus` is given. Signals are left to other threads.
  Started start(const int32_t* cpus) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const Started result = start_helpers(cpus);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return result;
  }
  ~Team() {
    stop_.store(true);
    serial_.fetch_add(1);
    wake();
    for (pthread_t id : threads_) pthread_join(id, nullptr);
  }

  int size() const { return n_; }

  // Runs all phases; chunks[i] in [1, MAX_CHUNKS] is the number of chunks of phase i. One caller at a time.
  void run(Job* job, const std::vector<int>& chunks) {
    job_ = job;
    chunks_ = &chunks;
    first_ = serial_.load(std::memory_order_relaxed) + 1;
    const uint32_t end = first_ + (uint32_t)chunks.size();
    open(first_);
    for (uint32_t s; (s = serial_.load(std::memory_order_acquire)) != end;) {
      work(s, 0);
      wait_change(s);
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> word{0};
  };
  struct Arg {
    Team* team;
    int thread;
  };

  Started start_helpers(const int32_t* cpus) {
    threads_.reserve(n_);
    for (int t = 1; t < n_; ++t) {
      args_[t] = {this, t};
      pthread_t id;
      if (pthread_create(&id, nullptr, &Team::main, &args_[t]) != 0) return Started::NO_THREAD;
      threads_.push_back(id);
      pthread_setname_np(id, "baton-kernels");
      if (!cpus) continue;
      cpu_set_t set;
      CPU_ZERO(&set);
      if (cpus[t - 1] < 0 || cpus[t - 1] >= CPU_SETSIZE) return Started::NO_CPU;
      CPU_SET(cpus[t - 1], &set);
      if (pthread_setaffinity_np(id, sizeof set, &set) != 0) return Started::NO_CPU;
    }
    return Started::OK;
  }

  static uint64_t ticks_per_us() { return 3000; }  // only bounds a spin: precision does not matter

  static void* main(void* p) {
    Arg* a = (Arg*)p;
    a->team->loop(a->thread);
    return nullptr;
  }

  void loop(int t) {
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint32_t s = serial_.load(std::memory_order_acquire);
      work(s, t);
      wait_change(s);
    }
  }

  // Publishes phase s: its pending count, the shares, then the serial itself.
  void open(uint32_t s) {
    const uint32_t i = s - first_;
    const int total = i < chunks_->size() ? (*chunks_)[i] : 0;
    pending_.store(total, std::memory_order_relaxed);
    for (int t = 0; t < n_; ++t) {
      const uint64_t b = (uint64_t)total * t / n_, e = (uint64_t)total * (t + 1) / n_;
      shares_[t].word.store((uint64_t)s << 32 | b << 16 | e, std::memory_order_release);
    }
    serial_.store(s, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
  }

  // One chunk of phase s from share t (front: its owner's end); -1 where it is empty or of another phase.
  int take(int t, uint32_t s, bool front) {
    uint64_t w = shares_[t].word.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t b = w >> 16 & 0xffff, e = w & 0xffff;
      if ((uint32_t)(w >> 32) != s || b >= e) return -1;
      const uint64_t next = front ? w + 0x10000 : w - 1;
      if (shares_[t].word.compare_exchange_weak(w, next, std::memory_order_acq_rel)) return front ? b : e - 1;
    }
  }

  void work(uint32_t s, int t) {
    for (int k = 0; k < n_; ++k) {
      const int victim = t + k < n_ ? t + k : t + k - n_;
      for (int c; (c = take(victim, s, k == 0)) >= 0;) {
        job_->run_chunk((int)(s - first_), c, t);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) open(s + 1);
      }
    }
  }

  void wait_change(uint32_t s) {
    const uint64_t start = __rdtsc();
    do {
      for (int i = 0; i < 8; ++i) {
        if (serial_.load(std::memory_order_acquire) != s) return;
        _mm_pause();
      }
    } while (__rdtsc() - start < spin_ticks_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (serial_.load(std::memory_order_seq_cst) == s)
      syscall(SYS_futex, (uint32_t*)&serial_, FUTEX_WAIT_PRIVATE, s, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void wake() { syscall(SYS_futex, (uint32_t*)&serial_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

  const int n_;
  const uint64_t spin_ticks_;
  Job* job_ = nullptr;
  const std::vector<int>* chunks_ = nullptr;
  uint32_t first_ = 0;
  std::vector<pthread_t> threads_;
  Arg args_[MAX_THREADS] = {};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> serial_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> pending_{0};
  Share shares_[MAX_THREADS];
};

}  // namespace baton

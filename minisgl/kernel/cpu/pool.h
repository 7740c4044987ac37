// Threads that help with a loop, on a machine that others use as well.
//
// OpenMP ends a loop when every thread of the team has arrived, so a thread that the system has not scheduled yet holds up
// all the others for milliseconds, hundreds of times a step. Here a loop ends when every chunk is done, whoever did it:
// a helper that sleeps, or has lost its core to another process, is simply not missed. And there is no second OpenMP
// runtime beside the one in torch's wheel.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include <sched.h>

class Pool {
  public:
    // Calls f(chunk) for 0 .. chunks - 1, on the calling thread and at most threads - 1 others. Chunks must not depend on
    // each other. One loop at a time has helpers; whoever calls meanwhile, from another thread, works alone.
    template <typename F>
    void run(int64_t chunks, int64_t threads, const F& f) {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (chunks <= 1 || threads <= 1 || !turn.try_lock()) {
            for (int64_t i = 0; i < chunks; i++) f(i);
            return;
        }
        hire(threads - 1);
        call_ = [](const void* context, int64_t chunk) { (*static_cast<const F*>(context))(chunk); };
        context_ = &f;
        chunks_ = chunks;
        unfinished_.store(chunks);
        tickets_.store(threads << 32 | chunks);
        if (asleep_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            asleep_.store(false);
            wake_.notify_all();
        }
        while (claim(0)) {
        }
        if (spin([&] { return unfinished_.load() == 0; }, PATIENCE)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait(lock, [&] { return unfinished_.load() == 0; });
    }

  private:
    typedef std::chrono::steady_clock Clock;
    // A helper stays awake from one loop of a step to the next. The caller waits for a helper's last chunk; if that takes
    // longer than a chunk does, the helper has lost its core, and may have the caller's.
    static constexpr auto WAKEFUL = std::chrono::microseconds(100), PATIENCE = std::chrono::microseconds(50);
    static constexpr int64_t COUNT = 0xffffffff;

    // How many threads may take part << 32 | chunks that nobody has claimed. While any are left, the loop below is valid.
    std::atomic<int64_t> tickets_{0};
    std::atomic<int64_t> unfinished_{0};
    void (*call_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    int64_t chunks_ = 0;

    std::mutex turn_;  // held by the caller of the loop
    int64_t workers_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::atomic<bool> asleep_{false};  // some worker is, or is about to be

    void hire(int64_t workers) {
        try {
            for (; workers_ < workers; workers_++) std::thread(&Pool::serve, this, workers_ + 1).detach();
        } catch (const std::system_error&) {
            // No more threads to be had from the system: those that there are will do.
        }
    }

    // Does one chunk, if there is one for this thread.
    bool claim(int64_t worker) {
        int64_t tickets = tickets_.load();
        do {
            if (!(tickets & COUNT) || worker >= tickets >> 32) return false;
        } while (!tickets_.compare_exchange_weak(tickets, tickets - 1));
        call_(context_, chunks_ - (tickets & COUNT));
        if (unfinished_.fetch_sub(1) == 1 && worker) {
            std::lock_guard<std::mutex> lock(mutex_);
            finished_.notify_one();
        }
        return true;
    }

    // Waits for ready() and says whether it came in time. Others who want the core get it.
    template <typename F>
    static bool spin(const F& ready, Clock::duration limit) {
        for (auto end = Clock::now() + limit; Clock::now() < end; sched_yield())
            for (int i = 0; i < 32; i++) {
                if (ready()) return true;
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            }
        return false;
    }

    void serve(int64_t worker) {
        for (;;) {
            auto ready = [&] {
                int64_t tickets = tickets_.load();
                return (tickets & COUNT) && worker < tickets >> 32;
            };
            if (spin(ready, WAKEFUL)) {
                while (claim(worker)) {
                }
                continue;
            }
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_.store(true);
            if (!ready()) wake_.wait(lock);
        }
    }
};

// Never destroyed: its threads run until the process ends.
static Pool& pool() {
    static Pool* instance = new Pool;
    return *instance;
}

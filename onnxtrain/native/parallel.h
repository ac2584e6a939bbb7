// Parallel loops on the threads of PyTorch's own OpenMP pool, without a second pool, <omp.h> or a compiler flag.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sched.h>
#include <type_traits>
#include <utility>

// Instead of <cmath>, which takes as long to compile as all headers above together: 0.06 s of 0.3.
static inline float square_root(float x) { return __builtin_sqrtf(x); }
static inline double square_root(double x) { return __builtin_sqrt(x); }
static inline float logarithm(float x) { return __builtin_logf(x); }
static inline double logarithm(double x) { return __builtin_log(x); }

extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

// f(begin, end) for `count` items in equal parts, one per thread, as at::parallel_for does.
template <class F> static void parallel_for(int64_t threads, int64_t count, const F &f) {
    threads = std::min(threads, count);
    if (threads <= 1) {
        if (count > 0) f(int64_t(0), count);
        return;
    }
    struct Work { const F *f; int64_t count; } work{&f, count};
    GOMP_parallel([](void *p) {
        const Work &w = *static_cast<Work *>(p);
        const int64_t team = omp_get_num_threads(), part = (w.count + team - 1) / team;
        const int64_t begin = omp_get_thread_num() * part, end = std::min(begin + part, w.count);
        if (begin < end) (*w.f)(begin, end);
    }, &work, unsigned(threads), 0);
}

// f(thread, team size) on all threads of a team at the same time; the team has at most `threads` threads.
template <class F> static void parallel_team(int64_t threads, const F &f) {
    if (threads <= 1) return f(int64_t(0), int64_t(1));
    GOMP_parallel([](void *p) { (*static_cast<const F *>(p))(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads())); },
                  const_cast<F *>(&f), unsigned(threads), 0);
}

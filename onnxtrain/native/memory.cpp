// An allocator in front of PyTorch's own on a CPU, while programs use it: what a program's tensors leave behind serves the
// next step's. Elsewhere, and for small tensors, the allocator that was there before does all, and is there again after the
// last program. A tensor that leaves its program holds its block as long as it lives, on any thread.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <unordered_map>

namespace {

constexpr size_t LEAST = 16 << 10, PAGE = 4 << 10, LARGE_PAGE = 2 << 20;  // bytes
constexpr size_t SLACK = 16 << 20;       // bytes that are held beside a quarter more than was ever in use at once
constexpr uint64_t IDLE_RUNS = 64;       // of programs, after which an unused block goes back to the system
thread_local int depth = 0;              // of programs that run on this thread

struct Block {
    char *data;
    size_t size;     // bytes from data on
    size_t asked;    // of these, that the tensor asked for
    char *base;      // what the system gave
    uint64_t since;  // the run in which it was left
};

size_t upwards(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Blocks begin at different places of a page: where many tensors began at the same, loops over several of them would meet
// in few lines of the cache.
Block fresh(size_t size) {
    static size_t turn = 0;
    const size_t begin = size < 16 * PAGE ? 0 : turn++ % 32 * 128, whole = upwards(size + 31 * 128, PAGE);
    char *base;
    if (whole < LARGE_PAGE) {
        base = static_cast<char *>(std::aligned_alloc(64, whole));
    } else {  // in large pages, of which a few do: 512 small ones cost 0.9 ms as they are first written to
        char *const got = static_cast<char *>(
            mmap(nullptr, whole + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (got == MAP_FAILED) return {};
        base = reinterpret_cast<char *>(upwards(reinterpret_cast<size_t>(got), LARGE_PAGE));
        if (base > got) munmap(got, size_t(base - got));
        munmap(base + whole, size_t(got + LARGE_PAGE - base));
        madvise(base, whole, MADV_HUGEPAGE);
    }
    return base ? Block{base + begin, whole - begin, 0, base, 0} : Block{};
}

void to_system(const Block &block) {
    const size_t whole = size_t(block.data - block.base) + block.size;
    if (whole < LARGE_PAGE) std::free(block.base);
    else munmap(block.base, whole);
}

class Memory final : public c10::Allocator {
  public:
    void join() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (users_++ > 0 || installed_) return;
        before_ = c10::GetCPUAllocator();
        c10::SetCPUAllocator(this);
        installed_ = true;
    }
    void part() {
        const std::lock_guard<std::mutex> guard(lock_);
        users_--;
        trim_locked();
        uninstall_if_unused();
    }

    c10::DataPtr allocate(size_t n) override {
        if (depth == 0 || n < LEAST) return before_->allocate(n);
        const Block block = take(n);
        if (!block.data) return before_->allocate(n);  // which says how much is missing
        c10::profiledCPUMemoryReporter().New(block.data, n);
        return {block.data, block.data, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *dest, const void *src, std::size_t count) const override { default_copy_data(dest, src, count); }

    void new_run() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (++run_ % (IDLE_RUNS / 4) == 0) give_back([this](const Block &b) { return b.since + IDLE_RUNS < run_; });
    }
    void trim() {
        const std::lock_guard<std::mutex> guard(lock_);
        trim_locked();
    }
    void held(int64_t *used, int64_t *unused) {
        const std::lock_guard<std::mutex> guard(lock_);
        *used = int64_t(used_), *unused = int64_t(unused_);
    }
    std::mutex &lock() { return lock_; }

  private:
    static void release(void *data);

    void trim_locked() {
        trimmed_ = run_;
        give_back([](const Block &) { return true; });
    }

    // Not before the last block is left: oneDNN asks for raw memory, and gives it to the allocator of the moment. Nor where
    // somebody has put another allocator in front of this one.
    void uninstall_if_unused() {
        if (users_ > 0 || !installed_ || !live_.empty() || c10::GetCPUAllocator() != this) return;
        c10::SetCPUAllocator(before_);
        installed_ = false;
    }

    Block take(size_t n) {
        const std::lock_guard<std::mutex> guard(lock_);
        const size_t size = upwards(n, 64);
        asked_ += n;
        most_ = std::max(most_, asked_);
        const size_t bound = most_ + most_ / 4 + SLACK;
        auto fitting = free_.lower_bound(size);
        const bool fits = fitting != free_.end(), well = fits && fitting->first <= size + size / 4 + 2 * PAGE;
        Block block{};
        if (well || (fits && used_ + unused_ + size > bound)) {
            block = fitting->second;
            unused_ -= block.size;
            free_.erase(fitting);
        } else {
            while (unused_ > 0 && used_ + unused_ + size > bound) drop_oldest();
            block = fresh(size);
            if (!block.data) {
                asked_ -= n;
                give_back([](const Block &) { return true; });
                return {};
            }
        }
        block.asked = n;
        used_ += block.size;
        live_[block.data] = block;
        return block;
    }

    // Whether the data was this memory's.
    bool leave(void *data) {
        const std::lock_guard<std::mutex> guard(lock_);
        const auto found = live_.find(data);
        if (found == live_.end()) return false;
        Block block = found->second;
        live_.erase(found);
        used_ -= block.size, asked_ -= block.asked, unused_ += block.size;
        if (run_ == trimmed_) {
            unused_ -= block.size;
            to_system(block);
        } else {
            block.since = run_;
            free_.emplace(block.size, block);
        }
        uninstall_if_unused();
        return true;
    }

    void drop_oldest() {
        auto oldest = free_.begin();
        for (auto it = free_.begin(); it != free_.end(); ++it)
            if (it->second.since < oldest->second.since) oldest = it;
        drop(oldest);
    }
    std::multimap<size_t, Block>::iterator drop(std::multimap<size_t, Block>::iterator it) {
        unused_ -= it->second.size;
        to_system(it->second);
        return free_.erase(it);
    }
    template <class F> void give_back(const F &wanted) {
        for (auto it = free_.begin(); it != free_.end();) it = wanted(it->second) ? drop(it) : std::next(it);
    }

    c10::Allocator *before_ = nullptr;
    std::mutex lock_;
    int64_t users_ = 0;  // programs
    bool installed_ = false;
    std::unordered_map<void *, Block> live_;
    std::multimap<size_t, Block> free_;  // by size
    size_t used_ = 0, unused_ = 0;       // bytes of live and of free blocks
    size_t asked_ = 0, most_ = 0;        // bytes that tensors asked for, now and at most
    uint64_t run_ = 0, trimmed_ = 0;     // the last run, and the last before all was given back
};

// Never destroyed: tensors may live until the process has ended. A child of this process finds the lock open.
Memory &memory() {
    static Memory *const only = [] {
        pthread_atfork([] { memory().lock().lock(); }, [] { memory().lock().unlock(); }, [] { memory().lock().unlock(); });
        return new Memory;
    }();
    return *only;
}

void Memory::release(void *data) {
    if (memory().leave(data)) c10::profiledCPUMemoryReporter().Delete(data);
    else memory().before_->raw_deleter()(data);
}

}  // namespace

extern "C" {

// The first program's `join` puts the allocator in place; the last one's `part` takes it away and gives memory back.
void join() { memory().join(); }
void part() { memory().part(); }

// A program begins and ends on this thread.
void enter() {
    if (depth++ == 0) memory().new_run();
}
void leave() { depth--; }

// Gives all unused blocks back to the system, and those that are left before the next run.
void trim() { memory().trim(); }

// Bytes of blocks in use, and at hand.
void held(int64_t *used, int64_t *unused) { memory().held(used, unused); }

}

// A caching CPU allocator in front of PyTorch's own, installed while programs use it: the blocks that a program's tensors
// free are reused in the next step. Outside of programs, and for small tensors, it forwards to the previous allocator, which
// is reinstalled after the last program. A tensor that outlives its program keeps its block, on any thread.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <unordered_map>

namespace {

constexpr size_t MIN_BYTES = 16 << 10, PAGE = 4 << 10, HUGE_PAGE = 2 << 20;  // bytes
constexpr size_t SLACK = 16 << 20;       // bytes of blocks allowed beyond 5/4 of the peak in use
constexpr uint64_t IDLE_RUNS = 64;       // program runs after which an unused block is returned to the system
thread_local int depth = 0;              // nested programs that run on this thread

struct Block {
    char *data;
    size_t size;       // bytes from data on
    size_t requested;  // bytes that the tensor requested
    char *base;        // the address that the system returned
    uint64_t since;    // the run in which it was freed
};

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Allocates a block. Blocks begin at different offsets in a page: at equal offsets, loops over several tensors would use few
// sets of the cache.
Block allocate_block(size_t size) {
    static size_t count = 0;
    const size_t begin = size < 16 * PAGE ? 0 : count++ % 32 * 128, total = round_up(size + 31 * 128, PAGE);
    char *base;
    if (total < HUGE_PAGE) {
        base = static_cast<char *>(std::aligned_alloc(64, total));
    } else {  // huge pages: the first writes to 512 small pages take 0.9 ms
        char *const mapped = static_cast<char *>(
            mmap(nullptr, total + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (mapped == MAP_FAILED) return {};
        base = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(mapped), HUGE_PAGE));
        if (base > mapped) munmap(mapped, size_t(base - mapped));
        munmap(base + total, size_t(mapped + HUGE_PAGE - base));
        madvise(base, total, MADV_HUGEPAGE);
    }
    return base ? Block{base + begin, total - begin, 0, base, 0} : Block{};
}

void free_block(const Block &block) {
    const size_t total = size_t(block.data - block.base) + block.size;
    if (total < HUGE_PAGE) std::free(block.base);
    else munmap(block.base, total);
}

class ReusingAllocator final : public c10::Allocator {
  public:
    void add_program() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (programs_++ > 0 || installed_) return;
        before_ = c10::GetCPUAllocator();
        c10::SetCPUAllocator(this);
        installed_ = true;
    }
    void remove_program() {
        const std::lock_guard<std::mutex> guard(lock_);
        programs_--;
        trim_locked();
        uninstall_if_unused();
    }

    c10::DataPtr allocate(size_t n) override {
        if (depth == 0 || n < MIN_BYTES) return before_->allocate(n);
        const Block block = allocate_from_cache(n);
        if (!block.data) return before_->allocate(n);  // which reports the out-of-memory error
        c10::profiledCPUMemoryReporter().New(block.data, n);
        return {block.data, block.data, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *dest, const void *src, std::size_t count) const override { default_copy_data(dest, src, count); }

    void new_run() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (++run_ % (IDLE_RUNS / 4) == 0) free_unused([this](const Block &b) { return b.since + IDLE_RUNS < run_; });
    }
    void trim() {
        const std::lock_guard<std::mutex> guard(lock_);
        trim_locked();
    }
    void count_bytes(int64_t *used, int64_t *unused) {
        const std::lock_guard<std::mutex> guard(lock_);
        *used = int64_t(used_), *unused = int64_t(unused_);
    }
    std::mutex &lock() { return lock_; }

  private:
    static void release(void *data);

    void trim_locked() {
        trimmed_ = run_;
        free_unused([](const Block &) { return true; });
    }

    // Not before the last block is freed: oneDNN allocates raw memory, and frees it with the allocator that is current then.
    // Nor if another allocator has been installed in front of this one.
    void uninstall_if_unused() {
        if (programs_ > 0 || !installed_ || !live_.empty() || c10::GetCPUAllocator() != this) return;
        c10::SetCPUAllocator(before_);
        installed_ = false;
    }

    Block allocate_from_cache(size_t n) {
        const std::lock_guard<std::mutex> guard(lock_);
        const size_t size = round_up(n, 64);
        requested_ += n;
        peak_ = std::max(peak_, requested_);
        const size_t bound = peak_ + peak_ / 4 + SLACK;
        auto fitting = free_.lower_bound(size);
        const bool fits = fitting != free_.end(), fits_well = fits && fitting->first <= size + size / 4 + 2 * PAGE;
        Block block{};
        if (fits_well || (fits && used_ + unused_ + size > bound)) {
            block = fitting->second;
            unused_ -= block.size;
            free_.erase(fitting);
        } else {
            while (unused_ > 0 && used_ + unused_ + size > bound) free_oldest();
            block = allocate_block(size);
            if (!block.data) {
                requested_ -= n;
                free_unused([](const Block &) { return true; });
                return {};
            }
        }
        block.requested = n;
        used_ += block.size;
        live_[block.data] = block;
        return block;
    }

    // Frees the block of `data`; returns false if it is not from this allocator.
    bool free_data(void *data) {
        const std::lock_guard<std::mutex> guard(lock_);
        const auto entry = live_.find(data);
        if (entry == live_.end()) return false;
        Block block = entry->second;
        live_.erase(entry);
        used_ -= block.size, requested_ -= block.requested, unused_ += block.size;
        if (run_ == trimmed_) {
            unused_ -= block.size;
            free_block(block);
        } else {
            block.since = run_;
            free_.emplace(block.size, block);
        }
        uninstall_if_unused();
        return true;
    }

    void free_oldest() {
        auto oldest = free_.begin();
        for (auto it = free_.begin(); it != free_.end(); ++it)
            if (it->second.since < oldest->second.since) oldest = it;
        free_unused_block(oldest);
    }
    std::multimap<size_t, Block>::iterator free_unused_block(std::multimap<size_t, Block>::iterator it) {
        unused_ -= it->second.size;
        free_block(it->second);
        return free_.erase(it);
    }
    template <class F> void free_unused(const F &condition) {
        for (auto it = free_.begin(); it != free_.end();) it = condition(it->second) ? free_unused_block(it) : std::next(it);
    }

    c10::Allocator *before_ = nullptr;
    std::mutex lock_;
    int64_t programs_ = 0;  // that use it
    bool installed_ = false;
    std::unordered_map<void *, Block> live_;
    std::multimap<size_t, Block> free_;  // by size
    size_t used_ = 0, unused_ = 0;       // bytes of live and of free blocks
    size_t requested_ = 0, peak_ = 0;    // bytes requested by live tensors, now and at the peak
    uint64_t run_ = 0, trimmed_ = 0;     // the current run, and the run of the last trim
};

// Never destroyed: tensors may live until the process ends. The fork handlers leave the lock open in a child process.
ReusingAllocator &allocator() {
    static ReusingAllocator *const only = [] {
        pthread_atfork([] { allocator().lock().lock(); }, [] { allocator().lock().unlock(); }, [] { allocator().lock().unlock(); });
        return new ReusingAllocator;
    }();
    return *only;
}

void ReusingAllocator::release(void *data) {
    if (allocator().free_data(data)) c10::profiledCPUMemoryReporter().Delete(data);
    else allocator().before_->raw_deleter()(data);
}

}  // namespace

extern "C" {

// The first program installs the allocator; removing the last one uninstalls it and frees its unused blocks.
void add_program() { allocator().add_program(); }
void remove_program() { allocator().remove_program(); }

// A program begins and ends a run on this thread.
void begin_run() {
    if (depth++ == 0) allocator().new_run();
}
void end_run() { depth--; }

// Returns all unused blocks to the system, and the blocks that are freed before the next run.
void trim() { allocator().trim(); }

// The bytes of blocks in use, and of unused blocks.
void count_bytes(int64_t *used, int64_t *unused) { allocator().count_bytes(used, unused); }

}

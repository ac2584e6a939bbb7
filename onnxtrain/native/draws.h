// The random bits of rng="fast": word c of the stream of a key, as SplitMix64 mixes a counter (Steele et al. 2014,
// https://doi.org/10.1145/2660193.2660195), with the second half of the key between its two rounds. A word holds the
// draws of four elements, 16 bits each. ops/random/keyed_bits.py computes the same words with PyTorch's operators.

typedef uint64_t words_t __attribute__((vector_size(64)));

constexpr words_t EIGHT = {0, 1, 2, 3, 4, 5, 6, 7};

constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15ull;  // between what two counters are mixed from

static inline words_t unmixed(words_t counters, const int64_t *key) { return counters * GAMMA + uint64_t(key[0]); }
static inline words_t mixed(words_t z, const int64_t *key) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull ^ uint64_t(key[1]);
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The draws of `count` elements from word `first` on, into `bits`, which has room for 64 more.
static inline void draw(int16_t *bits, int64_t count, uint64_t first, const int64_t *key) {
    for (int64_t i = 0; i < count; i += 32) {
        const words_t z = mixed(unmixed(EIGHT + (first + i / 4), key), key);
        std::memcpy(bits + i, &z, sizeof z);
    }
}

// What elements are multiplied by: `scale` where their draw is not below `least`, else 0.
template <class T> static inline Vec<T> factor(const int16_t *draws, int16_t least, T scale) {
    typename Lanes<T>::bits narrow;
    std::memcpy(&narrow, draws, sizeof narrow);
    return __builtin_convertvector(narrow, typename Lanes<T>::ivec) >= least ? Vec<T>{} + scale : Vec<T>{};
}

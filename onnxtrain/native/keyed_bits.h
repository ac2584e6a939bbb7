// The random bits of rng="fast": word c of the stream of a key is a counter mixed as in SplitMix64 (Steele et al. 2014,
// https://doi.org/10.1145/2660193.2660195), with the second half of the key added between its two rounds. A word holds the
// random bits of four elements, 16 each. ops/random/keyed_bits.py computes the same words with PyTorch's operators.

typedef uint64_t words_t __attribute__((vector_size(64)));

constexpr words_t EIGHT = {0, 1, 2, 3, 4, 5, 6, 7};

constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15ull;  // the difference of the states of consecutive counters

static inline words_t state_of(words_t counters, const int64_t *key) { return counters * GAMMA + uint64_t(key[0]); }
static inline words_t mix(words_t z, const int64_t *key) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull ^ uint64_t(key[1]);
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Writes the random bits of `count` elements, from word `first` on, to `bits`, which has room for 64 elements more.
static inline void write_random_bits(int16_t *bits, int64_t count, uint64_t first, const int64_t *key) {
    for (int64_t i = 0; i < count; i += 32) {
        const words_t z = mix(state_of(EIGHT + (first + i / 4), key), key);
        std::memcpy(bits + i, &z, sizeof z);
    }
}

// The factor of each element: `scale` where its random bits are at least `least`, else 0.
template <class T> static inline Vec<T> dropout_factor(const int16_t *random_bits, int16_t least, T scale) {
    typename Lanes<T>::bits narrow;
    std::memcpy(&narrow, random_bits, sizeof narrow);
    return __builtin_convertvector(narrow, typename Lanes<T>::ivec) >= least ? Vec<T>{} + scale : Vec<T>{};
}

// The inner loop of every GEMM: sums[M][N] += a[M, depth] @ b[depth, N]. V is a vector of elements T, or T itself; element
// [i, l] of a is at i * am + l * ak, row l of b at l * bk.
template <class V, class T, int M, int N>
static inline void add_matmul(int64_t depth, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, V (&sums)[M][N]) {
    for (int64_t l = 0; l < depth; l++) {
        V row[N];
        for (int j = 0; j < N; j++) {
            V v;  // std::memcpy to an element of row would keep row in memory
            std::memcpy(&v, b + l * bk + j * int64_t(sizeof(V) / sizeof(T)), sizeof(V));
            row[j] = v;
        }
        for (int i = 0; i < M; i++) {
            const T factor = a[i * am + l * ak];
            for (int j = 0; j < N; j++) sums[i][j] += factor * row[j];
        }
    }
}

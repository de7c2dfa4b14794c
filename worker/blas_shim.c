/* The three CBLAS products that libmlx calls, forwarded to OpenBLAS as the scipy-openblas32 wheel names them.
 *
 * libmlx finds its BLAS by symbol name. Loaded RTLD_GLOBAL before libmlx, this library stands in front of the
 * reference BLAS that ships with it. No libc and no headers: the build needs a compiler and nothing else.
 *
 * A product with one row or one column (every step of decode) goes to sgemv: sgemm would first copy the whole
 * weight into packed panels, more memory traffic than the product itself.
 */

typedef int blasint; /* scipy-openblas32 is the LP64 build, as is libmlx's reference BLAS. */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

extern void scipy_cblas_sgemm(blasint, blasint, blasint, blasint, blasint, blasint, float, const float *, blasint,
                              const float *, blasint, float, float *, blasint);
extern void scipy_cblas_sgemv(blasint, blasint, blasint, blasint, float, const float *, blasint, const float *,
                              blasint, float, float *, blasint);
extern void scipy_cblas_dgemm(blasint, blasint, blasint, blasint, blasint, blasint, double, const double *, blasint,
                              const double *, blasint, double, double *, blasint);
extern void scipy_cblas_cgemm(blasint, blasint, blasint, blasint, blasint, blasint, const void *, const void *,
                              blasint, const void *, blasint, const void *, void *, blasint);

/* Products that came through here: the proof that the interposition took effect. */
unsigned long longleaf_num_products;

static void count(void) { __atomic_fetch_add(&longleaf_num_products, 1, __ATOMIC_RELAXED); }

void cblas_sgemm(blasint order, blasint trans_a, blasint trans_b, blasint m, blasint n, blasint k, float alpha,
                 const float *a, blasint lda, const float *b, blasint ldb, float beta, float *c, blasint ldc) {
    count();
    if (order == ROW_MAJOR && m == 1 && k > 0) { /* c[n] = op(B)^T a */
        blasint step = trans_a == NO_TRANS ? 1 : lda;
        if (trans_b == NO_TRANS) /* B is [k, n] */
            scipy_cblas_sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
        else /* B is [n, k] */
            scipy_cblas_sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
    } else if (order == ROW_MAJOR && n == 1 && k > 0) { /* c[m], a column of row stride ldc = op(A) b */
        blasint step = trans_b == NO_TRANS ? ldb : 1;
        if (trans_a == NO_TRANS) /* A is [m, k] */
            scipy_cblas_sgemv(ROW_MAJOR, NO_TRANS, m, k, alpha, a, lda, b, step, beta, c, ldc);
        else /* A is [k, m] */
            scipy_cblas_sgemv(ROW_MAJOR, TRANS, k, m, alpha, a, lda, b, step, beta, c, ldc);
    } else {
        scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
}

void cblas_dgemm(blasint order, blasint trans_a, blasint trans_b, blasint m, blasint n, blasint k, double alpha,
                 const double *a, blasint lda, const double *b, blasint ldb, double beta, double *c, blasint ldc) {
    count();
    scipy_cblas_dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(blasint order, blasint trans_a, blasint trans_b, blasint m, blasint n, blasint k,
                 const void *alpha, const void *a, blasint lda, const void *b, blasint ldb, const void *beta,
                 void *c, blasint ldc) {
    count();
    scipy_cblas_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

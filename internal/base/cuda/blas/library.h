// cuBLASLt as a table of its functions, with the types of its header, and the two operations on it: choosing algorithms
// for a problem, and running one.
#ifndef CPRUN_BLAS_LIBRARY_H
#define CPRUN_BLAS_LIBRARY_H
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define CPRUN_BLAS(F) \
	F(cublasLtCreate) F(cublasLtDestroy) F(cublasLtGetVersion) F(cublasLtGetStatusName) F(cublasLtMatmul) \
	F(cublasLtMatmulAlgoGetHeuristic) F(cublasLtMatmulDescCreate) F(cublasLtMatmulDescDestroy) \
	F(cublasLtMatmulDescSetAttribute) F(cublasLtMatrixLayoutCreate) F(cublasLtMatrixLayoutDestroy) \
	F(cublasLtMatmulPreferenceCreate) F(cublasLtMatmulPreferenceDestroy) F(cublasLtMatmulPreferenceSetAttribute)

#define CPRUN_MEMBER(name) __typeof__(&name) name;
typedef struct { CPRUN_BLAS(CPRUN_MEMBER) } cprun_blas_t;

// cprun_blas_load fills the table from a library, or returns the reason for a failure.
static const char *cprun_blas_load(cprun_blas_t *t, const char *path) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) return dlerror();
#define CPRUN_FIND(name) if (!(t->name = (__typeof__(t->name))dlsym(lib, #name))) return "it has no function " #name;
	CPRUN_BLAS(CPRUN_FIND)
	return 0;
}
static size_t cprun_blas_version(const cprun_blas_t *t) { return t->cublasLtGetVersion(); }
static const char *cprun_blas_status(const cprun_blas_t *t, cublasStatus_t s) { return t->cublasLtGetStatusName(s); }
static cublasStatus_t cprun_blas_create(const cprun_blas_t *t, cublasLtHandle_t *h) { return t->cublasLtCreate(h); }
static cublasStatus_t cprun_blas_destroy(const cprun_blas_t *t, cublasLtHandle_t h) { return t->cublasLtDestroy(h); }

// A problem in cuBLASLt's column-major form. The operands are A, B, C, D.
typedef struct {
	uint64_t rows[4], cols[4];
	int64_t stride[4];
	uint32_t align[4]; // bytes
	cudaDataType_t type[4];
	cublasOperation_t op[2]; // of A and B
	uint64_t factors[2];     // of A and B in E4M3: addresses of a float for each row as stored; otherwise 0
	size_t workspace;
} cprun_product_t;

typedef struct {
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t at[4];
	cublasLtMatmulHeuristicResult_t choice; // cuBLASLt's first that fits the workspace
	int found;
} cprun_plan_t;

static void cprun_plan_free(const cprun_blas_t *t, cprun_plan_t *p) {
	for (int i = 0; i < 4; i++)
		if (p->at[i]) t->cublasLtMatrixLayoutDestroy(p->at[i]);
	if (p->desc) t->cublasLtMatmulDescDestroy(p->desc);
	free(p);
}

#define CPRUN_TRY(call) if ((s = (call)) != CUBLAS_STATUS_SUCCESS) return s

static cublasStatus_t cprun_plan_factors(const cprun_blas_t *t, cublasLtMatmulDesc_t desc, uint64_t a, uint64_t b) {
	cublasStatus_t s;
	CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a, sizeof a));
	return t->cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b, sizeof b);
}

static cublasStatus_t cprun_plan_choose(const cprun_blas_t *t, cublasLtHandle_t h, const cprun_product_t *x,
	cublasLtMatmulPreference_t pref, cprun_plan_t *p) {
	cublasStatus_t s;
	CPRUN_TRY(t->cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &x->op[0], sizeof x->op[0]));
	CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &x->op[1], sizeof x->op[1]));
	if (x->factors[0]) {
		const int32_t rows = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
		const int8_t fast = 1;
		CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &rows, sizeof rows));
		CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows, sizeof rows));
		CPRUN_TRY(t->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
		CPRUN_TRY(cprun_plan_factors(t, p->desc, x->factors[0], x->factors[1]));
	}
	static const cublasLtMatmulPreferenceAttributes_t aligned[4] = {
		CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
		CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
	for (int i = 0; i < 4; i++) {
		CPRUN_TRY(t->cublasLtMatrixLayoutCreate(&p->at[i], x->type[i], x->rows[i], x->cols[i], x->stride[i]));
		CPRUN_TRY(t->cublasLtMatmulPreferenceSetAttribute(pref, aligned[i], &x->align[i], sizeof x->align[i]));
	}
	CPRUN_TRY(t->cublasLtMatmulPreferenceSetAttribute(
		pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &x->workspace, sizeof x->workspace));
	// Partial sums over the inner dimension are not stored in a 16-bit result: it is rounded once, at the end.
	uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
	if (x->type[3] == CUDA_R_32F) sums = CUBLASLT_REDUCTION_SCHEME_MASK;
	CPRUN_TRY(
		t->cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums));
	enum { most = 8 };
	cublasLtMatmulHeuristicResult_t found[most];
	int n = 0;
	s = t->cublasLtMatmulAlgoGetHeuristic(
		h, p->desc, p->at[0], p->at[1], p->at[2], p->at[3], pref, most, found, &n);
	if (s == CUBLAS_STATUS_NOT_SUPPORTED) return CUBLAS_STATUS_SUCCESS; // nothing found
	if (s != CUBLAS_STATUS_SUCCESS) return s;
	for (int i = 0; i < n && !p->found; i++)
		if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= x->workspace) {
			p->choice = found[i];
			p->found = 1;
		}
	return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t cprun_plan_make(
	const cprun_blas_t *t, cublasLtHandle_t h, const cprun_product_t *x, cprun_plan_t **plan) {
	cublasLtMatmulPreference_t pref;
	cublasStatus_t s;
	CPRUN_TRY(t->cublasLtMatmulPreferenceCreate(&pref));
	cprun_plan_t *p = (cprun_plan_t *)calloc(1, sizeof *p);
	s = p ? cprun_plan_choose(t, h, x, pref, p) : CUBLAS_STATUS_ALLOC_FAILED;
	t->cublasLtMatmulPreferenceDestroy(pref);
	if (s != CUBLAS_STATUS_SUCCESS && p) cprun_plan_free(t, p);
	else *plan = p;
	return s;
}

static cublasStatus_t cprun_plan_run(const cprun_blas_t *t, cublasLtHandle_t h, const cprun_plan_t *p, float beta,
	uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t a_factors, uint64_t b_factors, uint64_t workspace,
	void *stream) {
	const cublasLtMatmulHeuristicResult_t *r = &p->choice;
	const float alpha = 1;
	cublasStatus_t s;
	if (a_factors) CPRUN_TRY(cprun_plan_factors(t, p->desc, a_factors, b_factors));
	return t->cublasLtMatmul(h, p->desc, &alpha, (void *)a, p->at[0], (void *)b, p->at[1], &beta, (void *)c, p->at[2],
		(void *)d, p->at[3], &r->algo, (void *)workspace, r->workspaceSize, (cudaStream_t)stream);
}
#endif

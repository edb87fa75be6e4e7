// A C interface to cudnn-frontend. Functions do not throw. They return 0, or another number with the reason in err, a
// text of at most n bytes.
#ifndef CPRUN_DNN_H
#define CPRUN_DNN_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The tensors of a plan. The offsets of ragged tensors follow, in the same order, and then the lengths.
enum {
	CPRUN_DNN_Q, CPRUN_DNN_K, CPRUN_DNN_V, CPRUN_DNN_O, CPRUN_DNN_STATS,
	CPRUN_DNN_DO, CPRUN_DNN_DQ, CPRUN_DNN_DK, CPRUN_DNN_DV,
	CPRUN_DNN_TENSORS,
	CPRUN_DNN_LEN_Q = 2 * CPRUN_DNN_TENSORS, CPRUN_DNN_LEN_K,
	CPRUN_DNN_POINTERS
};

// A problem. Query i sees key j if -left < j - i - shift <= right. shift is 0, or kv - q with bottom_right; a negative
// bound means none.
typedef struct {
	int backward, half; // half: float16, otherwise bfloat16
	int64_t batch, heads, kv_heads, q, kv, dim, dim_v;
	int64_t stride[CPRUN_DNN_TENSORS][3]; // batch, seq, head, in elements
	int64_t left, right;
	int bottom_right, deterministic;
	int unified;              // one node for all of attention instead of a graph of many
	int loose;                // ragged: workspace for batch times q and kv rows
	int64_t total_q, total_kv; // above 0: ragged, total rows over all sequences
	float scale;
} cprun_dnn_desc;

int cprun_dnn_load(size_t *version, char *err, size_t n);
int cprun_dnn_open(void **handle, void *stream, char *err, size_t n);
int cprun_dnn_close(void *handle, char *err, size_t n);
int cprun_dnn_build(void **plan, int64_t *workspace, void *handle, const cprun_dnn_desc *d, char *err, size_t n);
int cprun_dnn_execute(const void *plan, void *handle, const uint64_t pointers[CPRUN_DNN_POINTERS], uint64_t workspace,
	char *err, size_t n);
void cprun_dnn_free(void *plan);

#ifdef __cplusplus
}
#endif
#endif

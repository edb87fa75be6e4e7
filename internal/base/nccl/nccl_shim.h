#ifndef CPRUN_NCCL_SHIM_H
#define CPRUN_NCCL_SHIM_H
#include <nccl.h>
#include <stdint.h>

// One message of a group, at a device address.
typedef struct {
	uint64_t addr;
	size_t bytes;
	int peer, send;
} cprun_nccl_message;

// cprun_nccl_load returns NULL, or the reason why the library cannot be used.
const char *cprun_nccl_load(void);

ncclResult_t cprun_nccl_version(int *v);
ncclResult_t cprun_nccl_id(ncclUniqueId *id);
const char *cprun_nccl_text(ncclResult_t r);
const char *cprun_nccl_detail(void);

ncclResult_t cprun_nccl_init(ncclComm_t *c, int ranks, const void *id, int rank, int max_ctas, const char *name);
ncclResult_t cprun_nccl_state(ncclComm_t c, ncclResult_t *state);
ncclResult_t cprun_nccl_destroy(ncclComm_t c);
ncclResult_t cprun_nccl_abort(ncclComm_t c);

ncclResult_t cprun_nccl_exchange(ncclComm_t c, void *stream, const cprun_nccl_message *m, int n);
ncclResult_t cprun_nccl_all_reduce(ncclComm_t c, void *stream, uint64_t buf, size_t count, int type, int op);
ncclResult_t cprun_nccl_all_gather(ncclComm_t c, void *stream, uint64_t dst, uint64_t src, size_t bytes);
ncclResult_t cprun_nccl_reduce_scatter(
	ncclComm_t c, void *stream, uint64_t dst, uint64_t src, size_t count, int type, int op);
ncclResult_t cprun_nccl_broadcast(ncclComm_t c, void *stream, uint64_t buf, size_t bytes, int root);
#endif

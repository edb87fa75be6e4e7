//go:build cuda

#define _GNU_SOURCE
#include "nccl_shim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTIONS(f) \
	f(GetVersion) f(GetUniqueId) f(GetErrorString) f(GetLastError) \
	f(CommInitRankConfig) f(CommGetAsyncError) f(CommDestroy) f(CommAbort) \
	f(GroupStart) f(GroupEnd) f(Send) f(Recv) f(AllReduce) f(AllGather) f(ReduceScatter) f(Broadcast)

static struct {
#define MEMBER(name) __typeof__(&nccl##name) name;
	FUNCTIONS(MEMBER)
} nccl;

const char *cprun_nccl_load(void) {
	static char why[512];
	setenv("NCCL_NVLS_ENABLE", "0", 0);
	setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
	void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		snprintf(why, sizeof why, "%s", dlerror());
		return why;
	}
#define LOOKUP(name) \
	if (!(nccl.name = (__typeof__(&nccl##name))dlsym(lib, "nccl" #name))) { \
		snprintf(why, sizeof why, "libnccl.so.2 has no nccl%s", #name); \
		return why; \
	}
	FUNCTIONS(LOOKUP)
	return NULL;
}

ncclResult_t cprun_nccl_version(int *v) { return nccl.GetVersion(v); }
ncclResult_t cprun_nccl_id(ncclUniqueId *id) { return nccl.GetUniqueId(id); }
const char *cprun_nccl_text(ncclResult_t r) { return nccl.GetErrorString(r); }
const char *cprun_nccl_detail(void) { return nccl.GetLastError(NULL); }

ncclResult_t cprun_nccl_init(ncclComm_t *c, int ranks, const void *id, int rank, int max_ctas, const char *name) {
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	config.blocking = 0;
	config.commName = name;
	if (max_ctas > 0) config.minCTAs = 1, config.maxCTAs = max_ctas;
	ncclUniqueId copy;
	memcpy(&copy, id, sizeof copy);
	return nccl.CommInitRankConfig(c, ranks, copy, rank, &config);
}

ncclResult_t cprun_nccl_state(ncclComm_t c, ncclResult_t *state) { return nccl.CommGetAsyncError(c, state); }
ncclResult_t cprun_nccl_destroy(ncclComm_t c) { return nccl.CommDestroy(c); }
ncclResult_t cprun_nccl_abort(ncclComm_t c) { return nccl.CommAbort(c); }

#define PTR(x) ((void *)(uintptr_t)(x))

// One call from Go begins and ends a group, since NCCL keeps groups per thread.
ncclResult_t cprun_nccl_exchange(ncclComm_t c, void *stream, const cprun_nccl_message *m, int n) {
	ncclResult_t first = nccl.GroupStart();
	if (first != ncclSuccess) return first;
	for (int i = 0; i < n && (first == ncclSuccess || first == ncclInProgress); i++)
		first = m[i].send ? nccl.Send(PTR(m[i].addr), m[i].bytes, ncclUint8, m[i].peer, c, stream)
		                  : nccl.Recv(PTR(m[i].addr), m[i].bytes, ncclUint8, m[i].peer, c, stream);
	ncclResult_t end = nccl.GroupEnd();
	return first == ncclSuccess || first == ncclInProgress ? end : first;
}

ncclResult_t cprun_nccl_all_reduce(ncclComm_t c, void *stream, uint64_t buf, size_t count, int type, int op) {
	return nccl.AllReduce(PTR(buf), PTR(buf), count, type, op, c, stream);
}

ncclResult_t cprun_nccl_all_gather(ncclComm_t c, void *stream, uint64_t dst, uint64_t src, size_t bytes) {
	return nccl.AllGather(PTR(src), PTR(dst), bytes, ncclUint8, c, stream);
}

ncclResult_t cprun_nccl_reduce_scatter(
	ncclComm_t c, void *stream, uint64_t dst, uint64_t src, size_t count, int type, int op) {
	return nccl.ReduceScatter(PTR(src), PTR(dst), count, type, op, c, stream);
}

ncclResult_t cprun_nccl_broadcast(ncclComm_t c, void *stream, uint64_t buf, size_t bytes, int root) {
	return nccl.Broadcast(PTR(buf), PTR(buf), bytes, ncclUint8, root, c, stream);
}

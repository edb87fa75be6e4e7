// Thin C functions around the driver: each makes the context current, and is one call from Go.
#ifndef CPRUN_DRIVER_H
#define CPRUN_DRIVER_H
#include <cuda.h>
#include <stdint.h>

static inline CUresult cprun_use(CUcontext ctx) {
	CUcontext now;
	CUresult r = cuCtxGetCurrent(&now);
	return r != CUDA_SUCCESS || now == ctx ? r : cuCtxSetCurrent(ctx);
}

#define CPRUN_IN(ctx, call) \
	CUresult r = cprun_use(ctx); \
	return r != CUDA_SUCCESS ? r : (call)

#define CPRUN_PARAMS 32

typedef struct {
	unsigned int grid[3], block[3];
	unsigned int shared;             // bytes of dynamic shared memory
	int params;                      // 0: args has the layout of the kernel's parameters
	unsigned short at[CPRUN_PARAMS]; // otherwise, the offset of each parameter in args
} cprun_launch_t;

static inline CUresult cprun_launch(
	CUcontext ctx, CUstream stream, CUfunction f, const cprun_launch_t *l, void *args, size_t bytes) {
	CUresult r = cprun_use(ctx);
	if (r != CUDA_SUCCESS) return r;
	CUlaunchConfig c = {0};
	c.gridDimX = l->grid[0]; c.gridDimY = l->grid[1]; c.gridDimZ = l->grid[2];
	c.blockDimX = l->block[0]; c.blockDimY = l->block[1]; c.blockDimZ = l->block[2];
	c.sharedMemBytes = l->shared;
	c.hStream = stream;
	if (l->params) {
		void *params[CPRUN_PARAMS];
		for (int i = 0; i < l->params; i++) params[i] = (char *)args + l->at[i];
		return cuLaunchKernelEx(&c, f, params, NULL);
	}
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, args, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
	return cuLaunchKernelEx(&c, f, NULL, extra);
}

static inline CUresult cprun_copy(CUcontext ctx, CUstream s, CUdeviceptr dst, CUdeviceptr src, size_t n) {
	CPRUN_IN(ctx, cuMemcpyAsync(dst, src, n, s));
}
static inline CUresult cprun_memset(CUcontext ctx, CUstream s, CUdeviceptr dst, unsigned char x, size_t n) {
	CPRUN_IN(ctx, cuMemsetD8Async(dst, x, n, s));
}
static inline CUresult cprun_event_new(CUcontext ctx, CUevent *e, unsigned int flags) {
	CPRUN_IN(ctx, cuEventCreate(e, flags));
}
static inline CUresult cprun_event_free(CUcontext ctx, CUevent e) { CPRUN_IN(ctx, cuEventDestroy(e)); }
static inline CUresult cprun_event_record(CUcontext ctx, CUevent e, CUstream s) { CPRUN_IN(ctx, cuEventRecord(e, s)); }
static inline CUresult cprun_event_query(CUcontext ctx, CUevent e) { CPRUN_IN(ctx, cuEventQuery(e)); }
static inline CUresult cprun_event_sync(CUcontext ctx, CUevent e) { CPRUN_IN(ctx, cuEventSynchronize(e)); }
static inline CUresult cprun_event_elapsed(CUcontext ctx, float *ms, CUevent a, CUevent b) {
	CPRUN_IN(ctx, cuEventElapsedTime(ms, a, b));
}
static inline CUresult cprun_stream_wait(CUcontext ctx, CUstream s, CUevent e) {
	CPRUN_IN(ctx, cuStreamWaitEvent(s, e, 0));
}
static inline CUresult cprun_stream_free(CUcontext ctx, CUstream s) { CPRUN_IN(ctx, cuStreamDestroy(s)); }
static inline CUresult cprun_module_load(CUcontext ctx, CUmodule *m, const void *image) {
	CPRUN_IN(ctx, cuModuleLoadData(m, image));
}
static inline CUresult cprun_module_function(CUcontext ctx, CUfunction *f, CUmodule m, const char *name) {
	CPRUN_IN(ctx, cuModuleGetFunction(f, m, name));
}
static inline CUresult cprun_function_set(CUcontext ctx, CUfunction f, CUfunction_attribute a, int v) {
	CPRUN_IN(ctx, cuFuncSetAttribute(f, a, v));
}
static inline CUresult cprun_function_get(CUcontext ctx, int *v, CUfunction_attribute a, CUfunction f) {
	CPRUN_IN(ctx, cuFuncGetAttribute(v, a, f));
}
static inline CUresult cprun_occupancy(CUcontext ctx, int *blocks, CUfunction f, int threads, size_t shared) {
	CPRUN_IN(ctx, cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared));
}

// Own C names, so that Go does not depend on the version that a macro of cuda.h selects.
static inline CUresult cprun_current(CUcontext *ctx) { return cuCtxGetCurrent(ctx); }
static inline const char *cprun_error_name(CUresult r) {
	const char *s = 0;
	cuGetErrorName(r, &s);
	return s ? s : "unknown error";
}
static inline const char *cprun_error_text(CUresult r) {
	const char *s = 0;
	cuGetErrorString(r, &s);
	return s ? s : "";
}
#endif

// This file precedes the toolkit's cuda.h on the include path, so that gorgonia.org/cu v0.9.6, written for CUDA 11,
// compiles with CUDA 13. By macros, CUDA 13 changes the signatures of five functions that it calls; the driver still
// has the old ones. This file removes the macros and declares the old functions.
#ifndef CPRUN_CUDA_H
#define CPRUN_CUDA_H
#include_next <cuda.h>

#if CUDA_VERSION >= 13000
#undef cuCtxCreate
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphGetEdges
#undef cuGraphAddDependencies

#ifdef __cplusplus
extern "C" {
#endif
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuMemAdvise(CUdeviceptr ptr, size_t count, CUmem_advise advice, CUdevice dev);
CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr ptr, size_t count, CUdevice dev, CUstream stream);
CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *edges);
CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count);
#ifdef __cplusplus
}
#endif
#define cuCtxCreate cuCtxCreate_v2
#endif
#endif

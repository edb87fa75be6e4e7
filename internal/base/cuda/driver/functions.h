// The functions of libcuda that this binary calls. If cuda.h maps a name to a version, such as cuMemAlloc to
// cuMemAlloc_v2, the list means that version. A function that is missing here is an undefined reference at link time.
#ifndef CPRUN_DRIVER_FUNCTIONS_H
#define CPRUN_DRIVER_FUNCTIONS_H

// The functions that cprun calls, directly or through gorgonia.org/cu. A driver without one of them is too old.
#define CPRUN_DRIVER_NEEDED(F) \
	F(cuInit) F(cuDriverGetVersion) F(cuGetErrorName) F(cuGetErrorString) F(cuDeviceGet) F(cuDeviceGetCount) \
	F(cuDeviceGetName) F(cuDeviceGetAttribute) F(cuDeviceTotalMem) F(cuDeviceCanAccessPeer) \
	F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxRelease) F(cuCtxGetCurrent) F(cuCtxSetCurrent) \
	F(cuCtxEnablePeerAccess) F(cuCtxGetStreamPriorityRange) F(cuMemAlloc) F(cuMemFree) F(cuMemGetInfo) \
	F(cuMemHostAlloc) F(cuMemFreeHost) F(cuMemHostRegister) F(cuMemHostUnregister) F(cuMemHostGetDevicePointer) \
	F(cuMemcpyAsync) F(cuMemsetD8Async) F(cuPointerGetAttribute) F(cuIpcGetMemHandle) F(cuIpcOpenMemHandle) \
	F(cuIpcCloseMemHandle) F(cuStreamCreateWithPriority) F(cuStreamDestroy) F(cuStreamQuery) F(cuStreamWaitEvent) \
	F(cuStreamWaitValue64) F(cuStreamWriteValue64) F(cuStreamBeginCapture) F(cuStreamEndCapture) \
	F(cuGraphInstantiateWithParams) F(cuGraphDestroy) F(cuGraphLaunch) F(cuGraphExecDestroy) F(cuEventCreate) \
	F(cuEventDestroy) F(cuEventRecord) F(cuEventQuery) F(cuEventSynchronize) F(cuEventElapsedTime) \
	F(cuModuleLoadData) F(cuModuleGetFunction) F(cuModuleUnload) F(cuFuncSetAttribute) F(cuFuncGetAttribute) \
	F(cuOccupancyMaxActiveBlocksPerMultiprocessor) F(cuLaunchKernelEx) F(cuTensorMapEncodeTiled)

// Functions to which only gorgonia.org/cu refers, and which nothing calls.
#define CPRUN_DRIVER_UNUSED(F) \
	F(cuArray3DCreate) F(cuArray3DGetDescriptor) F(cuArrayCreate) F(cuArrayDestroy) F(cuArrayGetDescriptor) \
	F(cuCtxCreate) F(cuCtxDestroy) F(cuCtxDisablePeerAccess) F(cuCtxGetApiVersion) F(cuCtxGetCacheConfig) \
	F(cuCtxGetDevice) F(cuCtxGetFlags) F(cuCtxGetLimit) F(cuCtxGetSharedMemConfig) F(cuCtxPopCurrent) \
	F(cuCtxPushCurrent) F(cuCtxResetPersistingL2Cache) F(cuCtxSetCacheConfig) F(cuCtxSetLimit) \
	F(cuCtxSetSharedMemConfig) F(cuCtxSynchronize) F(cuDeviceGetP2PAttribute) F(cuDeviceGetUuid) \
	F(cuDevicePrimaryCtxGetState) F(cuDevicePrimaryCtxReset) F(cuDevicePrimaryCtxSetFlags) F(cuFuncSetCacheConfig) \
	F(cuFuncSetSharedMemConfig) F(cuGraphAddChildGraphNode) F(cuGraphAddDependencies) F(cuGraphAddEmptyNode) \
	F(cuGraphAddHostNode) F(cuGraphAddKernelNode) F(cuGraphAddMemcpyNode) F(cuGraphAddMemsetNode) F(cuGraphClone) \
	F(cuGraphCreate) F(cuGraphDestroyNode) F(cuGraphGetEdges) F(cuLaunchKernel) F(cuLinkAddData) F(cuLinkAddFile) \
	F(cuLinkComplete) F(cuLinkCreate) F(cuLinkDestroy) F(cuMemAdvise) F(cuMemAllocManaged) F(cuMemAllocPitch) \
	F(cuMemGetAddressRange) F(cuMemPrefetchAsync) F(cuMemcpy) F(cuMemcpy2D) F(cuMemcpy2DAsync) \
	F(cuMemcpy2DUnaligned) F(cuMemcpy3D) F(cuMemcpy3DAsync) F(cuMemcpy3DPeer) F(cuMemcpy3DPeerAsync) \
	F(cuMemcpyAtoA) F(cuMemcpyAtoD) F(cuMemcpyAtoH) F(cuMemcpyAtoHAsync) F(cuMemcpyDtoA) F(cuMemcpyDtoD) \
	F(cuMemcpyDtoDAsync) F(cuMemcpyDtoH) F(cuMemcpyDtoHAsync) F(cuMemcpyHtoA) F(cuMemcpyHtoAAsync) F(cuMemcpyHtoD) \
	F(cuMemcpyHtoDAsync) F(cuMemcpyPeer) F(cuMemcpyPeerAsync) F(cuMemsetD16) F(cuMemsetD16Async) F(cuMemsetD2D16) \
	F(cuMemsetD2D16Async) F(cuMemsetD2D32) F(cuMemsetD2D32Async) F(cuMemsetD2D8) F(cuMemsetD2D8Async) \
	F(cuMemsetD32) F(cuMemsetD32Async) F(cuMemsetD8) F(cuModuleGetGlobal) F(cuModuleGetSurfRef) \
	F(cuModuleGetTexRef) F(cuModuleLoad) F(cuModuleLoadDataEx) F(cuModuleLoadFatBinary) \
	F(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) F(cuPointerSetAttribute) F(cuStreamAttachMemAsync) \
	F(cuStreamCreate) F(cuStreamGetFlags) F(cuStreamGetPriority) F(cuStreamSynchronize) F(cuStreamWaitValue32) \
	F(cuStreamWriteValue32) F(cuSurfRefGetArray) F(cuSurfRefSetArray) F(cuTexRefGetAddress) \
	F(cuTexRefGetAddressMode) F(cuTexRefGetArray) F(cuTexRefGetBorderColor) F(cuTexRefGetFilterMode) \
	F(cuTexRefGetFlags) F(cuTexRefGetFormat) F(cuTexRefGetMaxAnisotropy) F(cuTexRefSetAddress) \
	F(cuTexRefSetAddress2D) F(cuTexRefSetAddressMode) F(cuTexRefSetArray) F(cuTexRefSetBorderColor) \
	F(cuTexRefSetFilterMode) F(cuTexRefSetFlags) F(cuTexRefSetFormat) F(cuTexRefSetMaxAnisotropy) \
	F(cuTexRefSetMipmapFilterMode) F(cuTexRefSetMipmapLevelBias) F(cuTexRefSetMipmapLevelClamp)
#endif

// Package nccl is what cprun needs of NCCL: communicators that never block the caller, the calls
// on them, and their errors. The library is looked for when it is first used, so that a
// program starts where it is not installed. The package is empty without the build tag cuda.
//
// Some of NCCL's behaviour is chosen by environment variables alone. Two of them are set before
// the library is loaded, unless they are set already:
//
//	NCCL_NVLS_ENABLE=0            no multicast in the switch, which not every machine lets its
//	                              users have
//	NCCL_LAUNCH_ORDER_IMPLICIT=1  kernels of several communicators start on the device in the
//	                              order of the calls, so that where all ranks make the calls
//	                              in one order, none holds a place that another waits for
package nccl

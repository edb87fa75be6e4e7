// Package nccl wraps NCCL: communicators that never block the caller, their calls, and errors. The first use loads the
// library, so a program starts without it. Comm is the type to know:
//
//	c, err := nccl.Init(dev, id, rank, size, nccl.Config{})
//	err = c.AllReduce(stream, address, count, tensor.F32, nccl.Sum)
//
// The package is empty without the build tag cuda. Before it loads NCCL, it sets two environment variables that have no
// API, unless they are already set:
//
//	NCCL_NVLS_ENABLE=0            no multicast in the switch, which some machines do not allow
//	NCCL_LAUNCH_ORDER_IMPLICIT=1  kernels of several communicators start in the order of the
//	                              calls, so that ranks with the same order do not deadlock
package nccl

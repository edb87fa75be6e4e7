// Package base groups packages that are independent of training. They import no package of cprun outside of base,
// except for tensor and partition.
//
//	files        opens and replaces files       safetensors  reads and writes tensors
//	terminal     escapes text for terminals     readable     formats numbers and times
//	admission    limits unproven connections    cuda, nccl   CUDA and its libraries
//	half, heap   16-bit floats, host memory     ulimit       limits of open files
//	near, must   compares floats, ends tests    hostile      tests of hostile inputs
//	cores        binds a process to its GPU's NUMA node
//	splitmix     derives random numbers from integers
package base

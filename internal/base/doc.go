// Package base is a wing of packages without a word about training.
//
//	files        opens all files       safetensors         reads and writes tensors
//	terminal     prints safely         readable            numbers and times for people
//	admission    unproven connections  cuda, nccl          CUDA and its libraries
//	half, heap   16-bit floats, memory near, hostile, ulimit  for tests, and limits of files
package base

// Package cuda is what cprun needs of the CUDA driver, above gorgonia.org/cu where that
// has it and in thin C of its own where it has not: the primary context of a device, one
// static pool of its memory, pinned host memory, streams and events as tensor wants
// them, modules, and launches with any arguments. It is empty without the build tag cuda.
//
// A call makes the context it needs current by itself, so any goroutine may call. Errors
// carry the call, the device and the cause. Work that cannot be queued poisons its stream, as
// tensor.Stream says, and a device that has failed fails every later call.
package cuda

// Package cuda wraps the CUDA driver: a device's primary context, a static pool of its memory, pinned host memory,
// streams and events for package tensor, modules, and kernel launches. It uses gorgonia.org/cu, and C for calls that
// gorgonia.org/cu lacks. Device is the type to know:
//
//	dev, err := cuda.Open(0)
//	stream, err := dev.NewStream("compute", false)
//	stream.Launch(f, cuda.Launch{Grid: cuda.Dim{X: 1}, Block: cuda.Dim{X: 32}}, new(cuda.Args).Int(42))
//
// Any goroutine may call, since each call makes its context current. Errors name the call, the device and the cause.
// Work that cannot be queued poisons its stream; see tensor.Stream. After a device has failed, every later call fails.
// The package is empty without the build tag cuda.
package cuda

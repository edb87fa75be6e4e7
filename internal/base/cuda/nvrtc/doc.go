// Package nvrtc compiles CUDA C++ with NVIDIA's runtime compiler to machine code of one architecture, and stores the
// results on disk. It needs neither a driver nor a GPU:
//
//	c, err := nvrtc.Open()
//	cache := nvrtc.Cache{Compiler: c, Dir: dir}
//	cubin, err := cache.Compile("norm.cu", source, headers, []string{"--gpu-architecture=sm_90a"})
//
// Open loads the library. The package needs the build tag cuda.
package nvrtc

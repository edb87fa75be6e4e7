// Package nvrtc compiles CUDA C++ to machine code of one architecture with NVIDIA's run time
// compiler, and keeps what it compiled on disk. It needs neither a driver nor a GPU, so that
// every kernel can be compiled on any machine. The library is loaded when it is first opened;
// it is typed by nvrtc.h, and this package is empty without the build tag cuda but for the
// reading of the assembler's log.
package nvrtc

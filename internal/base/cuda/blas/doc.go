// Package blas multiplies matrices on a GPU with cuBLASLt, on one stream. What cuBLASLt chose for
// a problem is kept, so that a product costs one call. The library is loaded when it is first
// used; without the build tag cuda only the problems can be described.
package blas

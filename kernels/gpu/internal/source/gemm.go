package source

// gemm are the matrix products that cuBLASLt does not do.
var gemm = []Program{{Name: "gemm_simple", File: "gemm_simple.cu"}}

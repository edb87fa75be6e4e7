package source

// topics are the lists of programs, one file of this package each.
var topics = [][]Program{gemm, fused, ops, flash, hopper}

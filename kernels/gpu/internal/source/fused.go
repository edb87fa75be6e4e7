package source

// fused is what stands between cuDNN and the accumulators.
var fused = []Program{{Name: "fused", File: "fused.cu"}}

package gpu

// The device memory that Ops holds, in bytes, each in one allocation made with it. Plans of
// builds without CUDA count it too.
const (
	LinearWorkspace = 64 << 20 // for matrix products
	OpsWorkspace    = 32 << 20 // for partial results of the other operations
)

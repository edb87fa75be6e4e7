package backends

// Facts about versions of cuDNN that more than one rule depends on. Plans and kernels call the functions of this
// file, so that each version is written once.
var (
	// OldestCUDNN is the oldest version that the rules know.
	OldestCUDNN = V(9, 0, 0)
	// packsSince takes 64-bit offsets of documents and a packed LSE.
	packsSince = V(9, 6, 0)
	// clearsSince clears the workspace of the backward pass of packed documents itself.
	clearsSince = V(9, 18, 0)
	// matrixUntil ends the versions whose deterministic backward pass on Hopper keeps the matrix dP.
	matrixUntil = V(9, 25, 0)
)

// PossibleCUDNN reports whether v may be a version of cuDNN: anything else is a typing error.
func PossibleCUDNN(v Version) bool { return v >= V(5, 0, 0) && v < V(20, 0, 0) }

// Packs reports whether packed documents can go to cuDNN as such, many in one call. sm120 and sm121
// lack it in the backward pass (cudnn-frontend 1.23.0). Elsewhere documents go one by one, each
// length under a plan of its own.
func Packs(arch int, cudnn Version) bool { return cudnn >= packsSince && arch/10 != 12 }

// KeepsMatrix reports whether the deterministic backward pass of cuDNN keeps a matrix of all pairs
// of a call in its workspace: 2 bytes for each query, key and head.
func KeepsMatrix(arch int, cudnn Version) bool { return arch == 90 && cudnn < matrixUntil }

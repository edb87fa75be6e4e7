package kernels

import "github.com/cprun/cprun/tensor"

// A Router turns a token's logits for E experts into k choices and their weights. A score is the softmax of the logits
// over all experts. The weight of a choice is its score.
type Router struct {
	Sigmoid   bool    // a score is the sigmoid of its logit (arXiv:2412.19437)
	Normalize bool    // weights are divided by their sum; with Sigmoid, by that plus 1e-20
	Scale     float64 // multiplies the weights; 0: 1
	// Groups cuts the experts into so many groups of equal size. Those of the Kept groups with the largest sums of their
	// two largest scores, with correction, can be chosen. 0 or 1: all.
	Groups, Kept int
}

// Pairs are P = T*k pairs of a token and a choice, sorted by expert. Those of one expert are in the order of tokens.
type Pairs struct {
	Tokens tensor.View // int32 [1, P, 1, 1]: the token at each place
	Places tensor.View // int32 [1, T, k, 1]: the place of each pair
	Starts tensor.View // int32 [1, E+1, 1, 1]: the first place of each expert, and P
}

// An Operand of a grouped product has a row for each place, or ByToken for each token, read at each of its places.
type Operand struct {
	tensor.View
	ByToken bool
	Factors tensor.View // of a matrix in E4M3, as in Scaled; the zero View: it is one of activations
}

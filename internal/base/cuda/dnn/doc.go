// Package dnn runs the fused attention of cuDNN 9 on a stream. It says which calls of cuDNN make
// up a tile, builds plans for the forward and the backward pass of one problem each, and keeps
// them. cuDNN is loaded when it is first used, so that a binary starts without it. Without the
// build tag cuda only the problems can be described.
package dnn

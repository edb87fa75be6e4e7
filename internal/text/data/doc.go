// Package data turns files of tokens or text into the samples of a training run. Each rank reads only the tokens of its
// shard.
//
// Open returns a Dataset, New a Loader that cuts it into samples, and Loader.Load reads a rank's part of one.
//
// The files of a glob, sorted by name, are one long sequence of tokens. Sample i of sequence length S is the tokens i*S
// to i*S+S, one more than S: the targets are the tokens shifted by one. They are shifted before the sequence is cut for
// the ranks, since the target of a rank's last token is on another rank.
//
// Documents that are never cut, such as conversations, are packed into samples of at most S tokens instead, best-fit
// decreasing within windows of the shuffled documents. The packing depends on the seed and the lengths alone.
//
// The position in the data is one integer: the number of samples consumed since the start of training. Loader.Index
// maps it to a sample, for any number of ranks. A checkpoint stores this integer alone.
//
// Files are read with pread, not mapped: a file that is truncated during a run then gives an error, not a SIGBUS.
package data

// Package data turns files of tokens or text into the samples of a training run, of which
// each rank reads the tokens that it holds and no others.
//
// The files that a glob matches, sorted by name, are one long sequence of tokens. Sample i of
// sequence length S is its tokens i*S to i*S+S, one more than S: the targets are the same
// tokens one place on. They are shifted here, before the sequence is cut for the ranks, since
// a rank's last token has its target on another rank.
//
// The position in the data is one integer, the number of samples consumed since the start of
// training; Loader.Index maps it to a sample, whatever the number of ranks, without any state
// of its own. A checkpoint holds that integer and nothing else of this package.
//
// Files are read with pread and never mapped: a file that is cut short while a run reads it
// is then an error with a name and not a SIGBUS.
package data
